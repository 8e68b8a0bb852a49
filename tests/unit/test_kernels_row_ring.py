"""Feature rows from device to device against a plain rule: what is taken is what was put for that very
sequence and position, or it is said to be lost.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.ipc import row_ring as layout
from eyas.engine.ipc.row_ring import RowRing, ring_rows, row_tag, tag
from eyas.engine.kernels.exchange import row_ring

pytestmark = pytest.mark.usefixtures("one_thread")

PATH, WIDTH, WINDOW = 3, 6, 7
Key = tuple[int, int]  # generation, position


@dataclass
class Rig:
    """A ring in plain memory, tables with a slot per place, and what the rule says that the ring holds."""

    dtype: torch.dtype = torch.float32
    places: int = 3
    kept: int = 4
    holds: dict[Key, tuple[int, torch.Tensor]] = field(default_factory=dict)  # its place, its row

    def __post_init__(self) -> None:
        words = WIDTH * self.dtype.itemsize // 4
        self.ring = RowRing(self.places, self.kept, words)
        self.memory = torch.zeros(self.ring.nbytes // 8, dtype=torch.int64)
        self.tables = SlotTables(TableSizes(self.places + 1, 4), "cpu")
        self.windows = torch.full((self.places + 1, WINDOW, WIDTH), -1.0, dtype=self.dtype)
        self.stays = self.windows.clone()  # what the rule says that they hold
        self._rows = 0
        self.bases: dict[Key, int] = {}

    def address(self, place: int, position: int = 0) -> int:
        return self.memory.data_ptr() + self.ring.at(place, position)

    def put(self, sequences: list[tuple[int, int, int]], *, early: bool = False, ringed: bool = True) -> None:
        """(place, generation, certain rows) of each; a place of -1: it is padding. Not `ringed`: they stay
        here alone. `early`: all rows are written before it is known how many are certain.
        """
        path = PATH
        features = torch.arange(self._rows, self._rows + len(sequences) * path * WIDTH, dtype=torch.float32)
        self._rows += features.numel()
        features = features.view(-1, WIDTH).to(self.dtype)
        self.tables.ring.zero_()
        counts = []
        for i, (place, generation, count) in enumerate(sequences):
            start = int(self.tables.length[place])
            self.tables.length[place] += 0 if early else count
            for j in range((path if early else count) if place >= 0 else 0):
                self.stays[place, (start + j) % WINDOW] = features[i * path + j]
                if ringed:
                    self._hold(place, generation, start + j, features[i * path + j])
                    self.bases[generation, start + j] = start
            if place >= 0 and ringed:
                self.tables.ring[place] = self.address(place)
                self.tables.ring_generation[place] = generation
            counts.append([count, 7])
        written = row_ring.WrittenRows(
            torch.tensor([place for place, _, _ in sequences], dtype=torch.int32) % (self.places + 1),
            self.kept,
            self.windows,
            None if early else torch.tensor(counts, dtype=torch.int32),
        )
        row_ring.put(self.tables, written, features)
        for place, _, count in sequences:
            self.tables.length[place] += count if early else 0
        assert torch.equal(self.windows, self.stays)

    def _hold(self, place: int, generation: int, position: int, row: torch.Tensor) -> None:
        """It takes the place of what was there."""
        stale = [
            key
            for key, (whose, _) in self.holds.items()
            if whose == place and key[1] % self.kept == position % self.kept
        ]
        for key in stale:
            del self.holds[key]
        self.holds[generation, position] = place, row

    def tag(self, key: Key) -> int:
        """Of the last row with this key, if there was one."""
        return row_tag(*key, self.bases.get(key, key[1]))

    def take(self, wanted: list[tuple[int, Key]]) -> tuple[torch.Tensor, list[int]]:
        """(place, what is expected there) of each: its row; and which are lost, each an owner of its own."""
        rows = [(self.address(place, key[1]), self.tag(key)) for place, key in wanted]
        features = torch.full((len(wanted), WIDTH), 5.0, dtype=self.dtype)
        lost = torch.zeros(len(wanted), dtype=torch.int32)
        row_ring.take(torch.tensor(rows).T.contiguous(), torch.arange(len(wanted)), features, lost)
        return features, lost.tolist()

    def check(self, wanted: list[tuple[int, Key]]) -> None:
        """Raises AssertionError where the device and the rule differ."""
        features, lost = self.take(wanted)
        for row, missing, (place, key) in zip(features, lost, wanted, strict=True):
            whose, held = self.holds.get(key, (-1, None))
            assert bool(missing) == (whose != place)
            assert torch.equal(row, torch.zeros_like(row) if held is None or missing else held)


STEPS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, PATH)), min_size=1, max_size=3, unique_by=lambda x: x[0]
    ),
    min_size=1,
    max_size=4,
)


@given(STEPS, st.sampled_from([torch.float32, torch.bfloat16]), st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_what_is_taken_was_put_or_is_lost(steps: list, dtype: torch.dtype, draws: object) -> None:
    """Laps of four rows, sequences that give way to others in their place, any positions asked for."""
    with mock.patch.object(row_ring, "LOOKS", 2):  # nothing comes later here
        _taken_or_lost(steps, dtype, draws)


def _taken_or_lost(steps: list, dtype: torch.dtype, draws: object) -> None:
    rig, generations = Rig(dtype), [1, 2, 3]
    for step in steps:
        for place, _ in step:
            if draws.random() < 0.2:  # another sequence, further back than this one was
                generations[place] = max(generations) + 1
                rig.tables.length[place] = draws.randrange(6)
        rig.put([(place, generations[place], count) for place, count in step])
        asked = []
        for place, generation in enumerate(generations):
            newest = int(rig.tables.length[place])
            asked += [(place, (generation, p)) for p in range(max(newest - 5, 0), newest + 1)]
            asked.append((place, (generation - 1, max(newest - 1, 0))))
        rig.check(asked)


class Trusting(Rig):
    """Whatever stands where a row should be is believed to be that row."""

    def take(self, wanted: list[tuple[int, Key]]) -> tuple[torch.Tensor, list[int]]:
        there = [int(self.memory[self.ring.at(place, key[1]) // 8]) >> 32 for place, key in wanted]
        rows = [
            (self.address(place, key[1]), found) for (place, key), found in zip(wanted, there, strict=True)
        ]
        features = torch.zeros(len(wanted), WIDTH)
        lost = torch.zeros(len(wanted), dtype=torch.int32)
        row_ring.take(torch.tensor(rows).T.contiguous(), torch.arange(len(wanted)), features, lost)
        return features, lost.tolist()


@pytest.mark.parametrize("key", [(1, 1), (2, 4), (1, 9)], ids=["a lap ago", "another's", "not yet"])
def test_the_rule_notices_a_reader_that_believes_what_it_finds(key: Key) -> None:
    honest, trusting = Rig(), Trusting()
    for rig in (honest, trusting):
        for _ in range(3):
            rig.put([(0, 1, 3)])
    honest.check([(0, key), (0, (1, 8))])
    trusting.check([(0, (1, 8))])
    with pytest.raises(AssertionError):
        trusting.check([(0, key)])


def test_padding_and_sequences_without_a_ring_write_nothing_there() -> None:
    rig = Rig()
    rig.put([(2, 9, 3), (0, 9, 1)], ringed=False)
    rig.put([(-1, 4, 2), (1, 5, 2), (-1, 6, 3)])
    assert {key for key in rig.holds} == {(5, 0), (5, 1)}
    written = rig.memory.view(rig.places, -1).abs().sum(1).ne(0).tolist()
    assert written == [False, True, False]


def test_rows_that_left_before_their_verdict_are_those_of_their_round() -> None:
    """What was refused stands at positions that the next round writes again, for who looks for either."""
    rig = Rig()
    rig.put([(0, 1, 1), (2, 3, 2)], early=True)
    refused = [(0, (1, 1)), (0, (1, 2)), (2, (3, 2))]
    rig.check([(0, (1, 0)), (2, (3, 0)), (2, (3, 1)), *refused])
    stale = torch.tensor([[rig.address(0, 1)], [row_tag(1, 1, 0)]])
    features, lost = torch.zeros(1, WIDTH), torch.zeros(1, dtype=torch.int32)
    row_ring.take(stale, torch.zeros(1, dtype=torch.int64), features, lost)
    assert lost.tolist() == [0]
    rig.put([(0, 1, 3)], early=True)
    rig.check([(0, (1, 1)), (0, (1, 2)), (0, (1, 3))])
    row_ring.take(stale, torch.zeros(1, dtype=torch.int64), features, lost)
    assert lost.tolist() == [1], "a row of the round before has another tag"


@pytest.mark.parametrize("word", range(WIDTH))
def test_a_row_of_which_any_word_is_missing_is_lost(word: int) -> None:
    """The writer was stopped in the middle, or another lap has begun: old words stand among new ones."""
    rig = Rig()
    rig.put([(0, 1, 3)])
    rig.put([(0, 1, 2)])
    at = rig.ring.at(0, 4) // 8 + word
    rig.memory[at] = (row_tag(1, 0, 0) << 32) | 3
    features, lost = rig.take([(0, (1, 4)), (0, (1, 3))])
    assert lost == [1, 0]
    assert torch.equal(features[0] == 0.0, torch.arange(WIDTH) == word), (
        "the other words are as they were put"
    )


def test_a_row_that_is_on_its_way_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mailbox tells of rows before they have arrived."""
    monkeypatch.setattr(row_ring, "LOOKS", 1 << 20)
    rig, late = Rig(), Rig()
    rig.put([(0, 1, 3)])
    late.memory[:] = rig.memory
    rig.memory.zero_()
    arrives = threading.Timer(0.05, lambda: rig.memory.copy_(late.memory))
    arrives.start()
    rig.check([(0, (1, 2))])
    arrives.join()


