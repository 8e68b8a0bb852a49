"""Adaptive depths on a device: which graphs there are, which a step takes, and what plain rounds leave."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pacing_world import Rider
from wandering import Wandering

from eyas.common.config import GRAPH_ROWS, SpeculationConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.device.buckets import DepthBuckets, GraphBuckets
from eyas.engine.device.executor import WORDS
from eyas.engine.device.runner import MAX_CATCH_UPS, catch_up_sizes
from eyas.engine.kernels.drafts.rounds import FACTS, RoundBatch, RoundVerdicts
from eyas.engine.loading.device_build import measure_depths
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.step_shapes import (
    buckets_of,
    by_depth,
    captured,
    captured_catch_ups,
    check_words,
    largest,
    rehearsed,
)
from eyas.engine.speculation.depth_pacing import DepthPacing
from eyas.engine.speculation.feature_rows import RING_ROWS, FeatureRing
from tests.unit.rounds_rig import DEVICE

CHAIN = SpeculationConfig(7, 1, 8, adaptive=True)
TREE = SpeculationConfig(5, 8, 32, adaptive=True)


def loaded(spec: SpeculationConfig, **asked: Any) -> EngineSpec:
    return EngineSpec.of(resolve_engine("cuda", speculation=spec, **asked))


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_every_depth_has_graphs(spec: SpeculationConfig) -> None:
    made = loaded(spec)
    depths, shapes = by_depth(made), captured(made)
    assert list(depths) == ([0, 1, 3, 5, 7] if spec is CHAIN else [0, 1, 3, 5])
    widths = [buckets.width for buckets in depths.values()]
    assert widths[0] == 1 and widths[-1] == spec.width and widths == sorted(set(widths))
    assert len(set(shapes)) == len(shapes)
    for depth, buckets in depths.items():
        alone = [s for s in shapes if s.width == buckets.width and not s.chunk]
        assert {s.batch for s in alone} >= {1, 2, 4, 8} and all(s.batch for s in alone)
        assert max(s.round_rows for s in alone) <= GRAPH_ROWS + 8
        beside = {s.batch for s in shapes if s.width == buckets.width and s.chunk}
        assert bool(beside) == (depth in (0, spec.steps))
    assert max(s.batch for s in shapes if s.width == 1) == 256, "as many as without drafts"
    check_words(made, buckets_of(made))
    most = largest(made, buckets_of(made))
    for shape in (*shapes, *(s for buckets in depths.values() for s in rehearsed(made, buckets))):
        assert shape.sections["all"][1] <= most.sections["all"][1] <= WORDS


def test_without_adaptive_depths_the_graphs_are_as_ever() -> None:
    made = loaded(replace(CHAIN, adaptive=False))
    assert by_depth(made) == {} and captured(made) == list(buckets_of(made).captured())
    assert by_depth(loaded(CHAIN, draft=None)) == {}


@pytest.mark.parametrize("steps", [3, 5, 7])
def test_graphs_do_not_multiply(steps: int) -> None:
    """About as many more as a server without drafts has, and a few for each depth between."""
    spec = SpeculationConfig(steps, 1, steps + 1)
    before, now = (len(captured(loaded(replace(spec, adaptive=adaptive)))) for adaptive in (False, True))
    assert before < now <= before + 125


# --- which graphs a step takes -----------------------------------------------------------------------------


class Told(Wandering):
    """Chooses what the test says."""

    def says(self, *path: int) -> None:
        self.path = iter(path)


def depths() -> tuple[Told, DepthBuckets]:
    policy = Told(SpeculationConfig(3, 1, 4, adaptive=True), 4)
    whole = GraphBuckets(4, 4, (1, 4), (4,), 64, 64, alone=False)
    by = {d: replace(whole, width=1 + d, mixed_batches=(4,) if d in (0, 3) else ()) for d in (0, 1, 3)}
    return policy, DepthBuckets(DepthPacing(policy), by)


def seqs(count: int = 2) -> list[Any]:
    generation = SimpleNamespace(request=GenerationRequest("any", (1,), SamplingParams()))
    return [Rider(slot=slot, occupancy=slot, generation=generation) for slot in range(count)]


def choices(depths: DepthBuckets, *, prompts: bool, count: int) -> Iterator[int]:
    for _ in range(count):
        depth, buckets = depths.choose(seqs(), [True, False], prompts=prompts)
        assert buckets.width == 1 + depth
        yield depth


def test_a_step_of_rounds_is_as_deep_as_is_said() -> None:
    policy, found = depths()
    policy.says(3, 0, 1, 3)
    assert [*choices(found, prompts=False, count=4)] == [3, 0, 1, 3]


def test_beside_prompts_rounds_are_plain_or_as_deep_as_may_be() -> None:
    """And stay plain for the step whose prompt rows were counted for plain ones."""
    policy, found = depths()
    policy.says(1, 0, 3, 1)
    assert found.beside_prompts().width == 4
    assert [*choices(found, prompts=True, count=2)] == [3, 0]
    assert found.beside_prompts().width == 1
    assert [*choices(found, prompts=True, count=2)] == [0, 3]


def test_sequences_that_nothing_is_drafted_for_cost_a_row_each() -> None:
    policy, found = depths()
    policy.says(3)
    depth, buckets = found.choose(seqs(), [False, False], prompts=False)
    assert depth == 0 and buckets.width == 1


def test_those_that_catch_up_at_once_are_few_sizes() -> None:
    assert catch_up_sizes(1) == (1,) and catch_up_sizes(5) == (1, 2, 4, 8)
    assert catch_up_sizes(256)[-1] == MAX_CATCH_UPS == catch_up_sizes(64)[-1]


@pytest.mark.parametrize("running", [1, 5, 256])
def test_whatever_catches_up_has_a_graph(running: int) -> None:
    made = loaded(CHAIN, max_running=running)
    state: Any = SimpleNamespace(
        drafter=SimpleNamespace(adaptive=True), tables=SimpleNamespace(padding_slot=running)
    )
    graphs = captured_catch_ups(made, state)
    assert {*graphs} == {(size, width) for size in catch_up_sizes(running) for width in (1, 2, 4, 6, 8)}
    assert len(graphs) == len({*graphs}) and graphs[0][0] == catch_up_sizes(running)[-1], "the largest first"
    state.drafter.adaptive = False
    assert captured_catch_ups(made, state) == []


@pytest.mark.parametrize(
    ("graphs", "most", "expected"),
    [((1, 4), 4, [1, 4]), ((2, 8), 6, [2, 6]), ((1, 4), 40, [1, 4, 8, 16, 32, 40])],
)
def test_a_start_measures_batches_as_they_run(graphs: Any, most: int, expected: list[int]) -> None:
    """What is between two graphs takes as long as the larger one."""
    policy, found = depths()
    found._buckets = {depth: replace(one, batches=graphs) for depth, one in found._buckets.items()}
    ran = []
    runner: Any = SimpleNamespace(
        ahead=True, launch=lambda works: SimpleNamespace(land=lambda: ran.append((len(works), found.fixed)))
    )
    config = resolve_engine("cuda", speculation=CHAIN, max_running=most, num_pages=8)
    measure_depths(runner, found, DepthPacing(policy), config)
    assert [*dict.fromkeys(batch for batch, _ in ran)] == expected
    assert [*dict.fromkeys(depth for _, depth in ran)] == [3, 1, 0], "plain rounds last"
    assert found.fixed is None and all(policy.times.seconds(batch).min() > 0.0 for batch in expected)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_start_measures_rounds_that_follow_one_another(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4 ms on the device and 3 on the host, which an engine does at once if it may."""
    policy, found = depths()
    now = device = 0.0

    class InFlightStep:
        def __init__(self, done: float) -> None:
            self.done = done

        def land(self) -> None:
            nonlocal now
            now = max(now, self.done)

    def launch(works: Any) -> InFlightStep:
        nonlocal now, device
        now += 0.003
        device = max(device, now) + 0.004
        return InFlightStep(device)

    monkeypatch.setattr("eyas.engine.loading.device_build.time.monotonic", lambda: now)
    runner: Any = SimpleNamespace(ahead=ahead, launch=launch)
    measure_depths(
        runner,
        found,
        DepthPacing(policy),
        resolve_engine("cuda", speculation=CHAIN, max_running=4, num_pages=8),
    )
    assert policy.times.seconds(4)[1] == pytest.approx(0.004 if ahead else 0.007)
    assert now == pytest.approx(device), "nothing is left in flight"


