"""The place where requests begin: by the workers' roles, or with `--layout auto` by prediction.

A layout is asked once per request; what happens to a request under way is decided by roles. Under auto every
worker can do both, and each request goes where it is predicted to be best: what workers say, and what this
gateway has sent them since, becomes the snapshot by which `gateway.routing.placement` decides, and the
workers' preferences follow the load (`gateway.routing.preference`). Both predict from the step times that the
workers measured at their start, times the pace of their steps of late. A preference acts at the next
placement. Where nothing can be predicted, roles decide.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from eyas.common.step_times import StepPace, StepRates, mean_pace
from eyas.common.types import Role
from gateway.backends.delivery import TokenTimes
from gateway.observe.metrics import PlacementMetrics
from gateway.routing import router
from gateway.routing.capacity import RequestMix, within_reach
from gateway.routing.in_flight import UnderWay
from gateway.routing.placement import AdmissionPreference, LatencyTargets, MeasuredRates, WorkerPlace, place
from gateway.routing.preference import FADE, DemandMeter, PaceMemory, estimates, prefer, preferring
from gateway.routing.router import RequestRoute, RouterCandidate

THINK_EVERY_S = 1.0
"""How often preferences are thought over, or a tenth of the time where many workers make it take long."""
_log = logging.getLogger("eyas.gateway")


class RequestLayout(Protocol):
    """Chooses the workers of new requests. No method waits."""

    def route(self, prompt: int, workers: Sequence[RouterCandidate]) -> RequestRoute | None:
        """The workers for a new prompt of `prompt` tokens; None while no worker and no pair can serve it."""
        ...

    def placed(self, route: RequestRoute, prompt: int, missing: int) -> None:
        """A request has been sent there, whose prompt's `missing` tokens are to be computed."""
        ...

    def ended(self, route: RequestRoute, pace: TokenTimes) -> None:
        """A request has ended that began there, however it ended."""
        ...


class StaticLayout(RequestLayout):
    """Routing by roles: a decode worker, and a prefill worker if that one computes no prompts."""

    def route(self, prompt: int, workers: Sequence[RouterCandidate]) -> RequestRoute | None:
        return router.route(workers)

    def placed(self, route: RequestRoute, prompt: int, missing: int) -> None:
        """Does nothing."""

    def ended(self, route: RequestRoute, pace: TokenTimes) -> None:
        """Does nothing."""


