"""A draft worker's device runner against the plain one, kernels interpreted: the same proposals, greedy ones
and those that know the seed, whatever batches, windows and slots there are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.engine.ipc.row_ring import RingRow, RowRing, tag
from eyas.engine.loading.draft_build import draft_worker, warm_up
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.speculation.draft_worker.device_runner import DeviceDraftRunner
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftInput
from eyas.engine.speculation.draft_worker.draft_sequences import NO_FEATURES, BatchRunner
from eyas.engine.speculation.draft_worker.seats import DraftSeats
from tests.unit.draft_runners import (
    CHAIN,
    GREEDY,
    PAGE,
    WIDTH,
    Follower,
    on_device,
    pages,
    plain,
    runners,
    told,
)

__all__ = ["plain", "runners"]  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread")

TREE = SpeculationConfig(steps=2, topk=2, draft_tokens=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "batches",
    [
        ("a17", "a2 b6 c1", "b1 c3"),
        pytest.param(("a70", "a2 b30 c1", "b1 c9", "a4 c3 b2", "b16 a5 c1"), marks=pytest.mark.slow),
    ],
    ids=["short", "long"],
)
def test_chains_are_the_plain_runners(runners: list[BatchRunner], batches: tuple[str, ...]) -> None:
    """Short and long runs side by side, windows within a page, a page that is full."""
    free = pages()
    seeded = SamplingParams(temperature=0.9, seed=2**63 + 5)
    named = {"a": Follower("prompt", 0), "b": Follower("window", 37), "c": Follower("seeded", 20, seeded)}
    different = set()
    for rows in batches:  # how many of whom
        batch = {named[one[0]]: int(one[1:]) for one in rows.split()}
        ours, theirs = told(runners, free, batch, CHAIN)
        assert theirs == ours
        different |= {tuple(tokens) for tokens, _ in ours}
    assert len(different) > 4, "every proposal was the same: nothing was tried"


@pytest.mark.parametrize("runners", [TREE], indirect=True)
def test_trees_are_the_plain_runners(runners: list[BatchRunner]) -> None:
    free = pages()
    a, b = Follower("a", 0), Follower("b", 18)
    for batch in ({a: 5, b: 3}, {b: 2, a: 1}):
        ours, theirs = told(runners, free, batch, TREE)
        assert theirs == ours and all(len(parents) == 4 for _, parents in ours)


@pytest.mark.slow
def test_a_sequence_that_lost_its_slot_is_written_down_again(runners: list[BatchRunner]) -> None:
    """Four sequences, three slots: in one batch, and one after the other."""
    free = pages()
    followers = [Follower(f"sequence {i}", 3 * i) for i in range(4)]
    for batch in (dict.fromkeys(followers, 3), {followers[0]: 2}, dict.fromkeys(followers, 1)):
        ours, theirs = told(runners, free, batch, CHAIN)
        assert theirs == ours


@pytest.mark.slow
def test_what_lies_below_a_window_is_not_seen(runners: list[BatchRunner]) -> None:
    """Its first page was another sequence's, whose rows are still there."""
    free = pages()
    before = Follower("before", 0)
    told(runners, free, {before: 20}, CHAIN)
    free[1] += before._pages[1]
    window = Follower("window", 12)
    ours, theirs = told(runners, free, {window: 2}, CHAIN)
    assert theirs == ours
    device = runners[1]
    again = window.commit(1, runners, free)[1]
    written = []
    for lowest in (12, 0):
        device.draft([replace(again, lowest=lowest)], CHAIN)
        written.append(device.pool.tensor.clone())
    assert not torch.equal(*written), "whether they are seen makes no difference here"


@pytest.mark.slow
def test_no_proposal_is_larger_than_asked(runners: list[BatchRunner]) -> None:
    asked = Follower("a", 0).commit(3, runners, pages())[1]
    lengths = [len(runners[1].draft([asked], replace(CHAIN, steps=n))[0].tree) for n in (2, 9)]
    assert lengths == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("runners", [TREE], indirect=True)
def test_who_asks_for_a_chain_gets_the_best_path_of_a_tree(runners: list[BatchRunner]) -> None:
    asked = Follower("a", 0).commit(3, runners, pages())[1]
    device, chain = runners[1], SpeculationConfig(steps=2, topk=1, draft_tokens=3)
    whole, asked_for = (device.draft([asked], spec)[0].tree for spec in (TREE, chain))
    assert list(asked_for.parents) == [-1, 0] and len(whole) == 4
    assert list(asked_for.tokens) == list(whole.thin(1).tokens)


