"""Features from GPU to GPU between two processes: a decode engine's device writes, a draft worker's takes.

With one GPU both processes share it. What only hardware shows: that rows which the host tells of are there
and whole, that one which is being written is never taken for whole, and that a dead draft worker's memory can
be written to. `tests/unit/test_kernels_row_ring.py` has the rule itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Listener
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.ipc.draft_channel import MailChannel, answer
from eyas.engine.ipc.messages import DraftChannel
from eyas.engine.ipc.row_ring import RowMemory
from eyas.engine.kernels.exchange import row_ring
from tests.gpu.channel_pair import PLACES, THEIRS, gpu, pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH, PATH = 4096, 4
SHAPE = DraftChannel({}, WIDTH, 3, PLACES, 32, dtype="bfloat16")


def features(generation: int, positions: torch.Tensor) -> torch.Tensor:
    """[n, WIDTH]: whole numbers below 256, which bfloat16 holds exactly; no two rows of a test are alike."""
    column = torch.arange(WIDTH, device=positions.device)
    return (
        (positions[:, None] * 31 + generation * 7 + column * (positions[:, None] % 13 + 1)) % 251
    ).bfloat16()


class Told(NamedTuple):
    """Of a round: rows of one sequence."""

    place: int
    generation: int
    base: int
    count: int


def drafter(offer: DraftChannel, folder: str, path: str) -> None:
    """The draft worker's process: it answers all that it is told with the numbers of wrong rows and of lost
    ones, by a connection at `path`.
    """
    torch.cuda.set_device(THEIRS)
    rows = RowMemory.new(offer, gpu(THEIRS, SHAPE))
    there = answer(offer, WIDTH, folder, rows)
    with Client(path, "AF_UNIX") as teller:
        while True:
            found = [judged(told, rows, f"cuda:{THEIRS}") for told in teller.recv()]
            teller.send([sum(numbers) for numbers in zip(*found, strict=True)])
    there.close()


def judged(told: Told, rows: RowMemory, device: str) -> tuple[int, int]:
    positions = range(told.base, told.base + told.count)
    located = rows.located(told.place, told.generation, positions)
    taken = torch.full((told.count, WIDTH), -1.0, dtype=torch.bfloat16, device=device)
    lost = torch.zeros(told.count, dtype=torch.int32, device=device)
    owners = torch.arange(told.count, device=device)
    row_ring.take(torch.tensor(located, device=device).T.contiguous(), owners, taken, lost)
    right = (taken == features(told.generation, torch.tensor(positions, device=device))).all(1)
    return int((~right & (lost == 0)).sum()), int(lost.sum())


class Decode:
    """Sequences of a decode engine, each in the slot and place of its number, and their rounds."""

    def __init__(self, channel: MailChannel, listener: Listener) -> None:
        assert channel.rows is not None, "no ring was made"
        self._drafter = listener.accept()
        self.tables = SlotTables(TableSizes(PLACES + 1, 4), "cuda:0")
        self._slots = torch.arange(PLACES, dtype=torch.int32, device="cuda:0")
        addresses = [channel.rows.address(place) for place in range(PLACES)]
        self.tables.ring[:PLACES] = torch.tensor(addresses, device="cuda:0")
        self._windows = torch.zeros(PLACES + 1, 144, WIDTH, dtype=torch.bfloat16, device="cuda:0")
        self.generations = [1 + place for place in range(PLACES)]
        self._lengths = [0] * PLACES
        self._draws = random.Random(1)

    def round(self) -> list[Told]:
        """Launches it; gives what the draft worker is to hear of it."""
        counts = [self._draws.randint(1, PATH) for _ in range(PLACES)]
        rows, told = [], []
        for place, count in enumerate(counts):
            base, generation = self._lengths[place], self.generations[place]
            rows.append(features(generation, torch.arange(base, base + PATH, device="cuda:0")))
            told.append(Told(place, generation, base, count))
            self._lengths[place] += count
        self.tables.length[:PLACES] += torch.tensor(counts, dtype=torch.int32, device="cuda:0")
        self.tables.ring_generation[:PLACES] = torch.tensor(self.generations, device="cuda:0")
        facts = torch.tensor([[count, 0] for count in counts], dtype=torch.int32, device="cuda:0")
        written = row_ring.WrittenRows(self._slots, SHAPE.rows, self._windows, facts)
        row_ring.put(self.tables, written, torch.cat(rows))
        return told

    def heard(self, told: list[Told]) -> tuple[int, int]:
        """Of these rows, how many were wrong, and how many were lost."""
        self._drafter.send(told)
        wrong, lost = self._drafter.recv()
        return wrong, lost


@contextmanager
def both(folder: Path) -> Iterator[tuple[Decode, MailChannel, SpawnProcess]]:
    """Sequences, the decode engine's end, and the draft worker's process."""
    path = str(folder / "told")
    with Listener(path, "AF_UNIX") as listener, pair(folder, SHAPE, drafter, path) as (channel, process):
        yield Decode(channel, listener), channel, process


def test_rows_that_the_host_tells_of_are_there(tmp_path: Path) -> None:
    """Sixty rounds of 32 sequences: four laps of their rings, and other sequences in the same places."""
    with both(tmp_path) as (decode, _, _):
        for number in range(60):
            commits = decode.round()
            torch.cuda.synchronize(0)
            assert decode.heard(commits) == (0, 0)
            if number % 20 == 19:
                decode.generations = [generation + PLACES for generation in decode.generations]


def test_a_row_that_is_being_written_is_lost_or_whole(tmp_path: Path) -> None:
    """The draft worker hears of rounds before they are launched, and of some that laps have gone over."""
    with both(tmp_path) as (decode, _, _):
        wrong = lost = rows = 0
        for number in range(60):
            told = decode.round() if number % 3 else [one for _ in range(20) for one in decode.round()]
            commits = told[:PLACES]
            found = decode.heard(commits)
            wrong, lost = wrong + found[0], lost + found[1]
            rows += sum(one.count for one in commits)
        print(f"{rows} rows: {lost} lost, {wrong} wrong")
        assert wrong == 0 and 0 < lost < rows


def test_a_killed_draft_worker_leaves_a_decode_engine_that_writes_on(tmp_path: Path) -> None:
    with both(tmp_path) as (decode, channel, process):
        decode.round()
        torch.cuda.synchronize(0)
        process.kill()
        process.join()
        for _ in range(20):
            decode.round()
        torch.cuda.synchronize(0)  # no fault
        channel.listen()
        assert channel.gone
    assert torch.ones(3, device="cuda:0").sum() == 3
