"""Runs one request on the cluster, from routing to its last token.

    route -> Submit (decode) and Prefill in parallel -> both admitted
          -> Prefill has started: its KV handles are attached to decode
          -> Prefill is done: token 0 is sent to the client immediately
          -> decode's token entries, until every choice has finished

If a worker is lost on the way, another one continues (`_replace_prefill`, `_recompute`, `_replace_decode`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import partial

import msgspec

from eyas.common.errors import (
    DeadlineExceeded,
    EyasError,
    InvalidRequest,
    LogitsNotFinite,
    NotFound,
    Unavailable,
    WeightsChanged,
    WeightsChanging,
)
from eyas.common.page_names import salt_of_weights
from eyas.common.types import (
    EngineTimings,
    FinishCause,
    FirstToken,
    GenerationRequest,
    RequestChoice,
    TokenEntry,
    WorkerInfo,
)
from eyas.common.wire.control import ControlCommand, ControlOutcome
from eyas.common.wire.message import (
    PagesLost,
    PrefillDone,
    PrefillStarted,
    RequestAdmitted,
    RequestFailed,
    RequestRejected,
)
from gateway.backends.admission import is_synthetic
from gateway.backends.base import (
    AdapterControl,
    BackendHealth,
    GenerationBackend,
    GenerationStream,
    Lanes,
    WeightControl,
)
from gateway.backends.delivery import OutputBuffer, first_entry
from gateway.backends.legs import DecodeLeg, LegDraining, LegEnded, LegEvent, LegOwner, PrefillLeg
from gateway.backends.retries import RetryState
from gateway.backends.running import SILENCE_S, SilenceLimit
from gateway.routing import router
from gateway.routing.cluster import Cluster, WorkerSearch
from gateway.routing.layouts import RequestLayout, StaticLayout
from gateway.routing.prefix_caches import PromptPages
from gateway.routing.router import RequestRoute, RouterCandidate

RETRY_PAUSE_S = 0.3
SYNTHETIC = "answers mean nothing: drafts are accepted by chance (--rejection-sample-method synthetic)"

_log = logging.getLogger("eyas.gateway")


class ClusterBackend(GenerationBackend):
    """Generates tokens on the workers of a cluster. The caller owns `cluster` and `layout`."""

    def __init__(self, cluster: Cluster, layout: RequestLayout | None = None) -> None:
        """`layout` chooses the workers of new requests; None: by the roles of the workers."""
        self._cluster = cluster
        self._layout = layout or StaticLayout()

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Does nothing: workers refuse requests themselves when each one starts."""

    async def start(self, request: GenerationRequest) -> ClusterGeneration:
        """Returns the generation once every leg has admitted it. On EyasError (Overloaded, ...) no leg stays
        open.
        """
        generation = ClusterGeneration(self._cluster, request, self._layout)
        await generation.admit()
        return generation

    async def models(self) -> list[WorkerInfo]:
        returning = [candidate.info for candidate in self._cluster.returning()]
        return [*self._cluster.workers(), *(info for info in returning if not info.starting)]

    def links(self) -> list[RouterCandidate]:
        return self._cluster.candidates()

    def health(self) -> BackendHealth:
        links = self.links()
        if router.route(links) is not None:
            synthetic = SYNTHETIC if is_synthetic(self._cluster.workers()) else ""
            return BackendHealth(degraded=synthetic, paused=router.paused(links))
        why = self._cluster.weights.problem or router.asleep(links) or self._cluster.missing(links)
        return BackendHealth(f"no worker can serve a request: {why}")

    async def flush(self, wait_s: float) -> dict[str, int]:
        return await self._cluster.flush(wait_s)

    async def control(self, command: ControlCommand) -> dict[str, ControlOutcome]:
        return await self._cluster.control(command)

    @property
    def adapters(self) -> AdapterControl:
        return self._cluster.adapters

    @property
    def weights(self) -> WeightControl:
        return self._cluster.weights


