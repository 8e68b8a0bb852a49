"""A device's mailbox against plain rules: what a draft worker reads of rounds, what a round gets of drafts.

The rule of drafts is what the host would make of the same proposal, and a proposal that makes no sense leaves
none.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.batch.tables import SlotTables, TableSizes, TableWrites
from eyas.engine.batch.tree import DraftTree
from eyas.engine.ipc.mailbox import MISSED_ROUNDS, NEWEST, DraftMailbox, MailLayout
from eyas.engine.ipc.messages import DraftProposal
from eyas.engine.ipc.row_ring import tag
from eyas.engine.kernels.drafts.rounds import FACTS, RoundBatch
from eyas.engine.kernels.exchange import mailbox
from eyas.engine.kernels.exchange.mailbox import MOST_POLLS, POLL_S, MailLimits, polls_in

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES, KEPT, WIDTH, VOCAB, DEEPEST = 3, 8, 6, 50, 3
TABLES = ("drafts", "parents", "depth", "mask")


@dataclass
class Rig:
    """Slots 0 to 2 have the places of their numbers, as generations 11, 12 and 13."""

    width: int = WIDTH
    nodes: int = 7
    lengths: list[int] = field(default_factory=lambda: [5, 9, 30])

    def __post_init__(self) -> None:
        self.place = MailLayout(KEPT, self.nodes)
        self.memory = np.zeros(self.place.nbytes(PLACES), np.uint8)
        self.box = DraftMailbox(memoryview(self.memory), self.place, PLACES)
        self.tables = SlotTables(TableSizes(PLACES + 1, 4, self.width), "cpu")
        for slot in range(PLACES):
            self.tables.mailbox[slot] = self.memory.ctypes.data + slot * self.place.words * 8
            self.tables.ring_generation[slot] = 11 + slot
            self.tables.length[slot] = self.lengths[slot]
            self.tables.polls[slot] = 4
            self.tables.speculative[slot] = 32
        self.slots = torch.arange(PLACES + 1, dtype=torch.int32)  # and padding

    def propose(self, slot: int, tree: tuple[list[int], list[int]], *, later: int = 0) -> None:
        """For the round whose root is `later` positions behind the slot's own."""
        base = int(self.tables.length[slot]) + later
        assert self.box.propose(slot, DraftProposal(1, 11 + slot, base, tuple(tree[0]), tuple(tree[1])))

    def fetch(self) -> None:
        mailbox.fetch(RoundBatch(self.tables, self.slots, 16), self.place, MailLimits(VOCAB, DEEPEST))

    def drafts(self, slot: int) -> list[int]:
        return self.tables.drafts[slot].tolist()


# --- rounds -----------------------------------------------------------------------------------------


def verdict(rig: Rig, counts: list[int], draws: random.Random) -> torch.Tensor:
    """What a round leaves that makes `counts` tokens certain; lengths count them then."""
    result = torch.full((len(counts), FACTS + WIDTH), -1, dtype=torch.int32)
    for slot, count in enumerate(counts):
        result[slot, 0] = count
        result[slot, FACTS : FACTS + count] = torch.tensor([draws.randrange(VOCAB) for _ in range(count)])
        rig.tables.length[slot] += count
    return result


