"""The times of a request's parts, for replies to callers that ask, traces and the console."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from eyas.common.types import EngineTimings, Role
from gateway.text.entries import RequestTrace, UsageCounts


class TimedPart(msgspec.Struct, frozen=True):
    """A stretch of a request's time, in monotonic seconds: `queue`, `prefill`, `transfer` or `decode`.

    `leg`: the worker's part that it belongs to; None for `decode`, which may have moved between workers.
    """

    name: str
    began: float
    ended: float
    leg: EngineTimings | None = None


def parts(trace: RequestTrace, ended: float) -> Iterator[TimedPart]:
    """The stages of a request that has ended. Parts on two workers overlap.

    Each worker queued the request, and computed the prompt or pulled its pages; decode is all after token 0.
    """
    for leg in trace.legs:
        started = leg.sent + leg.queue_ms / 1e3
        yield TimedPart("queue", leg.sent, started, leg)
        if leg.prefill_ms:
            yield TimedPart("prefill", started, started + leg.prefill_ms / 1e3, leg)
        if leg.transfer_path:
            yield TimedPart("transfer", started, started + leg.transfer_ms / 1e3, leg)
    if trace.second:
        yield TimedPart("decode", trace.first, ended)


def pulls(trace: RequestTrace) -> Iterator[tuple[str, EngineTimings]]:
    """(the worker that had the pages, the part of the one that pulled them), per pull of the request."""
    source = ""
    for leg in trace.legs:
        if leg.role is Role.PREFILL:
            source = leg.worker
        elif leg.transfer_path and source:
            yield source, leg


class LegObject(msgspec.Struct, frozen=True):
    """One worker's part. Fields of what did not happen there are left out."""

    role: str
    worker: str
    queue_ms: float
    prefill_ms: float | msgspec.UnsetType
    cached_tokens: int
    transfer_ms: float | msgspec.UnsetType
    transfer_bytes: int | msgspec.UnsetType
    transfer_path: str | msgspec.UnsetType


class TimingsObject(msgspec.Struct, frozen=True):
    """Times since the request was parsed; `first_decode_ms` is from token 0 to the first token after it.

    None is what did not happen: an answer may have no token.
    """

    first_token_ms: float | None
    first_decode_ms: float | None
    total_ms: float
    verify_steps: int
    acceptance_length: float | None
    legs: list[LegObject]


def timings_object(began: float, trace: RequestTrace, usage: UsageCounts) -> TimingsObject:
    """The timings of a request that began at `began` (monotonic seconds) and ends now."""
    length = usage.acceptance_length
    return TimingsObject(
        first_token_ms=_ms(trace.first - began) if trace.first else None,
        first_decode_ms=_ms(trace.second - trace.first) if trace.second else None,
        total_ms=_ms(time.monotonic() - began),
        verify_steps=usage.verify_steps,
        acceptance_length=None if length is None else round(length, 3),
        legs=[_leg(leg) for leg in trace.legs],
    )


def _leg(leg: EngineTimings) -> LegObject:
    pulled = bool(leg.transfer_path)
    return LegObject(
        role=leg.role.value if leg.role is not None else "",
        worker=leg.worker,
        queue_ms=round(leg.queue_ms, 3),
        prefill_ms=round(leg.prefill_ms, 3) if leg.prefill_ms else msgspec.UNSET,
        cached_tokens=leg.cached_tokens,
        transfer_ms=round(leg.transfer_ms, 3) if pulled else msgspec.UNSET,
        transfer_bytes=leg.transfer_bytes if pulled else msgspec.UNSET,
        transfer_path=leg.transfer_path if pulled else msgspec.UNSET,
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