class AutoLayout(RequestLayout):
    """`preferences`: by worker; one that is not named takes what comes.

    Its owner runs `run` as a task: without it no preference changes.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[RouterCandidate]],
        targets: LatencyTargets,
        metrics: PlacementMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`workers`: the ones that may get requests now. `clock`: seconds."""
        self._workers = workers
        self._targets = targets
        self._metrics = metrics
        self._clock = clock
        self._demand = DemandMeter(clock())
        self._steps, self._tokens = 0.0, 0.0  # fading sums over answers
        self._paces, self._pace = PaceMemory(), StepPace()  # the pace is that of the last look
        self._thought: tuple[RequestMix, StepPace, frozenset[str]] | None = None
        self._reach: LatencyTargets | None = None  # of a step, of the last thought; None: as they were given
        self._bears: list[float] = []  # of the last thought, by the number of workers that prefer prompts
        self._answer = 0.0  # mean steps of an answer, as of the last thought; 0.0: not known
        self.preferences: dict[str, AdmissionPreference] = {}

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step gives a sequence, in the mean: more than one where drafts are accepted."""
        return self._tokens / self._steps if self._steps else 1.0

    # --- requests -------------------------------------------------------------------------------------------

    def route(self, prompt: int, workers: Sequence[RouterCandidate]) -> RequestRoute | None:
        """Routes by prediction; by roles without rates, or if every worker is full: one then refuses it."""
        rates = self._rates(workers)
        placement = None
        if rates is not None:
            sound = [worker for worker in workers if not worker.broken]
            places = [place_of(worker, self._preference(worker)) for worker in sound]
            rates = dataclasses.replace(rates, targets=self._within_reach(rates.targets))
            placement = place(prompt, places, rates, _meet(workers))
        if placement is None:
            return router.route(workers)
        return RequestRoute(
            placement.decode, placement.prefill, placement.ttft_s, placement.tpot_s / self.tokens_per_step
        )

    def placed(self, route: RequestRoute, prompt: int, missing: int) -> None:
        """Counts the request in the mix that preferences are chosen for."""
        self._demand.add_request(self._clock(), prompt, missing)
        self._metrics.placements.labels(_kind(route)).inc()

    def ended(self, route: RequestRoute, pace: TokenTimes) -> None:
        """Counts its answer, and compares what was predicted with what came."""
        if not pace.steps:
            return
        self._demand.answered(pace.steps)
        self._steps = FADE * self._steps + pace.steps
        self._tokens = FADE * self._tokens + pace.tokens
        if pace.ttft_s is not None:
            self._demand.targets.ended(self._clock(), pace.began, self._met(pace.ttft_s, pace.tpot_s))
        if pace.ttft_s is not None and route.ttft_s:
            self._metrics.ttft_ratio.labels(_kind(route)).observe(pace.ttft_s / route.ttft_s)
        if pace.tpot_s is not None and route.tpot_s:
            self._metrics.tpot_ratio.labels(_kind(route)).observe(pace.tpot_s / route.tpot_s)

    def _met(self, ttft_s: float, tpot_s: float | None) -> bool:
        """Whether a request kept the targets that can be kept."""
        targets, tokens = self._targets, self.tokens_per_step
        targets = self._within_reach(dataclasses.replace(targets, tpot_s=targets.tpot_s * tokens))
        return ttft_s <= targets.ttft_s and (tpot_s or 0.0) * tokens <= targets.tpot_s

    # --- preferences ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Thinks preferences over until it is cancelled."""
        pause = THINK_EVERY_S
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            await self.think()
            pause = max(THINK_EVERY_S, 9 * (time.monotonic() - began))

    async def think(self) -> None:
        """Lets preferences follow what was asked lately, how long steps took, and whether targets were kept.
        What the workers bear is estimated anew where the first two, or the set of workers, have changed.
        """
        workers = [worker for worker in self._workers() if _does_both(worker)]
        places = [place_of(worker, self._preference(worker)) for worker in workers]
        self._look(places, workers)
        mix, names = self._demand.mix(), frozenset(worker.info.worker for worker in workers)
        rates = self._rates(workers)
        if mix is None or rates is None or not _meet(workers):
            return
        if (mix, self._pace, names) != self._thought:
            self._thought, self._answer = (mix, self._pace, names), mix.output
            # It takes long with many workers.
            self._reach = await asyncio.to_thread(within_reach, mix, len(workers), rates)
            rates = dataclasses.replace(rates, targets=self._reach)
            self._bears = await asyncio.to_thread(estimates, mix, len(workers), rates, self._paces)
        split = self._demand.best_split(self._clock(), self._bears, preferring(places))
        self._prefer(prefer(places, split))

    def _look(self, places: Sequence[WorkerPlace], workers: Sequence[RouterCandidate]) -> None:
        """Takes note of how long steps took."""
        prefilling = preferring(places)
        self._paces.saw(prefilling, mean_pace(worker.info.backlog.pace for worker in workers))
        self._pace = self._paces.at(prefilling)
        for kind, value in dataclasses.asdict(self._pace).items():
            self._metrics.pace.labels(kind).set(value)

    def _prefer(self, preferences: dict[str, AdmissionPreference]) -> None:
        if preferences != self.preferences:
            summary = ", ".join(f"{worker} {preference.value}" for worker, preference in preferences.items())
            _log.info("preferences: %s; %s", summary, self._thought)
        self.preferences = preferences
        self._metrics.preference.clear()
        for worker, preference in preferences.items():
            self._metrics.preference.labels(worker, preference.value).set(1)

    def _preference(self, worker: RouterCandidate) -> AdmissionPreference:
        return self.preferences.get(worker.info.worker, AdmissionPreference.ANY)

    def _within_reach(self, targets: LatencyTargets) -> LatencyTargets:
        """The targets of a step, but for one that nobody can keep."""
        if (reach := self._reach) is None:
            return targets
        return LatencyTargets(max(targets.ttft_s, reach.ttft_s), max(targets.tpot_s, reach.tpot_s))

    def _rates(self, workers: Sequence[RouterCandidate]) -> MeasuredRates | None:
        """Returns the rates of the median worker of those alike, at the recent pace.

        A target per token is one per step here: a step may give several tokens.
        """
        measured = [w.info.rates for w in workers if _does_both(w) and w.info.rates is not None]
        if not measured:
            return None
        middle = sorted(measured, key=_chunk_s)[len(measured) // 2]
        targets = dataclasses.replace(self._targets, tpot_s=self._targets.tpot_s * self.tokens_per_step)
        rates = MeasuredRates(dataclasses.replace(middle.times, pace=self._pace), middle.budget, targets)
        return dataclasses.replace(rates, answer=self._answer) if self._answer else rates


def place_of(worker: RouterCandidate, preference: AdmissionPreference) -> WorkerPlace:
    """The worker as the policy sees it: its last report, and what this gateway has sent or finished since.

    What other gateways have there is the report without this gateway's own part at its time.
    """
    info, now, then = worker.info, worker.under_way, worker.reported
    backlog, since = info.backlog, max(now.total - then.total, 0)
    decodes = worker.can(Role.DECODE) and worker.connected
    return WorkerPlace(
        worker=info.worker,
        sequences=now.sequences + max(backlog.decoding - then.sequences, 0),
        context=now.context + max(backlog.context - then.context, 0),
        queued=now.queued + max(backlog.queued - then.queued, 0) + worker.slot_tokens,
        prompt_share=backlog.prompt_share,
        prefill_room=max(backlog.prefill_room - since, 0) if worker.can(Role.PREFILL) else 0,
        decode_room=max(backlog.decode_room - since, 0) if decodes else 0,
        cached=worker.cached,
        preference=preference,
        kv_room=_kv_room(backlog.kv_room, now.plus(then, -1)),
    )


def _kv_room(reported: int | None, sent: UnderWay) -> float:
    """Tokens: what the worker said, less what it was `sent` since."""
    if reported is None:
        return math.inf
    prompts = max(sent.queued, 0) if sent.prompts > 0 else 0
    return max(reported - max(sent.context, 0) - prompts, 0)


def _meet(workers: Sequence[RouterCandidate]) -> bool:
    """Whether two workers can share a request: the pages of all of them travel."""
    return not any(worker.info.stays for worker in workers)


def _does_both(worker: RouterCandidate) -> bool:
    return worker.can(Role.PREFILL) and worker.can(Role.DECODE)


def _chunk_s(rates: StepRates) -> float:
    return rates.times.step_s(0, 0, rates.budget.chunk_tokens)


def _kind(route: RequestRoute) -> str:
    if route.ttft_s is None:
        return "by_roles"
    return "together" if route.prefill is None else "apart"