@given(
    st.lists(st.lists(st.integers(1, DEEPEST + 1), min_size=PLACES, max_size=PLACES), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
@settings(max_examples=10)
def test_a_round_is_told_row_by_row(rounds: list[list[int]], draws: random.Random) -> None:
    """Laps of eight rows; the newest row of each place, and no word of any other."""
    rig = Rig()
    expected: dict[tuple[int, int], int] = {}
    for counts in rounds:
        starts = rig.tables.length.tolist()
        result = verdict(rig, counts, draws)
        mailbox.post(rig.tables, rig.slots[:PLACES], result, rig.place)
        for slot, count in enumerate(counts):
            for j in range(count):
                half = int(result[slot, FACTS + j]) | (NEWEST if j == count - 1 else 0)
                position = starts[slot] + j
                expected[slot, position % KEPT] = (tag(11 + slot, position) & 0xFFFFFFFF) << 32 | half
    found = rig.box.words
    for slot in range(PLACES):
        for column in range(rig.place.words):
            assert int(found[slot, column]) == expected.get((slot, column), 0)


def test_padding_and_sequences_without_a_place_tell_nothing() -> None:
    rig = Rig()
    rig.tables.mailbox[1] = 0
    result = verdict(rig, [1, 2, 1], random.Random(1))
    rest = torch.full((1, FACTS + WIDTH), 1, dtype=torch.int32)
    mailbox.post(rig.tables, rig.slots, torch.cat((result, rest)), rig.place)
    assert (rig.box.words != 0).sum(1).tolist() == [1, 0, 1]


# --- drafts -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, VOCAB - 1), max_size=7), st.integers(1, 4))
@settings(max_examples=25)
def test_drafts_are_those_that_the_host_would_leave(proposal: list[int], deepest: int) -> None:
    """Within the sequence's own depth, and that of its rounds."""
    rig = Rig()
    rig.tables.speculative[1] = deepest
    chain = DraftTree(proposal, range(-1, len(proposal) - 1))
    rig.propose(1, (list(chain.tokens), list(chain.parents)))
    rig.fetch()
    twin = SlotTables(rig.tables.sizes, "cpu")
    writes = TableWrites(twin)
    writes.draft(1, chain.narrow(min(deepest, DEEPEST)), branching=False)
    twin.apply(torch.from_numpy(writes.array()))
    assert torch.equal(rig.tables.drafts[1], twin.drafts[1])
    assert rig.tables.missed.tolist() == [1, 0, 1, 0]
    assert rig.drafts(0) == [-1] * (WIDTH - 1)


def test_chains_leave_the_tables_chain_as_it_is() -> None:
    rig = Rig(width=DEEPEST + 1, nodes=DEEPEST)
    before = [getattr(rig.tables, name).clone() for name in TABLES[1:]]
    rig.propose(0, ([7, 8, 9], [-1, 0, 1]))
    rig.propose(1, ([4, 5], [-1, 0]))
    rig.tables.speculative[0] = 2
    rig.fetch()
    assert [rig.drafts(slot) for slot in range(2)] == [[7, 8, -1], [4, 5, -1]]
    for name, old in zip(TABLES[1:], before, strict=True):
        assert torch.equal(getattr(rig.tables, name), old)


Spoil = Callable[[np.ndarray, MailLayout], None]


def _put(column: Callable[[MailLayout], int], half: int) -> Spoil:
    """Another content below the same tag."""

    def spoil(words: np.ndarray, place: MailLayout) -> None:
        at = column(place)
        words[at] = words[at] >> np.uint64(32) << np.uint64(32) | np.uint64(half & 0xFFFFFFFF)

    return spoil


def _stale(column: Callable[[MailLayout], int], generation: int, position: int) -> Spoil:
    def spoil(words: np.ndarray, place: MailLayout) -> None:
        words[column(place)] = np.uint64((tag(generation, position) & 0xFFFFFFFF) << 32 | 1)

    return spoil


TOKENS, PARENTS = (lambda place: place.header + 2), (lambda place: place.header + 2 + place.nodes)
WRONG = {
    "a token below 0": _put(TOKENS, -1),
    "a token beyond the vocabulary": _put(TOKENS, VOCAB),
    "a parent below the root": _put(PARENTS, -2),
    "its own parent": _put(PARENTS, 1),
    "a parent behind it": _put(PARENTS, 2),
    "more nodes than there is room for": _put(lambda place: place.header, 8),
    "fewer than none": _put(lambda place: place.header, -1),
    "another generation's header": _stale(lambda place: place.header, 12, 5),
    "the header of another round": _stale(lambda place: place.header, 11, 4),
    "a token of another round": _stale(TOKENS, 11, 4),
    "a parent of another sequence": _stale(PARENTS, 10, 5),
    "a token that is not written yet": lambda words, place: words.__setitem__(TOKENS(place), 0),
}


@pytest.mark.parametrize("spoil", [pytest.param(one, id=name) for name, one in WRONG.items()])
def test_what_makes_no_sense_is_no_draft(spoil: Spoil) -> None:
    """Beside a neighbour, which has its drafts."""
    rig = Rig()
    rig.tables.drafts[0] = 3
    rig.propose(0, ([7, 8, 9], [-1, 0, 1]))
    rig.propose(1, ([7, 8, 9], [-1, 0, 1]))
    spoil(rig.box.words[0], rig.place)
    rig.fetch()
    assert rig.drafts(0) == [-1] * (WIDTH - 1)
    assert rig.drafts(1)[:4] == [7, 8, 9, -1]
    assert rig.tables.missed.tolist()[1] == 0


def test_a_branch_is_no_chain() -> None:
    rig = Rig()
    rig.propose(0, ([7, 8], [-1, -1]))
    rig.fetch()
    assert rig.drafts(0) == [-1] * (WIDTH - 1)


def test_sequences_without_a_place_keep_their_drafts() -> None:
    """The host has left them."""
    rig = Rig()
    rig.tables.mailbox[1] = 0
    rig.tables.drafts[1] = torch.tensor([1, 2, 3, -1, -1])
    rig.propose(1, ([7, 8], [-1, 0]))
    rig.fetch()
    assert rig.drafts(1) == [1, 2, 3, -1, -1]


def test_late_rounds_are_counted_until_one_is_in_time() -> None:
    rig = Rig()
    for rounds in range(1, MISSED_ROUNDS + 3):
        rig.tables.length[0] += 1
        rig.fetch()
        assert rig.tables.missed[0] == rounds
    rig.propose(0, ([7], [-1]))
    rig.fetch()
    assert rig.tables.missed[0] == 0 and rig.drafts(0)[0] == 7


class Counted:
    """How often headers are read: `interpreted` loads of one volatile word."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import interpreter

        self.looks = 0
        load = interpreter.InterpreterBuilder.create_masked_load

        def counting(builder, ptrs, *rest):
            self.looks += bool(rest[-1]) and ptrs.data.size == 1
            return load(builder, ptrs, *rest)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counting)


@pytest.mark.parametrize(
    ("late", "polls", "looks"),
    [(0, 4, 4), (7, 4, 4), (9, 4, 1), (15, 4, 1), (16, 4, 4), (17, 4, 1), (64, 4, 4), (0, 1, 1), (0, 0, 0)],
)
def test_a_slot_looks_as_often_as_it_may(
    late: int, polls: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that was often late is waited for now and then: else it would stay late."""
    rig, counted = Rig(), Counted(monkeypatch)
    rig.tables.missed[0], rig.tables.polls[0] = late, polls
    rig.slots = rig.slots[:1]
    rig.fetch()
    assert counted.looks == looks


def test_waiting_is_counted_in_looks() -> None:
    waits = 0.0, POLL_S, 3.5 * POLL_S, 7.5 * POLL_S, 5.5 * POLL_S, 10.0
    assert [polls_in(seconds) for seconds in waits] == [1, 1, 3, 6, 4, MOST_POLLS]


# --- the layout -------------------------------------------------------------------------------------


def test_a_proposal_that_has_no_room_is_not_left() -> None:
    rig = Rig(nodes=2)
    for number, nodes in ((0, 3), (PLACES, 1), (-1, 1)):
        assert not rig.box.propose(number, DraftProposal(1, 11, 5, (1,) * nodes, (-1,) * nodes))
    assert not rig.box.words.any()
