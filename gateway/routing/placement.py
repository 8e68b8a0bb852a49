"""Places one request under `--layout auto`: a pure function of a snapshot.

For each worker it predicts the time to the first token and the time per output token, from measured step
times, queues and cached prefixes, and compares them with the configured targets. Pure numbers: no stream, no
clock, no network. Which workers should prefer prompts is decided in `gateway.routing.preference`.
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
"""A prediction within this part of its target is good enough: beyond it, other places are looked for."""

FAR = 3.0
"""Beyond this many times its target, a prediction is worse than one that moves more."""

CLEAR = 1.1
"""A prompt that no preference moves is moved for at least this factor: near a target all is nearly alike."""

FEW = 8
"""Workers that are looked at for a part of a request, beside the one with the longest cached prefix."""

UNASKED = 2
"""The rank of a placement on two workers of which none prefers prompts, after those that move less."""

SHORT = 64
"""Up to this number, missing tokens may be computed where the request decodes: a transfer takes longer."""


class AdmissionPreference(enum.Enum):
    """The kind of work that a worker takes from the next admission on."""

    ANY = "any"
    PREFILL = "prefill"  # no new decodes, while another worker can take them
    DECODE = "decode"  # prompts only where the workers that prefer them are too busy


@dataclass(frozen=True)
class LatencyTargets:
    """Bounds of a good request, in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class MeasuredRates:
    """The measured rates of the workers, which are alike, and their targets.

    `answer`: the mean tokens of an answer; the harm of a prompt is spread over as many steps.
    """

    times: StepTimes
    budget: StepBudget
    targets: LatencyTargets
    answer: float = 512.0


class WorkerPlace(NamedTuple):
    """A worker as the policy sees it, for one prompt.

    `sequences` and `context`: the ones that decode there or will, and their tokens. `queued`: prompt tokens
    that are still to be computed there. `prompt_share`: the part of its recent time that went to steps with
    prompts. `prefill_room`, `decode_room`: requests that it can still take; 0: it is full, or has not the
    role. `kv_room`: tokens whose KV still fits there. `cached`: tokens at the start of the prompt that
    it holds.
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
    """The decision, and what was predicted. `prefill` None: the decode worker computes the prompt."""

    decode: str
    prefill: str | None
    ttft_s: float
    tpot_s: float


def place(
    prompt: int, places: Sequence[WorkerPlace], rates: MeasuredRates, apart: bool = True
) -> RequestPlacement | None:
    """Chooses the workers of a prompt of `prompt` tokens; None: every worker or pair of them is full.

    Placements that keep both targets come first, then those that miss none by far; among them the ones that
    move no pages, unless some worker prefers prompts; then the one that is furthest from its targets. So
    where no placement keeps them, no prompt is moved to sequences that it would slow down, until the worker
    that prefers prompts is far behind. Nor is it moved where its KV would have to wait for pages, on either
    side, unless no worker takes it whole. `apart` False: never two workers.
    """
    able = [p for p in places if p.decode_room and (apart or p.prefill_room)]
    decoders = _few(_decoders(able), lambda p: (p.sequences, p.queued, p.worker))
    options = [_together(prompt, p, rates) for p in decoders if p.prefill_room]
    if apart and decoders:
        decode = min(decoders, key=lambda p: (p.kv_room < prompt, _ratio_of_decoding(prompt, p, rates)))
        others = [p for p in places if p.prefill_room and p.worker != decode.worker]
        if options:  # else it has to wait for pages somewhere
            others = [p for p in others if min(p.kv_room, decode.kv_room) >= prompt]
        options += _apart(prompt, decode, _few(others, _queue), rates)
    best = min(options, key=lambda option: option[0], default=None)
    return None if best is None else best[1]


_Key = tuple[int, int, float, str]
_Option = tuple[_Key, RequestPlacement]


def _decoders(able: list[WorkerPlace]) -> list[WorkerPlace]:
    """Workers of `able`; the ones that prefer prompts only if there are no others."""
    return [p for p in able if p.preference is not AdmissionPreference.PREFILL] or able


def _queue(p: WorkerPlace) -> tuple[bool, int, int, str]:
    """Workers that prefer prompts first, then the shortest queue of prompts that are not cached."""
    return p.preference is not AdmissionPreference.PREFILL, p.queued - p.cached, p.sequences, p.worker


def _few(
    places: Sequence[WorkerPlace], key: Callable[[WorkerPlace], tuple[int | str, ...]]
) -> Sequence[WorkerPlace]:
    """The FEW first by `key`, and the one with the longest cached prefix: no cluster takes long."""
    if len(places) <= FEW:
        return places
    return [*heapq.nsmallest(FEW, places, key=key), max(places, key=lambda p: p.cached)]


def _together(prompt: int, p: WorkerPlace, rates: MeasuredRates) -> _Option:
    missing = prompt - p.cached
    ttft = prompt_s(rates.times, rates.budget, missing, p.queued, p.sequences, p.context)
    tpot = _tpot(p, rates, joining=prompt, computing=missing)
    moved = 1 if p.preference is AdmissionPreference.DECODE and missing > SHORT else 0
    return _option(RequestPlacement(p.worker, None, ttft, tpot), rates, moved, missing)


def _apart(
    prompt: int, decode: WorkerPlace, places: Sequence[WorkerPlace], rates: MeasuredRates
) -> Iterator[_Option]:
    """The prompt on any of `places`, for one decode worker."""
    tpot = _tpot(decode, rates, joining=prompt)
    for p in places:
        missing = prompt - p.cached
        ttft = prompt_s(rates.times, rates.budget, missing, p.queued, p.sequences, p.context)
        harmed = _tpot(p, rates, computing=missing) if p.sequences else 0.0
        moved = 0 if p.preference is AdmissionPreference.PREFILL else UNASKED
        yield _option(
            RequestPlacement(decode.worker, p.worker, ttft, max(tpot, harmed)), rates, moved, missing
        )


def _option(placement: RequestPlacement, rates: MeasuredRates, moved: int, missing: int) -> _Option:
    """The option with its sort key: the smallest is best. `missing`: tokens to compute, which cost too."""
    ratio = max(placement.ttft_s / rates.targets.ttft_s, placement.tpot_s / rates.targets.tpot_s)
    own = prompt_s(rates.times, rates.budget, missing, 0, 0, 0) / rates.targets.ttft_s
    weighted = CLEAR * ratio if moved == UNASKED else ratio
    missed = 0 if weighted <= FINE else 1 if weighted <= FAR else 2
    names = f"{placement.decode} {placement.prefill or ''}"
    return (missed, moved, ratio + own, names), placement


def _ratio_of_decoding(prompt: int, p: WorkerPlace, rates: MeasuredRates) -> tuple[float, int, str]:
    """How near to its target one more sequence would bring it, whose cached tokens need no transfer."""
    moved = 1e-3 * (prompt - p.cached) / max(prompt, 1)
    return _tpot(p, rates, joining=prompt) / rates.targets.tpot_s + moved, p.sequences, p.worker


def _tpot(p: WorkerPlace, rates: MeasuredRates, joining: int = 0, computing: int = 0) -> float:
    """Seconds per output token there, with a sequence of `joining` tokens more and `computing` prompt tokens.

    Of its time a part goes to long steps with prompts: the part of late, and what is queued now.
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
