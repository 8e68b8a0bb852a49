"""Chooses the workers of new requests: by the workers' roles, or with `--layout auto` by predicted latency.

A layout is consulted once per request; if a request must move later, roles decide. Under auto every worker
can prefill and decode, and `gateway.routing.placement` chooses from a snapshot: the last reports of the
workers plus what this gateway has sent them since. The preferences of workers follow the load
(`gateway.routing.preference`) and act at the next placement. Both predict from the step times that the
workers measured at their start, scaled by the recent pace of their steps. If nothing can be predicted, roles
decide.
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

UPDATE_EVERY_S = 1.0
"""Seconds between two updates of the preferences; more if an update would take over a tenth of the time."""
_log = logging.getLogger("eyas.gateway")


class RequestLayout(Protocol):
    """Chooses the workers of new requests. No method waits."""

    def route(self, prompt: int, workers: Sequence[RouterCandidate]) -> RequestRoute | None:
        """The workers for a new prompt of `prompt` tokens; None while no worker and no pair can serve it."""
        ...

    def placed(self, route: RequestRoute, prompt: int, missing: int) -> None:
        """Called when a request was sent to `route`, which computes `missing` tokens of its prompt."""
        ...

    def ended(self, route: RequestRoute, pace: TokenTimes) -> None:
        """Called when a request that began on `route` has ended, for any reason."""
        ...


class StaticLayout(RequestLayout):
    """Routes by roles: to a decode worker, and to a prefill worker if the decode worker computes no
    prompts.
    """

    def route(self, prompt: int, workers: Sequence[RouterCandidate]) -> RequestRoute | None:
        return router.route(workers)

    def placed(self, route: RequestRoute, prompt: int, missing: int) -> None:
        """Does nothing."""

    def ended(self, route: RequestRoute, pace: TokenTimes) -> None:
        """Does nothing."""


class AutoLayout(RequestLayout):
    """Routes by predicted latency. `preferences`: by worker; a missing worker has none.

    The caller runs `run` as a task, which updates the preferences.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[RouterCandidate]],
        targets: LatencyTargets,
        metrics: PlacementMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`workers` returns those that may get requests. `clock` returns seconds."""
        self._workers = workers
        self._targets = targets
        self._metrics = metrics
        self._clock = clock
        self._demand = DemandMeter(clock())
        self._steps, self._tokens = 0.0, 0.0  # fading sums over answers
        self._paces, self._pace = PaceMemory(), StepPace()  # `_pace`: at the last update
        self._estimated_for: tuple[RequestMix, StepPace, frozenset[str]] | None = None
        self._reach: LatencyTargets | None = (
            None  # targets per step, at the last estimate; None: as configured
        )
        self._capacities: list[
            float
        ] = []  # requests/s at the last estimate, by number of workers for prompts
        self._answer = 0.0  # mean steps of an answer at the last estimate; 0.0: not known
        self.preferences: dict[str, AdmissionPreference] = {}

    @property
    def tokens_per_step(self) -> float:
        """The mean tokens per step of a sequence: more than one if drafts are accepted."""
        return self._tokens / self._steps if self._steps else 1.0

    # --- requests -------------------------------------------------------------------------------------------

    def route(self, prompt: int, workers: Sequence[RouterCandidate]) -> RequestRoute | None:
        """Routes by prediction; by roles without rates or if every worker is full (one then refuses)."""
        rates = self._rates(workers)
        placement = None
        if rates is not None:
            sound = [worker for worker in workers if not worker.broken]
            places = [place_of(worker, self._preference(worker)) for worker in sound]
            rates = dataclasses.replace(rates, targets=self._within_reach(rates.targets))
            placement = place(prompt, places, rates, _can_share(workers))
        if placement is None:
            return router.route(workers)
        return RequestRoute(
            placement.decode, placement.prefill, placement.ttft_s, placement.tpot_s / self.tokens_per_step
        )

    def placed(self, route: RequestRoute, prompt: int, missing: int) -> None:
        """Counts the request in the mix for which preferences are chosen."""
        self._demand.add_request(self._clock(), prompt, missing)
        self._metrics.placements.labels(_kind(route)).inc()

    def ended(self, route: RequestRoute, pace: TokenTimes) -> None:
        """Counts the answer, and records its latencies over the predicted ones."""
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
        """Whether a request met the targets, as far as they are attainable."""
        targets, tokens = self._targets, self.tokens_per_step
        targets = self._within_reach(dataclasses.replace(targets, tpot_s=targets.tpot_s * tokens))
        return ttft_s <= targets.ttft_s and (tpot_s or 0.0) * tokens <= targets.tpot_s

    # --- preferences ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Updates the preferences until cancelled."""
        pause = UPDATE_EVERY_S
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            await self.update_preferences()
            pause = max(UPDATE_EVERY_S, 9 * (time.monotonic() - began))

    async def update_preferences(self) -> None:
        """Updates the preferences from the recent requests, the pace of steps and the met targets.

        The capacity of the workers is estimated again only if the mix of requests, the pace or the set of
        workers has changed.
        """
        workers = [worker for worker in self._workers() if _does_both(worker)]
        places = [place_of(worker, self._preference(worker)) for worker in workers]
        self._record_pace(places, workers)
        mix, names = self._demand.mix(), frozenset(worker.info.worker for worker in workers)
        rates = self._rates(workers)
        if mix is None or rates is None or not _can_share(workers):
            return
        if (mix, self._pace, names) != self._estimated_for:
            self._estimated_for, self._answer = (mix, self._pace, names), mix.output
            # Both are slow with many workers, so they run in a thread.
            self._reach = await asyncio.to_thread(within_reach, mix, len(workers), rates)
            rates = dataclasses.replace(rates, targets=self._reach)
            self._capacities = await asyncio.to_thread(estimates, mix, len(workers), rates, self._paces)
        split = self._demand.best_split(self._clock(), self._capacities, preferring(places))
        self._prefer(prefer(places, split))

    def _record_pace(self, places: Sequence[WorkerPlace], workers: Sequence[RouterCandidate]) -> None:
        """Records the pace of recent steps."""
        prefilling = preferring(places)
        self._paces.record(prefilling, mean_pace(worker.info.backlog.pace for worker in workers))
        self._pace = self._paces.at(prefilling)
        for kind, value in dataclasses.asdict(self._pace).items():
            self._metrics.pace.labels(kind).set(value)

    def _prefer(self, preferences: dict[str, AdmissionPreference]) -> None:
        if preferences != self.preferences:
            summary = ", ".join(f"{worker} {preference.value}" for worker, preference in preferences.items())
            _log.info("preferences: %s; %s", summary, self._estimated_for)
        self.preferences = preferences
        self._metrics.preference.clear()
        for worker, preference in preferences.items():
            self._metrics.preference.labels(worker, preference.value).set(1)

    def _preference(self, worker: RouterCandidate) -> AdmissionPreference:
        return self.preferences.get(worker.info.worker, AdmissionPreference.ANY)

    def _within_reach(self, targets: LatencyTargets) -> LatencyTargets:
        """The targets per step; an unattainable one is replaced by an attainable one."""
        if (reach := self._reach) is None:
            return targets
        return LatencyTargets(max(targets.ttft_s, reach.ttft_s), max(targets.tpot_s, reach.tpot_s))

    def _rates(self, workers: Sequence[RouterCandidate]) -> MeasuredRates | None:
        """Returns the rates of the median worker, at the recent pace; None without any.

        The target per token becomes one per step, as a step may yield several tokens.
        """
        measured = [w.info.rates for w in workers if _does_both(w) and w.info.rates is not None]
        if not measured:
            return None
        middle = sorted(measured, key=_chunk_s)[len(measured) // 2]
        targets = dataclasses.replace(self._targets, tpot_s=self._targets.tpot_s * self.tokens_per_step)
        rates = MeasuredRates(dataclasses.replace(middle.times, pace=self._pace), middle.budget, targets)
        return dataclasses.replace(rates, answer=self._answer) if self._answer else rates


def place_of(worker: RouterCandidate, preference: AdmissionPreference) -> WorkerPlace:
    """The state of the worker for the placement: its last report, updated by this gateway's requests since.

    The load of other gateways is the report less this gateway's own part at the time of the report.
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
    """The capacity for KV in tokens: as reported, less what was `sent` to the worker since."""
    if reported is None:
        return math.inf
    prompts = max(sent.queued, 0) if sent.prompts > 0 else 0
    return max(reported - max(sent.context, 0) - prompts, 0)


def _can_share(workers: Sequence[RouterCandidate]) -> bool:
    """Whether two workers can share a request: none of them keeps its pages to itself."""
    return not any(worker.info.stays for worker in workers)


def _does_both(worker: RouterCandidate) -> bool:
    return worker.can(Role.PREFILL) and worker.can(Role.DECODE)


def _chunk_s(rates: StepRates) -> float:
    return rates.times.step_s(0, 0, rates.budget.chunk_tokens)


def _kind(route: RequestRoute) -> str:
    if route.ttft_s is None:
        return "by_roles"
    return "together" if route.prefill is None else "apart"
