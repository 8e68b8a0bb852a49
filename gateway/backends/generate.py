"""The life of one request in the cluster, from its first leg to its last token.

    route -> Submit (decode) and Prefill together -> both admitted
          -> Prefill has started: Attach its handles to decode
          -> Prefill is done: token 0 goes to the client at once
          -> decode's entries, until every choice has finished

and what happens when a worker leaves in the middle (`_replace_prefill`, `_recompute`, `_replace_decode`).
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
    """Turns requests into tokens on the workers of a cluster, which stays its owner's, as `layout` is."""

    def __init__(self, cluster: Cluster, layout: RequestLayout | None = None) -> None:
        """`layout`: where requests begin; None: by the workers' roles."""
        self._cluster = cluster
        self._layout = layout or StaticLayout()

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Nothing: workers say what they refuse, as each request starts."""

    async def start(self, request: GenerationRequest) -> ClusterGeneration:
        """The generation, admitted by every leg. Raises EyasError (Overloaded, ...) and leaves no leg."""
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
    """One request. Its legs report to it; its reader iterates, cancels and closes it.

    `_attempt` counts every (worker, handles) that was tried. Each message carries it. Messages of earlier
    attempts are dropped, and so are those of replaced legs.
    """

    def __init__(self, cluster: Cluster, request: GenerationRequest, layout: RequestLayout) -> None:
        self._cluster = cluster
        self._layout = layout
        self._route: RequestRoute | None = None
        self._original = request
        self._take_weights()
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + request.timeout_s
        self._delivery = OutputBuffer(request.choices)
        self._inbox: asyncio.Queue[tuple[DecodeLeg | PrefillLeg | None, LegEvent | None]] = asyncio.Queue()
        self._driver: asyncio.Task[None] | None = None  # runs once the request is admitted
        self._attempt = 0
        self._decode: DecodeLeg | None = None
        self._prefill: PrefillLeg | None = None
        self._first_tokens: tuple[FirstToken, ...] = ()  # as prefill sent them
        self._decode_spoke = False  # some token came from decode: the prompt's pages alone no longer suffice
        self._ended_elsewhere = False  # decode does not know of some end: a cancelled choice, or prefill's
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
            self._ended_elsewhere = True
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

    # --- the life of the request ---

    async def admit(self) -> None:
        """Starts the legs and returns once every worker has queued the request. Leaves no leg on an error."""
        try:
            async with self._in_time():
                await self._begin()
                while not self._is_admitted():
                    await self._next_event()
        except BaseException:
            self._release()
            raise
        self._driver = asyncio.create_task(self._drive(), name=f"request {self._request.id}")

    def _take_weights(self) -> None:
        """Takes the newest weights for the request, which shares pages with other requests of these alone."""
        request, self._weights = self._original, self._cluster.weights.newest
        if digest := self._weights.digest:  # else they are those of the workers' start
            salt = salt_of_weights(request.salt, digest)
            request = msgspec.structs.replace(request, weights=digest, salt=salt)
        self._request = request
        self._prefix = PromptPages(request.prompt_ids, request.session, request.salt, request.adapter)
        self._search = WorkerSearch(
            self._cluster, self._prefix, self._turn, self._pause, lambda: not self._delivery.over
        )

    async def _begin(self) -> None:
        """Starts the legs where the newest weights are."""
        prompt = len(self._request.prompt_ids)
        while True:
            route = await self._search.find(partial(self._layout.route, prompt))
            if route is None or self._weights.digest == self._cluster.weights.newest.digest:
                break
            self._take_weights()  # new ones came meanwhile
        if route is None:
            return  # every choice was cancelled
        self._attempt, self._route = self._attempt + 1, route
        missing = self._start_decode(route.decode, attach=route.prefill is not None)
        if route.prefill is not None:
            missing = self._start_prefill(route.prefill)
        self._layout.placed(route, prompt, missing)

    async def _begin_again(self, error: WeightsChanging) -> None:
        """The weights change: a request without a token is begun anew, with the new ones.

        Raises WeightsChanged for one with tokens: they would not all come from the same weights.
        """
        if self._delivery.begun:
            text = f"the weights {self._weights.version!r} are replaced in mid-answer: {error.message}"
            raise WeightsChanged(text)
        self._release()
        if self._route is not None:
            self._layout.ended(self._route, self._delivery.pace)
        self._decode, self._first_tokens, self._route = None, (), None
        await self._pause()
        await self._cluster.weights.look()
        self._take_weights()
        await self._begin()

    async def _drive(self) -> None:
        """Handles what the legs report until every choice has finished, then closes the legs."""
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
                self._layout.ended(self._route, self._delivery.pace)

    async def _next_event(self) -> None:
        leg, event = await self._inbox.get()
        if isinstance(leg, DecodeLeg) and leg is self._decode:
            await self._hear_decode(leg, event)
        elif isinstance(leg, PrefillLeg) and leg is self._prefill:
            await self._hear_prefill(leg, event)

    async def _hear_prefill(self, leg: PrefillLeg, event: LegEvent | None) -> None:
        match event:
            case PrefillStarted():
                self._attach()
            case PrefillDone(choices=choices, timings=timings):
                self._first_tokens = tuple(msgspec.structs.replace(first, prompt=None) for first in choices)
                self._deliver_first(choices, leg.named(timings))
            case LegEnded(WeightsChanging() as error):
                await self._begin_again(error)
            case LegEnded(error) if leg.handles is None:
                self._replace_prefill(leg, await self._judged(error))
            case LegEnded(InvalidRequest() | LogitsNotFinite() as error):
                raise error  # no other worker would do better
        # Once prefill has started, only decode decides whether its pages arrive.

    async def _hear_decode(self, leg: DecodeLeg, event: LegEvent | None) -> None:
        match event:
            case RequestAdmitted():
                self._attach()
            case PagesLost(attempt=attempt) if attempt == self._attempt:
                self._recompute(leg)
            case LegDraining():
                await self._move_on(leg)
            case RequestRejected(failure=failure):
                error = await self._judged(failure.error())
                if isinstance(error, WeightsChanging) and self._delivery.begun and not leg.begun:
                    await self._resubmit(
                        leg
                    )  # its token came from prefill meanwhile: a closed worker takes it now
                else:
                    await self._replace_decode(leg, error)
            case RequestFailed(failure=failure):
                await self._replace_decode(leg, await self._judged(failure.error()))
            case LegEnded(error):
                await self._replace_decode(leg, error)

    async def _judged(self, error: EyasError) -> EyasError:
        """A worker that lacks the request's adapter may just have begun again: the cluster knows whether
        it was unloaded.
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
        """Submits the unfinished choices: they wait for the prompt's pages, or go on from their tokens.

        Returns how many of the prompt's tokens the worker should lack; so does `_start_prefill`.
        """
        choices = self._delivery.unfinished()
        if attach:
            choices = tuple(RequestChoice(choice.index) for choice in choices)
        self._decode = DecodeLeg(self._cluster, worker, self._attempt, self)
        missing = self._sends(worker)
        self._decode.submit(self._rest_of_request(choices), attach, missing)
        return missing

    def _start_prefill(self, worker: str) -> int:
        offer_draft = self._request.speculative and router.wants_draft(self._cluster.candidates())
        self._prefill = PrefillLeg(self._cluster, worker, self)
        rest, missing = self._rest_of_request(self._delivery.unfinished()), self._sends(worker)
        rest = msgspec.structs.replace(rest, predicted=())  # where prompts are computed, nothing is drafted
        self._prefill.submit(rest, self._attempt, offer_draft, missing)
        return missing

    def _sends(self, worker: str) -> int:
        return self._cluster.sends(worker, len(self._request.prompt_ids), self._prefix)

    def _attach(self) -> None:
        """Tells decode where the prompt's pages are, once they exist and it has admitted the request."""
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
        """Closes the leg. Pages that no decode worker pulls, or gives back itself, go back to their owner."""
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
        """Puts tokens into the client's buffer at once: they do not pass through the inbox."""
        last = entry.finish is FinishCause.ABORT  # of whatever attempt: no other entry comes
        if leg is not self._decode or not (last or entry.attempt == self._attempt):
            return
        self._decode_spoke = True
        if entry.timings is not None:
            entry = msgspec.structs.replace(entry, timings=leg.named(entry.timings))
        self._delivery.push(entry)
        leg.lane = self._delivery.lane  # of the next entries
        if self._delivery.over:
            if self._delivery.complete:
                leg.close(cancel=self._ended_elsewhere)
            self._nudge()

    def _deliver_first(self, choices: tuple[FirstToken, ...], timings: EngineTimings) -> None:
        for position, first in enumerate(choices):
            self._ended_elsewhere |= first.finish is not None
            entry_timings = timings if position == 0 else None
            self._delivery.push(first_entry(self._request, self._attempt, first, entry_timings))

    def _nudge(self) -> None:
        """Makes the driver check whether the delivery is over."""
        self._inbox.put_nowait((None, None))

    # --- when a worker leaves ---

    def _replace_prefill(self, leg: PrefillLeg, error: EyasError) -> None:
        """Prefill ended before its first chunk ran: nothing is lost, and another worker takes the prompt."""
        self._spend_retry(error)
        self._avoid.add(leg.worker)
        self._prefill_again()

    def _recompute(self, leg: DecodeLeg) -> None:
        """Decode kept the request's queue place but did not get its pages; their owner is then avoided.

        If the client has token 0 already, decode computes the prompt itself and goes on from there.
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
        """Tries another prefill worker under a new attempt; without one decode computes the prompt."""
        self._attempt += 1
        self._drop_prefill()
        avoid = self._avoid if self._decode is None else {*self._avoid, self._decode.worker}
        candidate = router.choose_prefill(self._cluster.candidates(self._prefix), avoid)
        if candidate is not None and candidate.info.worker not in avoid:
            self._start_prefill(candidate.info.worker)
        else:
            self._attach()

    async def _replace_decode(self, leg: DecodeLeg, error: EyasError) -> None:
        """The decode worker is gone, draining or full: another one goes on.

        Before decode's first token another worker can still pull the prompt's pages. Later it computes the
        prompt and the delivered tokens itself.
        """
        leg.close(cancel=True)
        self._decode = None
        if isinstance(error, WeightsChanging):
            await self._begin_again(error)
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
            await self._begin_again(WeightsChanging(error.message))
            return
        self._attempt += 1
        prefill = None if self._decode_spoke else self._prefill
        attach = prefill is not None and prefill.worker != worker  # that one has the pages in its cache
        if not attach:
            self._drop_prefill()
        _log.info("request %s goes on at %s (attempt %d)", self._request.id, worker, self._attempt)
        self._start_decode(worker, attach)

    async def _resubmit(self, leg: DecodeLeg) -> None:
        """The same worker gets the request again, which has begun since; its pages are where they were. If
        the worker is lost by now, another one gets it.
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

    async def _move_on(self, leg: DecodeLeg) -> None:
        """The decode worker is draining: a request that it has not begun moves to another worker, if any.

        A request that it has begun stays; the worker finishes it or ends the stream at its own deadline.
        """
        elsewhere = router.choose_decode(self._cluster.candidates(self._prefix), {*self._avoid, leg.worker})
        if elsewhere is not None and elsewhere.info.worker != leg.worker and not self._decode_spoke:
            await self._replace_decode(leg, Unavailable(f"worker {leg.worker} is draining"))

    async def _find_decode(self) -> str | None:
        """The worker that goes on (one to avoid only after a pause); None if every choice has ended."""

        def choose(workers: Sequence[RouterCandidate]) -> RouterCandidate | None:
            if self._delivery.begun:  # a worker that waits for new weights takes what the old ones have begun
                workers = [*map(router.reopened, workers)]
            return router.choose_decode(workers, self._avoid)

        candidate = await self._search.find(choose)
        if candidate is not None and candidate.info.worker in self._avoid:
            await self._pause()
            candidate = await self._search.find(choose)
        return None if candidate is None else candidate.info.worker

    async def _pause(self) -> None:
        """Waits `RETRY_PAUSE_S`, and handles what the remaining legs report."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_PAUSE_S):
                while True:
                    await self._next_event()

    def _turn(self) -> Awaitable[bool]:
        left = self._deadline - self._clock()
        return self._cluster.pace.send(self._request.caller, len(self._request.prompt_ids), left)

    def _spend_retry(self, error: EyasError) -> None:
        admitted = self._driver is not None
        self._retries.spend(error, self._delivery.tokens, self._clock(), admitted=admitted)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raises DeadlineExceeded at the request's deadline, and after a long silence."""
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