@pytest.mark.slow
def test_a_warm_up_leaves_nothing_that_counts(runners: list[BatchRunner]) -> None:
    device = runners[1]
    assert isinstance(device, DeviceDraftRunner)
    assert warm_up(device, WIDTH, CHAIN) > 0.0
    ours, theirs = told(runners, pages(), {Follower("a", 0): 5}, CHAIN)
    assert theirs == ours


@pytest.mark.slow
def test_a_warm_up_of_a_large_pool_keeps_to_its_slots_pages(plain: EngineConfig) -> None:
    """A GPU has more pages than one sequence can have, and the tables know no bounds."""
    device = draft_worker(EngineSpec.of(replace(on_device(plain), num_pages=400))).runner
    assert isinstance(device, DeviceDraftRunner)
    before = device.tables.depth.clone()
    warm_up(device, WIDTH, CHAIN)
    assert torch.equal(device.tables.depth, before)
    assert int(device.tables.pages[2:].abs().sum()) == 0, "those pages belong to no sequence"
    device.pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("runners", [CHAIN, TREE], indirect=True)
def test_no_row_is_written_behind_those_that_are_reserved(runners: list[BatchRunner]) -> None:
    """Also where less is wanted than this engine drafts: the pages behind are other sequences'."""
    device, less = runners[1], replace(CHAIN, steps=1)
    assert isinstance(device, DeviceDraftRunner)

    def draft(owner: str, pages: list[int]) -> None:
        rows = PAGE * len(pages) - device.draft_rows(less)
        new = DraftExtension(pages, 0, [1] * rows, torch.randn(rows, WIDTH))
        device.draft([DraftInput(owner, new, GREEDY, 0)], less)

    for owner, page in (("a", 3), ("b", 5), ("c", 7)):
        draft(owner, [page, page + 1])  # every slot has known a second page
    device.pool.tensor.zero_()
    for owner in ("d", "e", "f"):
        draft(owner, [20])
    assert device.pool.tensor.flatten(1).abs().sum(1).nonzero().flatten().tolist() == [20]


