"""The canary: a small request of the gateway's own, which proves that requests get through the cluster.

It stands between the fronts and the cluster. Any request that gets past token 0 proves the whole path; when
none has for a while, the canary sends its own. That prompt is shorter than a page, so no cache holds it. The
canary also runs now and then beside real requests: only its own shows whether a leg was left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from eyas.common.errors import EyasError, Overloaded
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role, TokenEntry
from gateway.backends.base import BackendHealth, GenerationBackend, GenerationStream, Lanes, PassingBackend
from gateway.observe.metrics import GatewayMetrics
from gateway.routing import router
from gateway.routing.router import RouterCandidate
from gateway.text.entries import RequestTrace

PROMPT = (0, 1, 2, 3)
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
TICK_S = 0.1  # while something is wrong: a recovery shows at once
CALM_S = 0.5
PLAIN_RUNS = 2  # runs in a row without a draft that count as degraded: one draft may just be late

_log = logging.getLogger("eyas.gateway")


@dataclass(frozen=True)
class CanarySchedule:
    """The schedule of the canary, in seconds. A broken path is noticed within `every_s` + `timeout_s`."""

    every_s: float = 6.0  # it runs when the newest proof is this old
    rest_s: float = 30.0  # the longest pause while real requests are the proof
    again_s: float = 1.0  # from a failed run to the next
    timeout_s: float = 4.0
    busy_timeout_s: float = 30.0  # while real requests are running


class CanaryBackend(PassingBackend):
    """A backend that is healthy only if a request has lately got through the backend behind it.

    Its owner runs `run` as a task; without it only real requests are proofs.
    """

    def __init__(
        self, backend: GenerationBackend, metrics: GatewayMetrics, schedule: CanarySchedule | None = None
    ) -> None:
        super().__init__(backend)
        self._metrics = metrics
        self._schedule = schedule or CanarySchedule()
        self._clock = asyncio.get_running_loop().time
        self._running: set[ObservedStream] = set()
        self._read = 0  # tokens of real requests that have ended
        self._due_at = 0.0
        self._last_run_at = 0.0
        self._proofs = 0
        self._problem = "no request has gone through the cluster yet"
        self._plain_runs = 0
        self._degraded = ""

    # --- the backend -----------------------------------------------------------------------------------

    async def start(self, request: GenerationRequest) -> ObservedStream:
        stream = await self._backend.start(request)
        observed = ObservedStream(stream, self)
        self._running.add(observed)
        return observed

    def health(self) -> BackendHealth:
        behind = self._backend.health()
        if behind.problem:
            return behind
        degraded = "; ".join(filter(None, (behind.degraded, self._degraded)))
        return BackendHealth(self._problem, degraded, behind.paused)

    # --- what real requests show ---------------------------------------------------------------------------

    def proved(self) -> None:
        """Notes that some request has got tokens from decode."""
        self._proofs += 1
        self._problem = ""
        self._due_at = min(self._clock() + self._schedule.every_s, self._last_run_at + self._schedule.rest_s)

    def closed(self, stream: ObservedStream) -> None:
        """Notes that a real request's stream is closed."""
        self._running.discard(stream)
        self._read += stream.tokens

    @property
    def _tokens(self) -> int:
        """The tokens of all real requests so far."""
        return self._read + sum(stream.tokens for stream in self._running)

    # --- its own request -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sends a canary whenever one is due, until cancelled."""
        while True:
            behind = self._backend.health()
            if behind.problem:
                self._problem, self._due_at = behind.problem, 0.0
            elif self._clock() >= self._due_at and not behind.paused:
                await self._run_once()
            await asyncio.sleep(TICK_S if self._problem else CALM_S)

    async def _run_once(self) -> None:
        timeout_s = self._schedule.busy_timeout_s if self._running else self._schedule.timeout_s
        run, proofs, self._last_run_at = CanaryRun(), self._proofs, self._clock()
        tokens = self._tokens
        try:
            async with asyncio.timeout(timeout_s):
                await run.complete(self._backend, timeout_s)
        except Overloaded:
            self._due_at = self._clock() + self._schedule.again_s  # busy is not broken
            self._metrics.canary_runs.labels("refused").inc()
            return
        except TimeoutError:
            if self._tokens > tokens and any(link.info.waiting for link in self.links()):
                self._waited()
                return
            problem = f"{run.stage} took longer than {timeout_s:g} s"
        except EyasError as error:
            problem = f"{run.stage} failed: {error.message}"
        except Exception:
            _log.exception("the canary failed")
            problem = f"{run.stage} failed: internal error"
        else:
            self._succeeded(run)
            return
        if self._proofs == proofs and not self._backend.health().paused:  # else one got through, or waits
            self._failed(problem)

    def _waited(self) -> None:
        """Notes that the canary waited in a queue while real requests got their tokens: busy, not broken."""
        self._problem = ""
        self._due_at = self._clock() + self._schedule.rest_s
        self._metrics.canary_runs.labels("waited").inc()

    def _succeeded(self, run: CanaryRun) -> None:
        if self._problem:
            _log.info("requests go through the cluster")
        self.proved()
        links = self.links()
        self._plain_runs = 0 if run.drafted or not router.wants_draft(links) else self._plain_runs + 1
        degraded = run.detour(links)
        if not degraded and self._plain_runs >= PLAIN_RUNS:
            degraded = "draft: no drafts arrive, every token takes a step of its own"
        if degraded and not self._degraded:
            _log.warning("requests go through the cluster, but %s", degraded)
        self._degraded = degraded
        self._metrics.canary_runs.labels("degraded" if degraded else "ok").inc()

    def _failed(self, problem: str) -> None:
        if not self._problem:
            _log.warning("no request goes through the cluster: %s", problem)
        self._problem = problem
        self._due_at = self._clock() + self._schedule.again_s
        self._metrics.canary_runs.labels("failed").inc()