def test_rows_that_are_in_no_ring_stay_as_they_are() -> None:
    rows = torch.zeros(2, 2, dtype=torch.int64)
    features, lost = torch.ones(2, WIDTH), torch.zeros(1, dtype=torch.int32)
    row_ring.take(rows, torch.zeros(2, dtype=torch.int64), features, lost)
    assert torch.equal(features, torch.ones(2, WIDTH)) and lost.tolist() == [0]


def test_a_sequence_that_lost_one_of_its_rows_has_lost() -> None:
    rig = Rig()
    rig.put([(0, 1, 2), (1, 2, 2)])
    keys = [(0, (1, 0)), (0, (1, 5)), (1, (2, 0)), (1, (2, 1))]
    rows = torch.tensor([(rig.address(place, key[1]), rig.tag(key)) for place, key in keys]).T.contiguous()
    lost = torch.zeros(2, dtype=torch.int32)
    row_ring.take(rows, torch.tensor([0, 0, 1, 1]), torch.zeros(4, WIDTH), lost)
    assert lost.tolist() == [1, 0]


# --- the layout -----------------------------------------------------------------------------------


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**20), st.integers(1, 1000), st.integers(1, 2**12))
def test_what_can_lie_in_a_rows_stead_has_another_tag(
    generation: int, position: int, later: int, laps: int
) -> None:
    """The same sequence laps later, and the next thousand sequences, wherever they are."""
    assert -(2**31) <= tag(generation, position) < 2**31
    assert tag(generation, position) != tag(generation, position + laps * 32)
    assert tag(generation, position) != tag(generation + later, position)
    assert tag(generation, position) != tag(generation + later, position + laps)
    ours = row_tag(generation, position, position)
    assert ours != row_tag(generation, position, position + later)
    assert ours != row_tag(generation, position + laps * 32, position + later)
    assert ours != row_tag(generation + later, position + laps, position + laps)


def test_no_two_rows_share_a_byte() -> None:
    ring = RowRing(places=3, rows=4, words=5)
    starts = [ring.at(place, position) for place in range(3) for position in range(4)]
    assert starts == list(range(0, ring.nbytes, ring.row_bytes))
    assert ring.at(1, 2) == ring.at(1, 6)


@pytest.mark.parametrize("rows", [1, 4, 8, 33])
def test_a_ring_keeps_two_rounds_and_what_may_wait(rows: int) -> None:
    assert ring_rows(rows) >= layout.WAITING_ROWS + 2 * rows and ring_rows(rows) & (ring_rows(rows) - 1) == 0