class ClusterGeneration(GenerationStream, LegOwner):
    """One request: receives the events of its legs and delivers tokens to its reader, which closes it.

    `_attempt` numbers the (worker, handles) pairs that were tried, and every message carries it. Messages of
    earlier attempts and of replaced legs are dropped.
    """

    def __init__(self, cluster: Cluster, request: GenerationRequest, layout: RequestLayout) -> None:
        self._cluster = cluster
        self._layout = layout
        self._route: RequestRoute | None = None
        self._original = request
        self._use_newest_weights()
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + request.timeout_s
        self._delivery = OutputBuffer(request.choices)
        self._inbox: asyncio.Queue[tuple[DecodeLeg | PrefillLeg | None, LegEvent | None]] = asyncio.Queue()
        self._driver: asyncio.Task[None] | None = None  # runs once the request is admitted
        self._attempt = 0
        self._decode: DecodeLeg | None = None
        self._prefill: PrefillLeg | None = None
        self._first_tokens: tuple[FirstToken, ...] = ()  # as prefill sent them
        self._decode_produced = False  # decode sent a token: the prompt's pages alone no longer suffice
        self._decode_unaware = False  # a choice ended by a cancel or at prefill, without decode's knowledge
        self._avoid: set[str] = set()
        self._retries = RetryState(cluster.retry_budget, self._clock())

    # --- the reader's side ---

    @property
    def tokens(self) -> int:
        return self._delivery.tokens

    @property
    def weight_version(self) -> str:
        return self._weights.version

    def take(self) -> Awaitable[Sequence[TokenEntry]]:
        return self._delivery.take()

    def use_lanes(self, lanes: Lanes | None) -> None:
        self._delivery.use_lanes(lanes)

    async def cancel(self, choice: int | None = None) -> None:
        """Ends one choice, or the whole request. Idempotent."""
        if choice is None:
            await self.aclose()
        elif self._delivery.is_open(choice):
            self._delivery.close(choice)
            self._decode_unaware = True
            self._nudge()
            if self._decode is not None and not self._delivery.over:
                self._decode.cancel(choice)

    def fail(self, error: EyasError) -> None:
        """Ends with `error` after what is buffered; the driver then closes the legs."""
        self._delivery.end(error)
        self._nudge()

    async def aclose(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
            self._release()  # a driver cancelled before its first step has run no cleanup
            self._delivery.end()

    # --- the driver ---

    async def admit(self) -> None:
        """Starts the legs and returns once every worker has queued the request. Closes them on an error."""
        try:
            async with self._in_time():
                await self._start_legs()
                while not self._is_admitted():
                    await self._next_event()
        except BaseException:
            self._release()
            raise
        self._driver = asyncio.create_task(self._drive(), name=f"request {self._request.id}")

    def _use_newest_weights(self) -> None:
        """Binds the request to the newest weights. It shares pages only with requests on the same weights."""
        request, self._weights = self._original, self._cluster.weights.newest
        if digest := self._weights.digest:  # empty: the weights that the workers started with
            salt = salt_of_weights(request.salt, digest)
            request = msgspec.structs.replace(request, weights=digest, salt=salt)
        self._request = request
        self._prefix = PromptPages(request.prompt_ids, request.session, request.salt, request.adapter)
        self._search = WorkerSearch(
            self._cluster, self._prefix, self._wait_for_turn, self._pause, lambda: not self._delivery.over
        )

    async def _start_legs(self) -> None:
        """Routes the request to workers with the newest weights and starts the legs."""
        prompt = len(self._request.prompt_ids)
        while True:
            route = await self._search.find(partial(self._layout.route, prompt))
            if route is None or self._weights.digest == self._cluster.weights.newest.digest:
                break
            self._use_newest_weights()  # they were updated during the search
        if route is None:
            return  # every choice was cancelled
        self._attempt, self._route = self._attempt + 1, route
        missing = self._start_decode(route.decode, attach=route.prefill is not None)
        if route.prefill is not None:
            missing = self._start_prefill(route.prefill)
        self._layout.placed(route, prompt, missing)

    async def _restart(self, error: WeightsChanging) -> None:
        """Restarts a request without tokens on the new weights.

        Raises WeightsChanged if it has tokens: its answer would mix two sets of weights.
        """
        if self._delivery.begun:
            text = f"the weights {self._weights.version!r} are replaced in mid-answer: {error.message}"
            raise WeightsChanged(text)
        self._release()
        if self._route is not None:
            self._layout.ended(self._route, self._delivery.token_times)
        self._decode, self._first_tokens, self._route = None, (), None
        await self._pause()
        await self._cluster.weights.look()
        self._use_newest_weights()
        await self._start_legs()

    async def _drive(self) -> None:
        """Handles the events of the legs until every choice has finished, then closes the legs."""
        error: EyasError | None = None
        try:
            async with self._in_time():
                while not self._delivery.over:
                    await self._next_event()
        except EyasError as caught:
            error = caught
        except Exception:
            _log.exception("request %s failed", self._request.id)
            error = EyasError("internal error")
        finally:
            self._release()
            self._delivery.end(error)
            if self._route is not None:
                self._layout.ended(self._route, self._delivery.token_times)

    async def _next_event(self) -> None:
        leg, event = await self._inbox.get()
        if isinstance(leg, DecodeLeg) and leg is self._decode:
            await self._on_decode_event(leg, event)
        elif isinstance(leg, PrefillLeg) and leg is self._prefill:
            await self._on_prefill_event(leg, event)

    async def _on_prefill_event(self, leg: PrefillLeg, event: LegEvent | None) -> None:
        match event:
            case PrefillStarted():
                self._attach()
            case PrefillDone(choices=choices, timings=timings):
                self._first_tokens = tuple(msgspec.structs.replace(first, prompt=None) for first in choices)
                self._deliver_first(choices, leg.named(timings))
            case LegEnded(WeightsChanging() as error):
                await self._restart(error)
            case LegEnded(error) if leg.handles is None:
                self._replace_prefill(leg, await self._resolve_error(error))
            case LegEnded(InvalidRequest() | LogitsNotFinite() as error):
                raise error  # it would fail on any other worker too
        # Once prefill has started, only decode decides whether its pages arrive.

    async def _on_decode_event(self, leg: DecodeLeg, event: LegEvent | None) -> None:
        match event:
            case RequestAdmitted():
                self._attach()
            case PagesLost(attempt=attempt) if attempt == self._attempt:
                self._recompute(leg)
            case LegDraining():
                await self._leave_draining(leg)
            case RequestRejected(failure=failure):
                error = await self._resolve_error(failure.error())
                if isinstance(error, WeightsChanging) and self._delivery.begun and not leg.begun:
                    # It has a token of prefill by now, so a worker closed for new weights takes it.
                    await self._resubmit(leg)
                else:
                    await self._replace_decode(leg, error)
            case RequestFailed(failure=failure):
                await self._replace_decode(leg, await self._resolve_error(failure.error()))
            case LegEnded(error):
                await self._replace_decode(leg, error)

    async def _resolve_error(self, error: EyasError) -> EyasError:
        """Replaces NotFound by Unavailable if the request's adapter is still loaded in the cluster: the
        worker has restarted and does not have the adapter yet.
        """
        adapters = self._cluster.adapters
        if isinstance(error, NotFound) and self._request.adapter:
            await adapters.look()
            if self._request.adapter in adapters.roster.ids:
                return Unavailable(error.message)
        return error

    def _is_admitted(self) -> bool:
        legs = [leg for leg in (self._decode, self._prefill) if leg is not None]
        return all(leg.admitted for leg in legs)

    # --- legs ---

    def _start_decode(self, worker: str, attach: bool) -> int:
        """Submits the unfinished choices, which wait for the prompt's pages or continue from their tokens.

        Returns the number of prompt tokens that are probably not in the worker's cache; so does
        `_start_prefill`.
        """
        choices = self._delivery.unfinished()
        if attach:
            choices = tuple(RequestChoice(choice.index) for choice in choices)
        self._decode = DecodeLeg(self._cluster, worker, self._attempt, self)
        missing = self._record_prompt(worker)
        self._decode.submit(self._rest_of_request(choices), attach, missing)
        return missing

    def _start_prefill(self, worker: str) -> int:
        offer_draft = self._request.speculative and router.wants_draft(self._cluster.candidates())
        self._prefill = PrefillLeg(self._cluster, worker, self)
        rest, missing = self._rest_of_request(self._delivery.unfinished()), self._record_prompt(worker)
        rest = msgspec.structs.replace(rest, predicted=())  # prefill makes no drafts
        self._prefill.submit(rest, self._attempt, offer_draft, missing)
        return missing

    def _record_prompt(self, worker: str) -> int:
        return self._cluster.record_prompt(worker, len(self._request.prompt_ids), self._prefix)

    def _attach(self) -> None:
        """Sends decode the handles of the prompt's pages, once they exist and it has admitted the request."""
        decode, prefill = self._decode, self._prefill
        if decode is None or not decode.admitted or not decode.waits:
            return
        if prefill is None:
            decode.attach(self._attempt, (), self._first_tokens)
        elif prefill.handles is not None:
            decode.attach(self._attempt, prefill.handles, ())

    def _rest_of_request(self, choices: tuple[RequestChoice, ...]) -> GenerationRequest:
        return msgspec.structs.replace(
            self._request,
            choices=choices,
            timeout_s=max(self._deadline - self._clock(), 0.001),
            begun=self._delivery.tokens > 0,
        )

    def _drop_prefill(self) -> None:
        """Closes the prefill leg. Returns its pages to their owner unless a decode worker pulls or returns
        them.
        """
        prefill, self._prefill = self._prefill, None
        if prefill is None:
            return
        prefill.close()
        is_attached = self._decode is not None and not self._decode.waits
        if prefill.handles and not is_attached:
            self._cluster.give_back(prefill.worker, prefill.handles, self._attempt)

    def _release(self) -> None:
        """Closes every leg. Idempotent."""
        self._drop_prefill()
        if self._decode is not None:
            self._decode.close(cancel=True)

    # --- tokens ---

    def on_event(self, leg: DecodeLeg | PrefillLeg, event: LegEvent) -> None:
        self._inbox.put_nowait((leg, event))

    def on_entry(self, leg: DecodeLeg, entry: TokenEntry) -> None:
        """Puts tokens into the client's buffer immediately, bypassing the inbox."""
        last = entry.finish is FinishCause.ABORT  # of any attempt: no other entry follows
        if leg is not self._decode or not (last or entry.attempt == self._attempt):
            return
        self._decode_produced = True
        if entry.timings is not None:
            entry = msgspec.structs.replace(entry, timings=leg.named(entry.timings))
        self._delivery.push(entry)
        leg.lane = self._delivery.lane  # for the next entries
        if self._delivery.over:
            if self._delivery.complete:
                leg.close(cancel=self._decode_unaware)
            self._nudge()

    def _deliver_first(self, choices: tuple[FirstToken, ...], timings: EngineTimings) -> None:
        for position, first in enumerate(choices):
            self._decode_unaware |= first.finish is not None
            entry_timings = timings if position == 0 else None
            self._delivery.push(first_entry(self._request, self._attempt, first, entry_timings))

    def _nudge(self) -> None:
        """Makes the driver check whether the delivery is over."""
        self._inbox.put_nowait((None, None))

    # --- when a worker is lost ---

    def _replace_prefill(self, leg: PrefillLeg, error: EyasError) -> None:
        """Sends the prompt to another worker, after a prefill that ended before its first chunk ran."""
        self._spend_retry(error)
        self._avoid.add(leg.worker)
        self._prefill_again()

    def _recompute(self, leg: DecodeLeg) -> None:
        """Has the prompt computed again, after decode could not pull its pages; avoids the owner of the
        pages.

        Decode has the request still queued. If the client has token 0 already, decode computes the prompt
        itself and continues from there.
        """
        leg.waits, leg.lane = True, None
        self._spend_retry(Unavailable("the pages of the prompt could not be transferred"))
        if self._prefill is not None:
            self._avoid.add(self._prefill.worker)
        if self._first_tokens:
            self._attempt += 1
            self._drop_prefill()
            self._attach()
        else:
            self._prefill_again()

    def _prefill_again(self) -> None:
        """Starts a new attempt on another prefill worker; if there is none, decode computes the prompt."""
        self._attempt += 1
        self._drop_prefill()
        avoid = self._avoid if self._decode is None else {*self._avoid, self._decode.worker}
        candidate = router.choose_prefill(self._cluster.candidates(self._prefix), avoid)
        if candidate is not None and candidate.info.worker not in avoid:
            self._start_prefill(candidate.info.worker)
        else:
            self._attach()

    async def _replace_decode(self, leg: DecodeLeg, error: EyasError) -> None:
        """Continues on another decode worker, because the first is lost, draining or full.

        Before the first token of decode the new worker can still pull the prompt's pages. Later it computes
        the prompt and the delivered tokens itself.
        """
        leg.close(cancel=True)
        self._decode = None
        if isinstance(error, WeightsChanging):
            await self._restart(error)
            return
        self._spend_retry(error)
        self._avoid.add(leg.worker)
        try:
            worker = await self._find_decode()
        except Unavailable as lack:
            raise Unavailable(f"{lack.message}, after {error.message}") from error
        if worker is None:
            return
        if self._weights.digest != self._cluster.weights.newest.digest:
            await self._restart(WeightsChanging(error.message))
            return
        self._attempt += 1
        prefill = None if self._decode_produced else self._prefill
        attach = prefill is not None and prefill.worker != worker  # the prefill worker has the pages cached
        if not attach:
            self._drop_prefill()
        _log.info("request %s goes on at %s (attempt %d)", self._request.id, worker, self._attempt)
        self._start_decode(worker, attach)

    async def _resubmit(self, leg: DecodeLeg) -> None:
        """Submits the request, which has a token now, to the same worker again; its pages have not moved. If
        the worker is lost, another one gets the request.
        """
        leg.close(cancel=False)
        self._decode = None
        if self._delivery.over:
            return
        self._attempt += 1
        try:
            self._start_decode(leg.worker, attach=self._prefill is not None)
        except Unavailable as error:
            await self._replace_decode(leg, error)

    async def _leave_draining(self, leg: DecodeLeg) -> None:
        """Moves a request without tokens of decode from a draining worker to another one, if there is one.

        Any other request stays: the worker finishes it or ends the stream at its own deadline.
        """
        other = router.choose_decode(self._cluster.candidates(self._prefix), {*self._avoid, leg.worker})
        if other is not None and other.info.worker != leg.worker and not self._decode_produced:
            await self._replace_decode(leg, Unavailable(f"worker {leg.worker} is draining"))

    async def _find_decode(self) -> str | None:
        """The decode worker that continues the request; None if every choice has ended.

        A worker to avoid is taken only after a pause.
        """

        def choose(workers: Sequence[RouterCandidate]) -> RouterCandidate | None:
            if self._delivery.begun:  # a worker closed for new weights takes requests of the old weights
                workers = [*map(router.reopened, workers)]
            return router.choose_decode(workers, self._avoid)

        candidate = await self._search.find(choose)
        if candidate is not None and candidate.info.worker in self._avoid:
            await self._pause()
            candidate = await self._search.find(choose)
        return None if candidate is None else candidate.info.worker

    async def _pause(self) -> None:
        """Waits `RETRY_PAUSE_S` while it handles the events of the remaining legs."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_PAUSE_S):
                while True:
                    await self._next_event()

    def _wait_for_turn(self) -> Awaitable[bool]:
        left = self._deadline - self._clock()
        return self._cluster.pace.send(self._request.caller, len(self._request.prompt_ids), left)

    def _spend_retry(self, error: EyasError) -> None:
        admitted = self._driver is not None
        self._retries.spend(error, self._delivery.tokens, self._clock(), admitted=admitted)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raises DeadlineExceeded at the request's deadline and after `SILENCE_S` without a token."""
        limit = asyncio.timeout_at(self._deadline)
        silence = SilenceLimit(limit, lambda: self._delivery.tokens)
        try:
            async with limit:
                yield
        except TimeoutError:
            took = f"the request took longer than {self._request.timeout_s:g} s"
            if silence.expired:
                took = f"no token came for {SILENCE_S:g} s"
            lacks = self._search.lacks
            raise DeadlineExceeded(f"{took}: {lacks}" if lacks else took) from None
        finally:
            silence.stop()
