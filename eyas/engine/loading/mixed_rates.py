"""Measures at an engine's start what prompt rows cost the streams beside them, for its own scheduler."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from eyas.common.config import EngineConfig
from eyas.common.step_times import ChunkSize, PiecewiseCurve
from eyas.engine.loading.step_rates import ROUNDS, StepLimits, StepSample, StepTimer
from eyas.engine.loop.runner import StepRunner
from eyas.engine.scheduling.beside_streams import BesideStreams, MixedTimes

DEEP, LEAST_DEEP = 4096, 512
"""Tokens after which a chunk shows what it takes to attend to them: so many, or as many as there may be."""
_BESIDE, _CONTEXT = 32, 512  # sequences beside prompts, and what each attends to, while a chunk attends
_BATCHES = (1, 8, 32, 128)
_log = logging.getLogger("eyas.engine")


def beside_streams(
    runner: StepRunner,
    config: EngineConfig,
    most: StepLimits,
    sizes: Callable[[int], SequenceOf[ChunkSize]],
) -> BesideStreams | None:
    """The choice among `sizes`, by steps of up to `most`. None: nothing is to be chosen, or the pool is too
    small to measure it.
    """
    decoding = min(_BESIDE, config.max_running - 1)  # the last slot is for the prompt beside them
    known = sizes(max(decoding, 1))
    room = min(most.length, (config.num_pages or 0) * config.page_size) - ROUNDS * config.speculation.width
    deep = min(DEEP, room // 2, room - known[-1].rows - 1)
    if decoding < 1 or len(known) < 2 or deep < LEAST_DEEP or not config.mixed_tokens:
        return None
    timer = StepTimer(runner, config, most.slots)

    def ms(sample: StepSample) -> float:
        return 1e3 * timer.once(sample)

    batches = sorted({decoding, *(batch for batch in _BATCHES if batch < config.max_running)})
    plain = {batch: ms(StepSample(batch)) for batch in batches}
    attending = ms(StepSample(decoding, deep)) - plain[decoding]
    without = ms(StepSample(decoding, _CONTEXT))
    rows = {size.total: ms(StepSample(decoding, _CONTEXT, size.rows)) for size in known}
    behind = {size.total: ms(StepSample(decoding, _CONTEXT, size.rows, deep)) for size in known}
    taken = (known[0].total - known[0].rows) / decoding  # rows of a round
    fewer = {round(taken * b): without - plain[decoding] + plain[b] for b in batches if b <= decoding}
    times = MixedTimes(
        plain_ms=_curve(plain),
        rows_ms=_curve(fewer | rows),
        context_ms=max(attending, 0.0) / (decoding * deep),
        behind_ms=_curve({total: max(behind[total] - rows[total], 0.0) / deep for total in rows}),
    )
    most_rows = known[-1]
    _log.info(
        "%d prompt rows beside %d sequences: %.2f ms, %.2f after %d others; without %.2f",
        *(most_rows.rows, decoding, rows[most_rows.total], behind[most_rows.total], deep, without),
    )
    return BesideStreams(times, sizes)


def _curve(points: dict[int, float]) -> PiecewiseCurve:
    """A curve that never falls: what was measured longer than a larger step was disturbed."""
    ends = sorted(points.items(), reverse=True)
    least = itertools.accumulate((ms for _, ms in ends), min)
    return PiecewiseCurve(tuple((float(x), ms) for (x, _), ms in zip(ends, least, strict=True))[::-1])
