"""A draft worker's device at its end of the mailboxes, against the end of a host: `DraftMailbox`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.ipc.mailbox import DraftMailbox, MailLayout
from eyas.engine.ipc.row_ring import row_tag
from eyas.engine.kernels.drafts.rounds import RoundBatch
from eyas.engine.kernels.exchange import mail_rounds
from eyas.engine.kernels.exchange.mail_rounds import WRONG, HeardRows, MailWait, TakenFeatures

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES, KEPT, FEW, VOCAB, PAGE, ROW_BYTES, NODES = 3, 8, 4, 50, 4, 64, 3


@dataclass
class Rig:
    """Slots 0 to 2 have the places of their numbers, as generations 11, 12 and 13; then padding."""

    looks: int = 2
    lengths: list[int] = field(default_factory=lambda: [5, 9, 30])
    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # of rings, where they have memory

    def __post_init__(self) -> None:
        self.place = MailLayout(KEPT, NODES)
        self.memory = np.zeros(self.place.nbytes(PLACES), np.uint8)
        self.box = DraftMailbox(memoryview(self.memory), self.place, PLACES)
        tables = self.tables = SlotTables(TableSizes(PLACES + 1, 16, NODES + 1), "cpu")
        tables.pages.copy_(torch.arange(tables.pages.numel()).view_as(tables.pages))
        for slot in range(PLACES):
            tables.mailbox[slot] = self.memory.ctypes.data + slot * self.place.words * 8
            tables.ring[slot] = 1 << 40 | slot << 20
            tables.ring_generation[slot] = 11 + slot
            tables.length[slot] = self.lengths[slot]
        self.slots = torch.tensor([2, 3, 0, 1], dtype=torch.int32)
        self.stop = torch.zeros(1, dtype=torch.int32)
        self.heard = HeardRows.empty(4, FEW, "cpu")

    def post(self, slot: int, base: int, tokens: list[int]) -> None:
        empty = np.zeros((len(tokens), 0), np.float32)
        self.box.post(slot, 11 + slot, base, tokens, empty)

    def hear(self) -> None:
        wait = MailWait(self.place, ROW_BYTES, VOCAB, self.looks, self.stop)
        mail_rounds.hear(RoundBatch(self.tables, self.slots, PAGE), wait, self.heard)


def check_lane(rig: Rig, lane: int, slot: int, before: int, expected: list[int]) -> None:
    """What stands in a lane for these new rows; perhaps none."""
    heard, count, own = rig.heard, len(expected), slice(lane * FEW, lane * FEW + FEW)
    positions = [before + i for i in range(count)]
    rest = [0] * (FEW - count)
    pages = rig.tables.pages[slot].tolist()
    assert int(heard.counts[lane]) == count
    assert int(heard.slots[lane]) == (slot if count else PLACES)
    assert heard.rows.tokens[own].tolist() == expected + rest
    assert heard.rows.positions[own].tolist() == positions + rest
    rows = [pages[p // PAGE] * PAGE + p % PAGE for p in positions]
    assert heard.rows.kv_rows[own].tolist() == rows + [-1] * len(rest)
    assert int(heard.rows.starts[lane]) == (before if count else 0)
    assert int(heard.last[lane]) == (lane * FEW + count - 1 if count else 0)
    addresses = [int(rig.tables.ring[slot]) + p % KEPT * ROW_BYTES for p in positions]
    assert heard.rings[0, own].tolist() == addresses + rest
    assert heard.rings[1, own].tolist()[:count] == [row_tag(11 + slot, p, before) for p in positions]
    assert int(rig.tables.length[slot]) == before + count
    if count:
        assert int(rig.tables.root[slot]) == expected[-1]


@given(st.lists(st.lists(st.integers(0, FEW), min_size=PLACES, max_size=PLACES), min_size=1, max_size=3))
@settings(max_examples=12, deadline=None)
def test_a_device_hears_what_a_host_does(rounds: list[list[int]]) -> None:
    """Rounds of any number of rows, none too, over laps of their rings."""
    rig, draws = Rig(), random.Random(7)
    for counts in rounds:
        before = rig.tables.length.tolist()
        for slot, count in enumerate(counts):
            if count:
                rig.post(slot, before[slot], [draws.randrange(VOCAB) for _ in range(count)])
        expected = [rig.box.rounds(slot, 11 + slot, before[slot]) for slot in range(PLACES)]
        rig.hear()
        for lane, slot in ((0, 2), (2, 0), (3, 1)):
            check_lane(rig, lane, slot, before[slot], list(expected[slot] or ()))
        assert int(rig.heard.slots[1]) == PLACES and int(rig.heard.counts[1]) == 0
        assert int(rig.tables.length[PLACES]) == 0


def test_rounds_are_heard_one_by_one_and_half_of_one_is_not() -> None:
    """Rows of different rounds have their features by different tags."""
    rig = Rig()
    rig.post(0, 5, [1, 2])
    rig.post(0, 7, [3])
    rig.box.post(1, 12, 9, [4, 5], np.zeros((2, 0), np.float32))
    rig.box.words[1, 10 % KEPT] = 0
    rig.hear()
    check_lane(rig, 2, 0, 5, [1, 2])
    check_lane(rig, 3, 1, 9, [])
    rig.hear()
    check_lane(rig, 2, 0, 7, [3])
    check_lane(rig, 3, 1, 9, [])


def test_a_token_that_is_none_is_reported_and_changes_nothing() -> None:
    rig = Rig()
    rig.post(0, 5, [1, VOCAB])
    rig.post(1, 9, [VOCAB - 1])
    rig.hear()
    assert int(rig.heard.counts[2]) == WRONG and int(rig.heard.slots[2]) == PLACES
    assert rig.tables.length.tolist()[:2] == [5, 10]
    assert rig.heard.rows.kv_rows[2 * FEW : 3 * FEW].tolist() == [-1] * FEW
    check_lane(rig, 3, 1, 9, [VOCAB - 1])


def feature(rig: Rig, slot: int, base: int, generation: int = 11) -> None:
    """The first word of the first row of a round is there."""
    at = base % KEPT * ROW_BYTES // 8
    rig.rows[slot, at] = row_tag(generation + slot, base, base) << 32 | 77


@pytest.fixture
def ringed() -> Rig:
    """Its rings have memory."""
    rig = Rig()
    rig.rows = torch.zeros(PLACES, KEPT * ROW_BYTES // 8, dtype=torch.int64)
    for slot in range(PLACES):
        rig.tables.ring[slot] = rig.rows[slot].data_ptr()
    return rig


def watched(rig: Rig) -> HeardRows:
    coming, before = HeardRows.empty(4, FEW, "cpu"), rig.tables.memory.clone()
    wait = MailWait(rig.place, ROW_BYTES, VOCAB, rig.looks, rig.stop)
    mail_rounds.watch(RoundBatch(rig.tables, rig.slots, PAGE), wait, coming)
    assert torch.equal(rig.tables.memory, before), "nothing is certain yet"
    return coming


def test_rows_are_seen_coming_before_it_is_known_which_are_certain(ringed: Rig) -> None:
    """Those of slot 0, whose lane is the third; slot 1 has some of the round before, slot 2 another's."""
    feature(ringed, 0, 5)
    feature(ringed, 1, 8)
    feature(ringed, 2, 30, generation=10)
    coming = watched(ringed)
    assert coming.slots.tolist() == [PLACES, PLACES, 0, PLACES]
    own, pages = slice(2 * FEW, 3 * FEW), ringed.tables.pages[0].tolist()
    positions = list(range(5, 5 + FEW))
    assert coming.rows.positions[own].tolist() == positions and int(coming.rows.starts[2]) == 5
    assert coming.rows.kv_rows[own].tolist() == [pages[p // PAGE] * PAGE + p % PAGE for p in positions]
    assert coming.rows.kv_rows.ge(0).sum() == FEW
    address = ringed.rows[0].data_ptr()
    assert coming.rings[0, own].tolist() == [address + p % KEPT * ROW_BYTES for p in positions]
    assert coming.rings[1, own].tolist() == [row_tag(11, p, 5) for p in positions]
    assert coming.rings[0].ne(0).sum() == FEW


def test_a_watch_ends_after_its_looks_or_when_the_host_says_so(
    ringed: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ringed.looks, looks = 20, Looks(monkeypatch)
    watched(ringed)
    assert looks.count == 20
    looks.count, looks.at, looks.then = 0, 5, lambda: ringed.stop.fill_(1)
    watched(ringed)
    assert looks.count == 5
    for slot, base in ((0, 5), (1, 9), (2, 30)):
        feature(ringed, slot, base)
    looks.count = 0
    watched(ringed)
    assert looks.count == 1


def test_a_certain_row_whose_feature_was_not_there_is_lost() -> None:
    """One that was refused does not matter."""
    rig = Rig()
    rig.post(0, 5, [1, 2])
    rig.post(1, 9, [3])
    missing, lost = torch.zeros(4 * FEW, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    missing[[2 * FEW + 1, 3 * FEW + 1]] = 1
    wait = MailWait(rig.place, ROW_BYTES, VOCAB, rig.looks, rig.stop)
    taken = TakenFeatures(missing, lost)
    mail_rounds.hear(RoundBatch(rig.tables, rig.slots, PAGE), wait, rig.heard, taken)
    assert lost.tolist() == [0, 0, 1, 0] and rig.heard.counts.tolist() == [0, 0, 2, 1]


class Looks:
    """Counts loads of the word `stop`; behind so many, `then` happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int = -1, then=lambda: None) -> None:
        from triton.runtime import interpreter

        self.count, self.at, self.then = 0, at, then
        load = interpreter.InterpreterBuilder.create_masked_load

        def counting(builder, ptrs, *rest):
            if rest[-1] and ptrs.data.size == 1:
                self.count += 1
                if self.count == self.at:
                    self.then()
            return load(builder, ptrs, *rest)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counting)


def test_a_wait_ends_after_its_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, looks = Rig(looks=20), Looks(monkeypatch)
    rig.hear()
    assert looks.count == 20 and rig.heard.counts.tolist() == [0] * 4


def test_a_wait_ends_when_the_host_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(looks=1 << 12)
    looks = Looks(monkeypatch, at=5, then=lambda: rig.stop.fill_(1))
    rig.hear()
    assert looks.count == 5


def test_all_rounds_end_a_wait_and_some_end_it_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(looks=1 << 12)
    rig.post(0, 5, [1])
    looks = Looks(monkeypatch, at=4, then=lambda: rig.post(1, 9, [2]))
    rig.hear()
    assert 4 + mail_rounds.SETTLED <= looks.count <= 6 + mail_rounds.SETTLED
    assert rig.heard.counts.tolist() == [0, 0, 1, 1]
    for slot, base in enumerate((6, 10, 30)):
        rig.post(slot, base, [1 + slot])
    looks.count = 0
    rig.hear()
    assert looks.count == 1 and rig.heard.counts.tolist() == [1, 0, 1, 1]


@given(st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=NODES), min_size=PLACES, max_size=PLACES))
@settings(max_examples=12, deadline=None)
def test_a_device_leaves_what_a_host_would(chains: list[list[int]]) -> None:
    """But below no root whose features were lost."""
    rig = Rig()
    for slot, chain in enumerate(chains):
        rig.tables.drafts[slot] = torch.tensor(chain + [-1] * (NODES - len(chain)))
    lost = torch.tensor([0, 0, 1, 0], dtype=torch.int32)
    mail_rounds.answer(rig.tables, rig.slots, lost, rig.place)
    for slot, chain in enumerate(chains):
        left = rig.box.proposal(slot, 1, 11 + slot, rig.lengths[slot])
        if slot == 0 or not chain:
            assert left is None
        else:
            assert left is not None and left.base_len == rig.lengths[slot]
            assert (list(left.tokens), list(left.parents)) == (chain, list(range(-1, len(chain) - 1)))
