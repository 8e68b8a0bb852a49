"""The last requests and the last quarter of an hour of a gateway, for the console.

Requests that ended: when, how, and where their time went. Seconds: the totals of the gateway's figures, read
once a second, so that a page that opens later sees what was before; and the calls that failed. It holds
counts, times, routes, ids that callers chose and the words of refusals that quote nobody, and no text of
prompts or answers. The memory is bounded, and a request costs it the same however many went before.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import msgspec
from prometheus_client.registry import Collector

from eyas.common.errors import EyasError
from eyas.common.logging import request_id
from eyas.common.types import FinishCause
from gateway.observe.timings import TimedPart, parts
from gateway.text.entries import RequestTrace, UsageCounts

MAX_REQUESTS = 128
MAX_PROMPTS = 4  # of one call, whose parts are kept
EVERY_S = 1.0
SAMPLES = 900
FAILURES = 64
FIGURES = frozenset(
    f"eyas_{name}"
    for name in (
        "generation_tokens_total",
        "verify_steps_total",
        "draft_tokens_accepted_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "http_responses_total",
    )
)
"""The figures of the console's plots."""


class PartObject(msgspec.Struct, frozen=True):
    """A stretch of a request's time, from `start_ms` after the request was parsed.

    What does not apply to it is left out: `decode` has no worker, only a transfer has bytes and a path.
    """

    name: str
    start_ms: float
    ms: float
    worker: str | msgspec.UnsetType = msgspec.UNSET
    bytes: int | msgspec.UnsetType = msgspec.UNSET
    path: str | msgspec.UnsetType = msgspec.UNSET


class RecentRequest(msgspec.Struct, frozen=True):
    """A call that was admitted and has ended, over all of its prompts and choices.

    `ended`: seconds since 1970. `finish`: one reason per choice that finished; a call that failed or was
    cancelled has fewer of them than choices, or none. `parts`: of the first prompts.
    """

    id: str
    ended: float
    total_ms: float
    first_token_ms: float | None
    finish: list[str]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_tokens: int
    rejected_tokens: int
    verify_steps: int
    acceptance_length: float | None
    parts: list[PartObject]


class RecentRequests:
    """The last `MAX_REQUESTS` requests."""

    def __init__(self) -> None:
        self._requests: deque[RecentRequest] = deque(maxlen=MAX_REQUESTS)

    def add(
        self, began: float, finish: Sequence[FinishCause], usage: UsageCounts, traces: Sequence[RequestTrace]
    ) -> None:
        """Keeps the call that this code serves, which ends now. `began`: monotonic seconds."""
        now = time.monotonic()
        firsts = [trace.first for trace in traces if trace.first]
        length = usage.acceptance_length
        self._requests.append(
            RecentRequest(
                id=request_id.get(),
                ended=round(time.time(), 3),
                total_ms=_ms(now - began),
                first_token_ms=_ms(min(firsts) - began) if firsts else None,
                finish=[*finish],
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                accepted_tokens=usage.accepted,
                rejected_tokens=usage.rejected,
                verify_steps=usage.verify_steps,
                acceptance_length=None if length is None else round(length, 3),
                parts=[_part(part, began) for trace in traces[:MAX_PROMPTS] for part in parts(trace, now)],
            )
        )

    def newest_first(self) -> list[RecentRequest]:
        """The requests, the last to end first."""
        return [*reversed(self._requests)]


def _part(part: TimedPart, began: float) -> PartObject:
    start, took, leg = _ms(part.began - began), _ms(part.ended - part.began), part.leg
    if leg is None:
        return PartObject(part.name, start, took)
    if part.name != "transfer":
        return PartObject(part.name, start, took, leg.worker)
    return PartObject(part.name, start, took, leg.worker, leg.transfer_bytes, leg.transfer_path)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


class TimelineSample(msgspec.Struct, frozen=True, array_like=True):
    """The totals at a moment: seconds since 1970, and a value per series, in the order
    of `GatewayTimeline.series`; a series that came later has none here.
    """

    time: float
    values: list[float]


class CallFailure(msgspec.Struct, frozen=True):
    """A call that failed. `reason`: the server's own words of its own trouble, else empty: what is said of a
    wrong request may quote it.
    """

    time: float
    id: str
    path: str
    status: int
    code: str
    reason: str


class GatewayTimeline:
    """The samples and the failures."""

    def __init__(self, figures: Collector) -> None:
        self._figures = figures
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}  # and their places
        self._samples: deque[TimelineSample] = deque(maxlen=SAMPLES)
        self._failures: deque[CallFailure] = deque(maxlen=FAILURES)

    def sample(self) -> None:
        """Keeps the totals of now."""
        figures: dict[int, float] = {}
        for family in self._figures.collect():
            for sample in family.samples:
                if sample.name in FIGURES:
                    name = sample.name, tuple(sorted(sample.labels.items()))
                    figures[self._series.setdefault(name, len(self._series))] = sample.value
        values = [figures.get(place, 0.0) for place in range(len(self._series))]
        self._samples.append(TimelineSample(round(time.time(), 3), values))

    async def run(self) -> None:
        """Samples until it is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(EVERY_S)

    def failed(self, path: str, status: int, error: EyasError | None) -> None:
        """Keeps a failure of the call that this code serves. `error`: None: a defect, or no such route."""
        own = error is not None and (status == 429 or status >= 500)
        code, reason = ("", "") if error is None else (error.code, str(error) if own else "")
        self._failures.append(
            CallFailure(round(time.time(), 3), request_id.get(), path, status, code, reason)
        )

    @property
    def failures(self) -> list[CallFailure]:
        """The last ones, newest first."""
        return [*reversed(self._failures)]

    def snapshot(self) -> dict[str, object]:
        """The samples, for the console."""
        series = [{"name": name, "labels": dict(labels)} for name, labels in self._series]
        return {"series": series, "samples": [*self._samples]}
