"""Places one request under `--layout auto`, by pure functions of a snapshot.

For each worker the TTFT and the TPOT (time per output token) are predicted from measured step times, queues
and cached prefixes, and compared with the configured targets. `gateway.routing.preference` decides which
workers should prefer prompts.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eyas.common.prompt_room import StepBudget, room_behind
from eyas.common.step_times import StepTimes, prompt_s

FINE = 0.9
"""A prediction within this part of its target is good enough: beyond it, other workers are considered."""

FAR = 3.0
"""A prediction beyond this multiple of its target is worse than one that moves more prompts."""

CLEAR = 1.1
"""A prompt is moved without a preference only for a gain of this factor: predictions near a target hardly
differ."""

FEW = 8
"""Workers that are compared for a part of a request, besides the one with the longest cached prefix."""

UNPREFERRED = 2
"""The rank of a placement that moves the prompt to a worker that does not prefer prompts: after all
others.
"""

SHORT = 64
"""Up to this number of uncached tokens, the decode worker may compute the prompt: a transfer takes longer."""


class AdmissionPreference(enum.Enum):
    """The kind of work that new requests give to a worker."""

    ANY = "any"
    PREFILL = "prefill"  # no new decodes, while another worker can take them
    DECODE = "decode"  # prompts only where the workers that prefer them are too busy


@dataclass(frozen=True)
class LatencyTargets:
    """The latency bounds of a good request, in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class MeasuredRates:
    """The measured step times of the workers, which are alike, and the latency targets.

    `answer`: the mean tokens of an answer, over which the delay by a prompt is spread.
    """

    times: StepTimes
    budget: StepBudget
    targets: LatencyTargets
    answer: float = 512.0


class WorkerPlace(NamedTuple):
    """The state of a worker for the placement of one prompt.

    `sequences`, `context`: the sequences that decode there or will, and their tokens. `queued`: prompt tokens
    still to be computed. `prompt_share`: the part of its recent time spent in steps with prompts.
    `prefill_room`, `decode_room`: requests for which it has capacity; 0 if it is full or lacks the role.
    `kv_room`: tokens whose KV still fits. `cached`: tokens at the start of the prompt in its cache.
    """

    worker: str
    sequences: int = 0
    context: int = 0
    queued: int = 0
    prompt_share: float = 0.0
    prefill_room: int = 1
    decode_room: int = 1
    cached: int = 0
    preference: AdmissionPreference = AdmissionPreference.ANY
    kv_room: float = math.inf


@dataclass(frozen=True)
class RequestPlacement:
    """The chosen workers and the predicted latencies. `prefill` None: the decode worker computes the
    prompt.
    """

    decode: str
    prefill: str | None
    ttft_s: float
    tpot_s: float


def place(
    prompt: int, places: Sequence[WorkerPlace], rates: MeasuredRates, apart: bool = True
) -> RequestPlacement | None:
    """Chooses the workers of a prompt of `prompt` tokens; None if every worker or pair of them is full.

    Placements that meet both targets come first, then those that miss none by far; among them those that move
    no pages, unless a worker prefers prompts; then the one with the most distance to the targets. So if no
    placement meets them, a prompt is not moved to where it would slow other sequences down, until the worker
    that prefers prompts is far behind. A prompt is also not moved if its KV would have to wait for pages, on
    either worker, unless no single worker can take the request. `apart` False: never two workers.
    """
    able = [p for p in places if p.decode_room and (apart or p.prefill_room)]
    decoders = _shortlist(_decoders(able), lambda p: (p.sequences, p.queued, p.worker))
    options = [_on_one_worker(prompt, p, rates) for p in decoders if p.prefill_room]
    if apart and decoders:
        decode = min(decoders, key=lambda p: (p.kv_room < prompt, _decode_ratio(prompt, p, rates)))
        others = [p for p in places if p.prefill_room and p.worker != decode.worker]
        if options:  # without any, the request has to wait for pages anyway
            others = [p for p in others if min(p.kv_room, decode.kv_room) >= prompt]
        options += _on_two_workers(prompt, decode, _shortlist(others, _queue), rates)
    best = min(options, key=lambda option: option[0], default=None)
    return None if best is None else best[1]


_Key = tuple[int, int, float, str]
_Option = tuple[_Key, RequestPlacement]


