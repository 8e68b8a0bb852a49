"""Measures at an engine's start how long its steps take, for routers that compare places for a prompt.

A few steps of made-up sequences run through the engine's own runner, before any page has an owner; from their
times `fit` makes the table. They are timed as they follow one another under load: what a sequence takes once,
when the device is told of it and its pages, counts for none. The cost that attention adds to a row on a CPU
comes from a model's numbers alone: no clock, so no noise.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.prompt_room import StepBudget
from eyas.common.step_times import PiecewiseCurve, StepRates, StepTimes
from eyas.common.types import GenerationRequest
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.checkpoint.config import ExpertsSpec, FeedForwardSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.sizes import mixer_elements
from eyas.engine.loop.runner import StepRunner
from eyas.engine.states.shape import SPAN
from kv_transfer.layout import pages_for

AGAIN_S = 0.02
"""A step that took longer is not timed a second time."""
DEEP_BATCH = 8
"""Sequences by which the time for what they attend to is measured."""
_log = logging.getLogger("eyas.engine")
CLEARLY = 1.1
"""Smaller steps have to be faster per row by this factor: they read the weights more often and cut prompts,
and what is timed for a moment is faster than it stays once a GPU draws all the power that it may.
"""
TILE = 128
"""Rows of a tile in which prompts are computed."""
ROUNDS = 4
"""The most steps that a sample's sequences take, one after the other."""
LEAST_RISE = 1e-6
"""Milliseconds per row or token: measured times that fall are taken as flat."""
ATTENDED = 6.0
"""Weights in whose time a row alone attends to one element of a key or a value, which is gathered before."""


@dataclass(frozen=True)
class StepSample:
    """A step: `decoding` sequences of `context` tokens each, and `rows` of a prompt after `start` others."""

    decoding: int = 0
    context: int = 1
    rows: int = 0
    start: int = 0


@dataclass(frozen=True)
class StepLimits:
    """The largest steps: sequences, prompt rows, and tokens of a sequence beside `DEEP_BATCH` - 1 like it.
    `slots`: of states, if the model has some.
    """

    decoding: int
    rows: int
    length: int
    slots: int = 0


