"""Prompt rows beside streams: by the times of steps, measured and chosen by."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.common.config import EngineConfig
from eyas.common.step_times import ChunkSize, PiecewiseCurve
from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.device.buckets import GraphBuckets
from eyas.engine.loading import step_rates
from eyas.engine.loading.mixed_rates import beside_streams
from eyas.engine.loading.step_rates import StepLimits
from eyas.engine.scheduling import beside_streams as module
from eyas.engine.scheduling.beside_streams import (
    LATE_S,
    LONGER,
    SOON_S,
    BesideStreams,
    MixedTimes,
    Streams,
)
from tests.unit.engine_rig import Rig, request

BUCKETS = GraphBuckets(1, 32, (8, 32, 48, 64), (8, 32, 48, 64), 3072, 512)
H200 = MixedTimes(  # of an 8B in bf16, keys of small chunks cut into parts
    PiecewiseCurve(((1, 4.0), (8, 4.1), (48, 4.8), (64, 4.9))),
    PiecewiseCurve(((8, 4.1), (128, 5.5), (192, 6.3), (256, 6.8), (320, 8.1), (384, 9.3), (512, 11.5))),
    context_ms=28e-6,
    behind_ms=PiecewiseCurve(((128, 0.2e-3), (256, 0.36e-3), (512, 0.62e-3))),
)
CHOICE = BesideStreams(H200, BUCKETS.chunk_sizes)
CASES = list(
    itertools.product((1, 8, 30, 48, 64), (0, 20_000, 260_000), (0, 3500, 100_000), (1, 3000, 9000, 20_000))
)


def sizes(streams: Streams) -> list[ChunkSize]:
    return BUCKETS.chunk_sizes(streams.decoding)


@pytest.mark.parametrize("way", ["as it is", "always the largest", "never larger"])
def test_streams_wait_little_and_prompts_not_long(way: str) -> None:
    """The largest step within `LONGER`; a larger one if what waits needs it, and no larger than it needs. The
    two other ways break this.
    """
    broken = 0
    for decoding, context, start, waiting in CASES:
        streams = Streams(decoding, context)
        known = sizes(streams)
        rows = {
            "as it is": CHOICE.rows(streams, start, waiting),
            "always the largest": known[-1].rows,
            "never larger": known[0].rows,
        }[way]
        ms = {size.rows: H200.mixed(streams, size, start) for size in known}
        most = LONGER * H200.plain(streams)
        within = [size.rows for size in known if ms[size.rows] <= most] or [known[0].rows]
        soon = [size.rows for size in known if waiting * ms[size.rows] <= 1e3 * SOON_S * size.rows]
        wanted = max(max(within), min(soon, default=known[-1].rows))
        broken += rows != wanted
    assert (broken == 0) == (way == "as it is")


def test_a_prompt_of_8192_tokens_beside_48_streams() -> None:
    """All its steps keep within `LONGER`, and it takes less than half a second."""
    streams, start, spent = Streams(48, 48 * 700), 0, 0.0
    while start < 8192:
        rows = CHOICE.rows(streams, start, 8192 - start)
        size = next(size for size in sizes(streams) if size.rows == rows)
        spent += (ms := H200.mixed(streams, size, start))
        assert ms <= LONGER * H200.plain(streams)
        start += rows
    assert spent < 500


def test_many_is_more_than_steps_with_a_graph_compute_in_time() -> None:
    streams = Streams(48, 48 * 700)
    largest = sizes(streams)[-1]
    assert CHOICE.many(streams) / largest.rows * H200.mixed(streams, largest, 0) == pytest.approx(
        1e3 * LATE_S
    )
    assert CHOICE.many(streams) > 8192, "one prompt of 8,192 is not many"
    assert CHOICE.many(Streams(64, 1_000_000)) < CHOICE.many(streams), "where steps are long, fewer are many"


@pytest.mark.parametrize(("waiting", "expected"), [(10, 4), (35, 6), (50, 9)])
def test_a_scheduler_takes_the_rows_that_it_chooses(waiting: int, expected: int) -> None:
    """Few beside a stream, more where these would take too long, and where many wait as without times."""
    flat = PiecewiseCurve(((1, 50.0), (8, 50.0)))
    slow = replace(H200, plain_ms=flat, rows_ms=PiecewiseCurve(((1, 0.0), (5, 20.0), (7, 150.0))))
    rig = Rig(max_running=4)
    rig.scheduler.tables.limits = replace(
        rig.scheduler.limits,
        mixed_prefill_budget=lambda _, many: 9 if many else 7,
        beside=BesideStreams(slow, lambda _: [ChunkSize(4, 5), ChunkSize(6, 7)]),
    )
    rig.submit(request(2, max_tokens=9, id="running"))
    (work,) = rig.scheduler.schedule()
    work.seq.kv_len = work.seq.draft_len = work.start + len(work.tokens)
    work.seq.output.append(1)
    rig.submit(request(tuple(range(waiting + 1)), id="new"))
    rounds, chunk = rig.scheduler.schedule()
    assert (rounds.round, chunk.round) == (True, False)
    assert len(chunk.tokens) == expected


class Device:
    """A runner on a clock of its own, whose steps take what `times` say."""

    ahead, drafts = True, False

    def __init__(self, times: MixedTimes) -> None:
        self.times = times
        self.now = self.free = 100.0
        self.longest = 0  # rows of a sequence

    def launch(self, works: list[SequenceWork]) -> Any:
        rounds = [work for work in works if work.round]
        self.longest = max(self.longest, *(work.start + len(work.tokens) for work in works))
        chunk = next((work for work in works if not work.round), None)
        streams = Streams(len(rounds), sum(work.start for work in rounds))
        ms = self.times.plain(streams)
        if chunk is not None:
            rows = len(chunk.tokens)
            ms = self.times.mixed(streams, ChunkSize(rows, rows + len(rounds)), chunk.start)
        self.free = end = max(self.now, self.free) + 1e-3 * ms
        return SimpleNamespace(over=self.now >= end, land=lambda: self.land(end))

    def land(self, end: float) -> None:
        self.now = max(self.now, end)


def test_a_start_finds_the_times_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It chooses as one would who knows them."""
    device: Any = Device(H200)
    monkeypatch.setattr(step_rates.time, "monotonic", lambda: device.now)
    config = EngineConfig(num_pages=5000, max_running=256, chunk_tokens=3072, mixed_tokens=512)
    limits = StepLimits(256, 3072, 16384)
    found = beside_streams(device, config, limits, BUCKETS.chunk_sizes)
    assert found is not None
    for decoding, context, start, waiting in CASES:
        streams = Streams(decoding, context)
        chosen, nearly = found.rows(streams, start, waiting), set()
        for factor in (0.97, 1.0, 1.03):
            with monkeypatch.context() as changed:
                changed.setattr(module, "LONGER", factor * LONGER)
                nearly.add(CHOICE.rows(streams, start, round(waiting * factor)))
        assert chosen in nearly
        assert found.many(streams) == pytest.approx(CHOICE.many(streams), rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [{"num_pages": 8}, {"max_running": 1}, {"mixed_tokens": 0}],
    ids=lambda changes: next(iter(changes)),
)
def test_where_nothing_can_be_measured_nothing_is_chosen(changes: dict[str, Any]) -> None:
    config = EngineConfig(num_pages=5000, max_running=256, chunk_tokens=3072, mixed_tokens=512)
    runner: Any = None
    assert (
        beside_streams(runner, replace(config, **changes), StepLimits(256, 3072, 16384), BUCKETS.chunk_sizes)
        is None
    )


def test_steps_are_measured_within_a_sequence() -> None:
    """The longest chunk and what it attends to together: no sequence has more rows, and no pool."""
    large = GraphBuckets(1, 32, (8, 32), (8, 32), 4096, 2048)
    config = EngineConfig(num_pages=5000, max_running=33, chunk_tokens=4096, mixed_tokens=2048)
    for length, pages in ((2528, 5000), (16384, 158), (2560, 5000), (16384, 160)):
        device = Device(H200)
        reached = beside_streams(
            device,  # type: ignore[arg-type]
            replace(config, num_pages=pages),
            StepLimits(33, 4096, length),
            large.chunk_sizes,
        )
        assert (reached is None) == (min(length, 16 * pages) == 2528)
        assert device.longest < min(length, 16 * pages)