def _decoders(able: list[WorkerPlace]) -> list[WorkerPlace]:
    """The workers of `able` that do not prefer prompts; all of them if there are no others."""
    return [p for p in able if p.preference is not AdmissionPreference.PREFILL] or able


def _queue(p: WorkerPlace) -> tuple[bool, int, int, str]:
    """Sort key: workers that prefer prompts first, then the shortest queue less the cached prefix."""
    return p.preference is not AdmissionPreference.PREFILL, p.queued - p.cached, p.sequences, p.worker


def _shortlist(
    places: Sequence[WorkerPlace], key: Callable[[WorkerPlace], tuple[int | str, ...]]
) -> Sequence[WorkerPlace]:
    """The FEW first by `key` and the one with the longest cached prefix, which bounds the time to place."""
    if len(places) <= FEW:
        return places
    return [*heapq.nsmallest(FEW, places, key=key), max(places, key=lambda p: p.cached)]


def _on_one_worker(prompt: int, p: WorkerPlace, rates: MeasuredRates) -> _Option:
    missing = prompt - p.cached
    ttft = prompt_s(rates.times, rates.budget, missing, p.queued, p.sequences, p.context)
    tpot = _tpot(p, rates, joining=prompt, computing=missing)
    moved = 1 if p.preference is AdmissionPreference.DECODE and missing > SHORT else 0
    return _option(RequestPlacement(p.worker, None, ttft, tpot), rates, moved, missing)


def _on_two_workers(
    prompt: int, decode: WorkerPlace, places: Sequence[WorkerPlace], rates: MeasuredRates
) -> Iterator[_Option]:
    """The options that compute the prompt on one of `places` for this decode worker."""
    tpot = _tpot(decode, rates, joining=prompt)
    for p in places:
        missing = prompt - p.cached
        ttft = prompt_s(rates.times, rates.budget, missing, p.queued, p.sequences, p.context)
        harmed = _tpot(p, rates, computing=missing) if p.sequences else 0.0
        moved = 0 if p.preference is AdmissionPreference.PREFILL else UNPREFERRED
        yield _option(
            RequestPlacement(decode.worker, p.worker, ttft, max(tpot, harmed)), rates, moved, missing
        )


def _option(placement: RequestPlacement, rates: MeasuredRates, moved: int, missing: int) -> _Option:
    """The option with its sort key: the smallest is best. `missing`: the prompt tokens to compute."""
    ratio = max(placement.ttft_s / rates.targets.ttft_s, placement.tpot_s / rates.targets.tpot_s)
    own = prompt_s(rates.times, rates.budget, missing, 0, 0, 0) / rates.targets.ttft_s
    weighted = CLEAR * ratio if moved == UNPREFERRED else ratio
    missed = 0 if weighted <= FINE else 1 if weighted <= FAR else 2
    names = f"{placement.decode} {placement.prefill or ''}"
    return (missed, moved, ratio + own, names), placement


def _decode_ratio(prompt: int, p: WorkerPlace, rates: MeasuredRates) -> tuple[float, int, str]:
    """Sort key: the TPOT with the new sequence over its target, plus a little for tokens to transfer."""
    moved = 1e-3 * (prompt - p.cached) / max(prompt, 1)
    return _tpot(p, rates, joining=prompt) / rates.targets.tpot_s + moved, p.sequences, p.worker


def _tpot(p: WorkerPlace, rates: MeasuredRates, joining: int = 0, computing: int = 0) -> float:
    """Seconds per output token on `p` with a new sequence of `joining` tokens and `computing` prompt tokens.

    A part of its time is spent in long steps with prompts: the recent part, plus that of the queued prompts.
    """
    sequences, context = p.sequences + bool(joining), p.context + joining
    plain = rates.times.step_s(sequences, context)
    waiting = p.queued + computing
    if not waiting and not p.prompt_share:
        return plain
    # All rows, also of a long prompt: what a prompt adds does not depend on how it is cut.
    rows = room_behind(rates.budget, sequences, computing, p.queued).rows
    mixed = rates.times.step_s(sequences, context, rows, rows * rows)
    share = min(p.prompt_share + waiting / rows * mixed / (rates.answer * plain), 1.0)
    return 1.0 / (share / mixed + (1.0 - share) / plain)