def fit(
    seconds: Callable[[StepSample], float], reach: StepLimits, budget: StepBudget, grain: int
) -> StepTimes:
    """The table by which a step's parts add up to what `seconds` says of a few samples.

    Up to the largest batch the curve over rows is that of decoding, beyond it that of prompts. What a step
    with both takes beyond the sum is seen where such steps are: of a longer one, noise would be more.
    """
    rows, half = reach.rows, max(reach.length // 2, 1)
    batch, chunk = min(DEEP_BATCH, reach.decoding), min(rows, half)

    @functools.cache
    def ms(sample: StepSample) -> float:
        return 1e3 * seconds(sample)

    shallow, deep = ms(StepSample(batch)), ms(StepSample(batch, reach.length))
    per_token = max(deep - shallow, 0.0) / (batch * max(reach.length - 1, 1)) + LEAST_RISE
    pairs = max(ms(StepSample(rows=chunk, start=half)) - ms(StepSample(rows=chunk)), 0.0) / (chunk * half)
    points = {decoding: ms(StepSample(decoding)) for decoding in _batches(reach.decoding)}
    for count in (max(rows // 4, 1), rows):
        if count > reach.decoding:
            points[count] = ms(StepSample(rows=count)) - pairs * count * count / 2
    times = StepTimes(
        _rising(points), PiecewiseCurve(((0, 0.0), (1 << 20, per_token * (1 << 20)))), 1e6 * pairs
    )
    beside = max(min(rows, budget.mixed_tokens) - batch, 1)
    both = ms(StepSample(batch, rows=beside)) - 1e3 * times.step_s(batch, batch, beside, beside**2 / 2)
    return StepTimes(times.rows_ms, times.context_ms, times.pairs_ms, max(both, 0.0), grain)


def _batches(most: int) -> list[int]:
    return sorted({1, *(size for size in (8, 32, 64, 96, 128) if size < most), most})


def _rising(points: dict[int, float]) -> PiecewiseCurve:
    """A curve through them that never falls, and rises at its end."""
    ends = sorted(points.items())
    rising = list(itertools.accumulate((ms for _, ms in ends), max))
    pairs = [(float(x), max(y, 0.0)) for (x, _), y in zip(ends, rising, strict=True)]
    if len(pairs) == 1:
        pairs.append((pairs[0][0] + 1, pairs[0][1]))
    (x0, y0), (x1, y1) = pairs[-2:]
    return PiecewiseCurve((*pairs[:-1], (x1, max(y1, y0 + LEAST_RISE * (x1 - x0)))))


def measure(runner: StepRunner, config: EngineConfig, most: StepLimits, grain: int) -> StepRates | None:
    """Runs steps of up to `most`: their rows are garbage that is never read. None: the pool is too small."""
    pages, size, width = config.num_pages or 0, config.page_size, config.speculation.width
    reach = StepLimits(
        decoding=min(most.decoding, config.max_running - 1),  # the last slot is for the prompt beside them
        rows=min(most.rows, config.chunk_tokens, most.length, pages * size) - 1,
        length=min(most.length, pages // DEEP_BATCH * size) - ROUNDS * width,
    )
    if min(reach.decoding, reach.rows - 1, reach.length - 1) < 1:
        return None
    budget = StepBudget(config.chunk_tokens, config.mixed_tokens or config.chunk_tokens)
    times = fit(_StepTimer(runner, pages, size, width, most.slots).seconds, reach, budget, grain)
    _log.info("%s", _said(times, reach))
    return StepRates(times, budget)


def fastest_chunk(runner: StepRunner, config: EngineConfig, most: StepLimits) -> int:
    """The rows of a step that computes prompts: as many as `config` says, or two thirds of them.

    Of the two, those that take less time per row by more than a little: products of some numbers of rows
    leave a part of a GPU idle, and which ones do is for it to say.
    """
    rows, pages, size = config.chunk_tokens, config.num_pages or 0, config.page_size
    fewer = 2 * rows // 3 // TILE * TILE
    if min(most.length, pages * size) < rows or not fewer:
        return rows
    timer = _StepTimer(runner, pages, size, config.speculation.width, most.slots)
    all_s, fewer_s = (
        min(timer.seconds(StepSample(rows=count)) for _ in range(2)) for count in (rows - 1, fewer - 1)
    )
    chosen = fewer if CLEARLY * fewer_s / fewer < all_s / rows else rows
    _log.info("prompts: %.2f ms for %d rows, %.2f for %d", 1e3 * fewer_s, fewer, 1e3 * all_s, rows)
    return chosen


def _said(times: StepTimes, reach: StepLimits) -> str:
    one, most = 1e3 * times.step_s(1, 0), 1e3 * times.step_s(reach.decoding, 0)
    prompt, context = 1e3 * times.step_s(0, 0, reach.rows), times.context_ms.at(1e5)
    return (
        f"steps take {one:.2f} ms with one sequence, {most:.2f} with {reach.decoding}, {prompt:.2f} with "
        f"{reach.rows} prompt rows; {times.mixed_ms:.2f} more with both, {context:.2f} more per 100,000 "
        "tokens of context"
    )


class _StepTimer:
    """Runs samples on pages that have no owner yet, in slots whose next occupants write the tables anew."""

    def __init__(self, runner: StepRunner, pages: int, page_size: int, width: int, slots: int) -> None:
        self._runner = runner
        self._pages = pages
        self._size = page_size
        self._width = width
        self._slots = slots
        self._occupancies = itertools.count(-2, -1)  # real ones count from 0 up; -1 is none

    def seconds(self, sample: StepSample) -> float:
        """The shorter of two steps, each right behind one like it."""
        works = list(self._works(sample))
        first = self._second_of_two(works)
        return first if first > AGAIN_S else min(first, self._second_of_two(works))

    def _second_of_two(self, works: list[SequenceWork]) -> float:
        """Seconds from the end of a step to that of the next one: launched before it, if the runner does
        that. Another one is launched meanwhile, as under load: what the host takes for that counts.
        """
        if not self._runner.ahead:
            self._runner.launch([_before(work) for work in works]).land()
            began = time.monotonic()
            self._runner.launch(works).land()
            return time.monotonic() - began
        before = self._runner.launch(works)
        after = self._runner.launch(works)
        if before.over:  # when, nobody has seen
            before.land()
            after.land()
            return self._mean_of_three(works)
        before.land()
        began = time.monotonic()
        another = self._runner.launch(works)
        after.land()
        seconds = time.monotonic() - began
        another.land()
        return seconds

    def _mean_of_three(self, works: list[SequenceWork]) -> float:
        """Seconds of each of three steps from rest on: of those that take the host long, the first kernel's
        launch is no part that counts.
        """
        began = time.monotonic()
        before, after = self._runner.launch(works), self._runner.launch(works)
        before.land()
        last = self._runner.launch(works)
        after.land()
        last.land()
        return (time.monotonic() - began) / 3

    def _works(self, sample: StepSample) -> Iterator[SequenceWork]:
        for number in range(sample.decoding):
            seq = self._sequence(number, sample.context, sample.context - 1)
            yield SequenceWork(seq, seq.kv_len, [0], None, sample=True, round=True)
        if sample.rows:
            seq = self._sequence(sample.decoding, sample.start + sample.rows + 1, sample.start)
            yield SequenceWork(seq, sample.start, [0] * sample.rows, None, sample=False)

    def _sequence(self, number: int, length: int, computed: int) -> Sequence:
        """A sequence with pages of its own, as far as there are enough."""
        request = GenerationRequest("measured", (0,) * length, SamplingParams())
        seq = Sequence(
            number, Generation(request, 0, GenerationKind.LOCAL, 0.0, 0.0), 0, request.prompt_ids, []
        )
        count = min(pages_for(length + ROUNDS * self._width, self._size), self._pages)
        seq.pages = [(number * count + page) % self._pages for page in range(count)]
        seq.kv_len = seq.draft_len = computed
        if self._slots:
            seq.state, seq.bound = number % self._slots, computed // SPAN * SPAN
        seq.slot, seq.occupancy = number, next(self._occupancies)
        return seq


def _before(work: SequenceWork) -> SequenceWork:
    """The round before a round, from which its state goes on; a chunk again."""
    return replace(work, start=work.start - 1) if work.round and work.start > work.seq.bound else work


def context_of_a_row(model: ModelConfig) -> float:
    """The context, in tokens, with which a row takes twice as long as without any.

    Layers with a window count as if they attended to nothing: what they read has an end.
    """
    if model.foreign is not None:
        weights = model.foreign.elements
    else:
        weights = sum(_weights(model.hidden_size, layer) for layer in model.layers)
        weights += model.hidden_size * model.vocab_size
    read = sum(_attended(layer) for layer in model.layers)
    return weights / (ATTENDED * read) if read else float(model.context_length)


def _attended(layer: LayerSpec) -> int:
    """Elements of keys and values that a row's heads read of one token."""
    spec = layer.attention
    bounded = spec.window or spec.chunk or not layer.attends
    return 0 if bounded else spec.num_heads * (spec.head_dim + (spec.latent or spec.head_dim))


def _weights(hidden: int, layer: LayerSpec) -> int:
    """The weights of one layer that a row meets."""
    return mixer_elements(layer, hidden) + 3 * hidden * _width(layer.feed_forward)


def _width(spec: FeedForwardSpec) -> int:
    """The width of all feed-forwards that a row takes."""
    return spec.per_row * spec.width + spec.shared_width if isinstance(spec, ExpertsSpec) else spec.width