class Rings:
    """What a decode engine's device would have written: a ring of each sequence's rows."""

    def __init__(self) -> None:
        self.ring = RowRing(places=3, rows=8, words=WIDTH)
        self._memory = torch.zeros(self.ring.nbytes // 8, dtype=torch.int64)

    def ringed(self, asked: DraftInput, place: int, count: int, *, known: int | None = None) -> DraftInput:
        """The same, but its last `count` features lie there, of which the reader is told that they are of
        generation `known`.
        """
        new, generation = asked.extension, place + 1
        near, far = new.features[:-count], new.features[-count:]
        first, rows = new.offset + new.base + len(near), []
        for position, row in enumerate(far.view(torch.int32).long(), first):
            at = self.ring.at(place, position) // 8
            self._memory[at : at + WIDTH] = (tag(generation, position) << 32) | (row & 0xFFFFFFFF)
            rows.append(RingRow(self._memory.data_ptr() + 8 * at, tag(known or generation, position)))
        near = near if len(near) else NO_FEATURES  # as commits have none
        return replace(asked, extension=replace(new, features=near, ringed=rows))


@pytest.mark.slow
def test_features_in_rings_give_the_same_proposals(runners: list[BatchRunner]) -> None:
    """All of a sequence's rows, or the last of them, beside sequences that have none there."""
    free, rings = pages(), Rings()
    a, b, c = Follower("a", 5), Follower("b", 37), Follower("c", 0)
    for batch, far in (({a: 3, b: 2, c: 4}, (3, 1, 0)), ({c: 1, a: 2, b: 6}, (1, 2, 6))):
        asked = list(zip(*(one.commit(count, runners, free) for one, count in batch.items()), strict=True))
        ours = runners[0].draft(list(asked[0]), CHAIN)
        some = [
            rings.ringed(one, i, count) if count else one
            for i, (one, count) in enumerate(zip(asked[1], far, strict=True))
        ]
        theirs = runners[1].draft(some, CHAIN)
        assert [list(one.tree.tokens) for one in theirs] == [list(one.tree.tokens) for one in ours]
        assert all(one.whole for one in theirs)


def test_a_sequence_whose_features_are_in_no_ring_any_more_is_named(runners: list[BatchRunner]) -> None:
    free, rings = pages(), Rings()
    followers = [Follower(name, 4) for name in "abc"]
    asked = [one.commit(2, runners, free)[1] for one in followers]
    some = [asked[0], rings.ringed(asked[1], 1, 1, known=9), rings.ringed(asked[2], 2, 2)]
    assert [one.whole for one in runners[1].draft(some, CHAIN)] == [True, False, True]


@pytest.mark.slow
def test_a_run_in_several_batches_is_whole_if_each_of_them_is(runners: list[BatchRunner]) -> None:
    """Eleven rows take three batches of four; the feature that is missing belongs to the first."""
    free, rings = pages(), Rings()
    one = Follower("a", 4).commit(11, runners, free)[1]
    new = one.extension
    far = rings.ringed(one, 1, 8).extension.ringed
    lost = [RingRow(far[0].address, far[0].tag + 1), *far[1:]]
    found = []
    for ringed in (far, lost):
        asked = replace(one, extension=replace(new, features=new.features[:3], ringed=ringed))
        found.append(runners[1].draft([asked], CHAIN)[0].whole)
    assert found == [True, False]


@pytest.mark.parametrize("plain", ["eagle3", pytest.param("dflash", marks=pytest.mark.slow)], indirect=True)
def test_nothing_is_drafted_below_the_pieces_of_a_run_before_its_last(
    runners: list[BatchRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor below rows of which nothing is asked. Eleven rows and nine have two pieces of four before the last,
    and three rows have none.
    """
    device, counts = runners[1], list[tuple[bool, int]]()
    assert isinstance(device, DeviceDraftRunner)
    for batches, drafts in ((device._contexts, False), (device._drafts, True)):
        launch = batches.launch
        monkeypatch.setattr(
            batches,
            "launch",
            lambda some, launch=launch, drafts=drafts: counts.append((drafts, len(some))) or launch(some),
        )
    warm = SamplingParams(temperature=1.5, seed=7)
    free, followers = pages(), [Follower(name, 4, warm) for name in "abc"]
    assert told(runners, free, {followers[0]: 6, followers[1]: 2}, None) == [[([], [])] * 2] * 2
    assert sum(count for _, count in counts) == 3 and not any(drafts for drafts, _ in counts)
    counts.clear()
    ours, theirs = told(runners, free, dict(zip(followers, (11, 3, 9), strict=True)), CHAIN)
    assert theirs == ours and ours[0] != ours[1] and counts.pop() == (True, 3)
    assert sum(count for _, count in counts) == 4 and not any(drafts for drafts, _ in counts)


@pytest.mark.slow
def test_more_new_pages_than_a_batch_has_room_for(runners: list[BatchRunner]) -> None:
    """A sequence that has lost its slot brings all its pages back with one row."""
    free = pages()
    long, others = Follower("long", 0), [Follower(name, 0) for name in "abc"]
    told(runners, free, {long: 150}, CHAIN)
    told(runners, free, dict.fromkeys(others, 1), CHAIN)
    ours, theirs = told(runners, free, {long: 1}, CHAIN)
    assert theirs == ours


def test_slots_go_to_those_that_ask() -> None:
    seats = DraftSeats(2)
    first, second = seats.of("a"), seats.of("b")
    assert (first.slot, second.slot) == (0, 1) and seats.of("a") is first
    first.pages = 5
    third = seats.of("c")
    assert third.slot == second.slot and third.pages == 0, "b had not asked for the longest"
    assert seats.of("a").pages == 5 and seats.of("b").slot == third.slot


def test_several_gpus_are_refused_by_name(plain: EngineConfig) -> None:
    spec = replace(EngineSpec.of(plain), config=replace(on_device(plain), tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        draft_worker(spec)


def test_the_pools_are_files_that_go(plain: EngineConfig) -> None:
    worker = draft_worker(EngineSpec.of(on_device(plain)))
    assert list(Path(plain.pool_dir).glob("eyas-*-*-*"))
    worker.runner.pool.close()
    assert {path.suffix for path in Path(plain.pool_dir).glob("eyas-*")} <= {".lock"}