class CanaryRun:
    """One canary request: how far it got, and which workers it went through.

    `drafted`: drafts were verified for it.
    """

    def __init__(self) -> None:
        self.drafted = False
        self._admitted = False
        self._trace = RequestTrace()

    async def complete(self, backend: GenerationBackend, timeout_s: float) -> None:
        """Sends the request and reads its whole answer. Raises what the request fails with."""
        request = GenerationRequest(
            f"canary-{secrets.token_hex(8)}", PROMPT, PARAMS, timeout_s=timeout_s + 1.0
        )
        async with contextlib.aclosing(await backend.start(request)) as stream:
            self._admitted = True
            while entries := await stream.take():
                for entry in entries:
                    self._trace.record(entry)
                    self.drafted |= entry.offered > 0

    @property
    def stage(self) -> str:
        """The part of the path that it has not finished."""
        if not self._admitted:
            return "admission"
        if not self._trace.first:
            return "prefill"
        return "decode" if self._heard(Role.DECODE) else "transfer"

    def detour(self, links: Sequence[RouterCandidate]) -> str:
        """Returns the part of the path that a successful run went around, as a sentence; empty if none."""
        alone = any(link.can(Role.PREFILL) and link.can(Role.DECODE) for link in links)
        if alone or any(leg.transfer_path for leg in self._trace.legs):
            return ""
        prefill, decode = self._worker(Role.PREFILL), self._worker(Role.DECODE) or "decode"
        if not prefill:
            return f"prefill: {decode} computed the prompt itself, no prefill worker did"
        return f"transfer: {decode} computed the prompt itself instead of pulling it from {prefill}"

    def _heard(self, role: Role) -> bool:
        return any(leg.role is role for leg in self._trace.legs)

    def _worker(self, role: Role) -> str:
        return next((leg.worker for leg in reversed(self._trace.legs) if leg.role is role), "")


class ObservedStream(GenerationStream):
    """A real request's stream; it reports the first token from decode to the canary."""

    def __init__(self, stream: GenerationStream, canary: CanaryBackend) -> None:
        self._stream = stream
        self._canary = canary
        self._proved = False
        self._closed = False

    @property
    def tokens(self) -> int:
        return self._stream.tokens

    @property
    def weight_version(self) -> str:
        return self._stream.weight_version

    def take(self) -> Awaitable[Sequence[TokenEntry]]:
        return self._stream.take() if self._proved else self._observed()

    def use_lanes(self, lanes: Lanes | None) -> None:
        self._stream.use_lanes(lanes)

    async def _observed(self) -> Sequence[TokenEntry]:
        entries = await self._stream.take()
        if any(entry.tokens and entry.index + len(entry.tokens) > 1 for entry in entries):
            self._proved = True
            self._canary.proved()
        return entries

    async def cancel(self, choice: int | None = None) -> None:
        await self._stream.cancel(choice)

    def fail(self, error: EyasError) -> None:
        self._stream.fail(error)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._canary.closed(self)
        await self._stream.aclose()
