"""The last requests that ended, for the console: when, how, and where their time went.

It holds counts, times and ids that callers chose, and no text of prompts or answers. The memory is bounded,
and a request costs it the same however many went before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from eyas.common.logging import request_id
from eyas.common.types import FinishCause
from gateway.observe.timings import TimedPart, parts
from gateway.text.entries import RequestTrace, UsageCounts

MAX_REQUESTS = 128
MAX_PROMPTS = 4  # of one call, whose parts are kept


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