# --- what plain rounds leave -------------------------------------------------------------------------------


def leave(tables: SlotTables, ring: FeatureRing, slot: int, start: int, certain: int) -> None:
    """A round of four nodes, of which so many are certain, from position `start` on; beside padding."""
    nodes = sorted(random.Random(start).sample(range(1, 4), certain - 1))
    path = torch.full((2, 4), -1, dtype=torch.int32, device=DEVICE)
    path[0, :certain] = torch.tensor([0, *nodes])
    path[1, 0] = 0
    result = torch.zeros(2, FACTS + 4, dtype=torch.int32, device=DEVICE)
    result[:, 0] = torch.tensor([certain, 1])
    tapped = torch.full((8, ring.width), -5.0, device=DEVICE)
    for j, node in enumerate([0, *nodes]):
        tapped[node] = 1000.0 * slot + start + j
    tables.length[slot] = start + certain
    slots = torch.tensor([slot, tables.padding_slot], dtype=torch.int32, device=DEVICE)
    ring.keep(tapped, RoundBatch(tables, slots, 4, pdl=False), RoundVerdicts(result, path))


def test_the_ring_gives_back_the_newest_rows_in_order() -> None:
    """Of sequences that have left different numbers, beside one of padding."""
    pick, page_size, slots = random.Random(0), 4, 5
    tables = SlotTables(TableSizes(slots, 12, width=4, context=44), DEVICE)
    ring, expected = FeatureRing(tables, 3, torch.float32), []
    lengths, behind = [5, 40, 17], [3, RING_ROWS, 1]
    for slot, (length, count) in enumerate(zip(lengths, behind, strict=True)):
        tables.pages[slot] = torch.tensor(pick.sample(range(100), 12))
        tables.text[slot] = torch.arange(44) + 100 * slot
        at = length - count
        while at < length:
            certain = min(pick.randrange(1, 4), length - at)
            leave(tables, ring, slot, at, certain)
            at += certain
        for position in range(length - count, length):
            page = int(tables.pages[slot, position // page_size])
            row = page * page_size + position % page_size
            expected.append((slot, position, 1000.0 * slot + position, 100 * slot + position + 1, row))
    words = torch.tensor([[2, 0, slots - 1, 1], [1, 1, 0, 1]], dtype=torch.int32, device=DEVICE)
    features, own, rows, counts = ring.waiting(words, page_size)
    assert counts.tolist() == [1, 3, 0, RING_ROWS]
    assert ring.waiting(words, page_size)[3].tolist() == [0, 0, 0, 0], "then none waits"
    assert rows.starts.tolist() == [16, 2, int(tables.length[slots - 1]), 24]
    assert all(tensor.dtype == torch.int32 for tensor in rows.tensors)
    found = []
    for row in range(4 * RING_ROWS):
        slot, token, position, kv_row = (
            int(words[0, row // RING_ROWS]),
            *(int(tensor[row]) for tensor in rows.tensors[:3]),
        )
        if kv_row < 0:
            assert token == position == 0
        else:
            assert int(own[row]) == token - 1
            found.append((slot, position, float(features[row, 0]), token, kv_row))
    assert sorted(found) == sorted(expected)


def test_rows_wait_without_features_too() -> None:
    """Of a head that is a whole model, whose features are tokens."""
    tables = SlotTables(TableSizes(3, 12, width=4, context=44), DEVICE)
    ring = FeatureRing(tables, 0, torch.float32)
    leave(tables, ring, 1, 5, 3)
    leave(tables, ring, 1, 8, 1)
    words = torch.tensor([[1], [1]], dtype=torch.int32, device=DEVICE)
    tapped, _, rows, counts = ring.waiting(words, 4)
    assert counts.tolist() == [4] and rows.starts.tolist() == [5] and tapped.shape[1] == 0
