"""Features from GPU to GPU between two processes: a decode engine's device writes, a draft worker's takes.

With one GPU both processes share it. What only hardware shows: that rows which the host tells of are there
and whole, that one which is being written is never taken for whole, and that a dead draft worker's memory can
be written to. `tests/unit/test_kernels_row_ring.py` has the rule itself.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from eyas.engine.batch.tables import Tables, TableSizes
from eyas.engine.ipc.draft_line import Line, answer
from eyas.engine.ipc.messages import DraftCommit, DraftLine, Proposal
from eyas.engine.ipc.row_memory import RowMemory
from eyas.engine.ipc.row_ring import tag
from eyas.engine.kernels import row_ring
from tests.gpu.line_pair import PLACES, THEIRS, gpu, pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH, PATH = 4096, 4
SHAPE = DraftLine({}, 7, 4 * PLACES, PATH, WIDTH, 3, dtype="bfloat16", places=PLACES, kept=32)


def features(generation: int, positions: torch.Tensor) -> torch.Tensor:
    """[n, WIDTH]: whole numbers below 256, which bfloat16 holds exactly; no two rows of a test are alike."""
    column = torch.arange(WIDTH, device=positions.device)
    return (
        (positions[:, None] * 31 + generation * 7 + column * (positions[:, None] % 13 + 1)) % 251
    ).bfloat16()


def drafter(line: DraftLine, folder: str) -> None:
    """The draft worker's process: it answers each commit with the numbers of wrong rows and of lost ones."""
    torch.cuda.set_device(THEIRS)
    device = f"cuda:{THEIRS}"
    rows = RowMemory.new(line, gpu(THEIRS, SHAPE))
    there = answer(line, WIDTH, folder, rows)
    while not there.gone:
        commits = there.take()
        for commit in commits:
            there.post(judged(commit, rows, device))
        if commits:
            there.ring()


def judged(commit: DraftCommit, rows: RowMemory, device: str) -> Proposal:
    positions = torch.arange(commit.base_len, commit.base_len + len(commit.tokens), device=device)
    told = [(rows.address(commit.place, p), tag(commit.generation, p)) for p in positions.tolist()]
    taken = torch.full((len(told), WIDTH), -1.0, dtype=torch.bfloat16, device=device)
    lost = torch.zeros(len(told), dtype=torch.int32, device=device)
    owners = torch.arange(len(told), device=device)
    row_ring.take(torch.tensor(told, device=device).T.contiguous(), owners, taken, lost)
    right = (taken == features(commit.generation, positions)).all(1)
    wrong = int((~right & (lost == 0)).sum())
    return Proposal(commit.seq, commit.generation, commit.base_len, (wrong, int(lost.sum())), (-1, 0))


class Decode:
    """Sequences of a decode engine, each in the slot and place of its number, and their rounds."""

    def __init__(self, line: Line[DraftCommit, Proposal]) -> None:
        assert line.rows is not None, "no ring was made"
        self._line = line
        self.tables = Tables(TableSizes(PLACES + 1, 4), "cuda:0")
        self._slots = torch.arange(PLACES, dtype=torch.int32, device="cuda:0")
        addresses = [line.rows.address(place) for place in range(PLACES)]
        self.tables.ring[:PLACES] = torch.tensor(addresses, device="cuda:0")
        self._windows = torch.zeros(PLACES + 1, 144, WIDTH, dtype=torch.bfloat16, device="cuda:0")
        self.generations = [1 + place for place in range(PLACES)]
        self._lengths = [0] * PLACES
        self._draws = random.Random(1)

    def round(self) -> list[DraftCommit]:
        """Launches it; gives what the draft worker is to hear of it."""
        counts = [self._draws.randint(1, PATH) for _ in range(PLACES)]
        rows, told = [], []
        for place, count in enumerate(counts):
            base, generation = self._lengths[place], self.generations[place]
            rows.append(features(generation, torch.arange(base, base + PATH, device="cuda:0")))
            told.append(DraftCommit(place, generation, base, (0,) * count, b"", 3, 1, 4, place))
            self._lengths[place] += count
        self.tables.length[:PLACES] += torch.tensor(counts, dtype=torch.int32, device="cuda:0")
        self.tables.ring_generation[:PLACES] = torch.tensor(self.generations, device="cuda:0")
        facts = torch.tensor([[count, 0] for count in counts], dtype=torch.int32, device="cuda:0")
        written = row_ring.Written(self._slots, SHAPE.kept, self._windows, facts)
        row_ring.put(self.tables, written, torch.cat(rows))
        return told

    def tell(self, commits: list[DraftCommit]) -> None:
        for commit in commits:
            assert self._line.post(commit)
        self._line.ring()

    def hear(self, count: int) -> tuple[int, int]:
        """Of that many commits, the rows that were wrong, and those that were lost."""
        heard: list[Proposal] = []
        deadline = time.monotonic() + 120
        while len(heard) < count:
            heard += self._line.take()
            assert time.monotonic() < deadline and not self._line.gone
        return sum(one.tokens[0] for one in heard), sum(one.tokens[1] for one in heard)


def test_rows_that_the_host_tells_of_are_there(tmp_path: Path) -> None:
    """Sixty rounds of 32 sequences: four laps of their rings, and other sequences in the same places."""
    with pair(tmp_path, SHAPE, drafter) as (line, _):
        decode = Decode(line)
        for number in range(60):
            commits = decode.round()
            torch.cuda.synchronize(0)
            decode.tell(commits)
            assert decode.hear(len(commits)) == (0, 0)
            if number % 20 == 19:
                decode.generations = [generation + PLACES for generation in decode.generations]


def test_a_row_that_is_being_written_is_lost_or_whole(tmp_path: Path) -> None:
    """The draft worker hears of rounds before they are launched, and of some that laps have gone over."""
    with pair(tmp_path, SHAPE, drafter) as (line, _):
        decode = Decode(line)
        wrong = lost = rows = 0
        for number in range(60):
            told = decode.round() if number % 3 else [one for _ in range(20) for one in decode.round()]
            commits = told[:PLACES]
            decode.tell(commits)
            found = decode.hear(len(commits))
            wrong, lost = wrong + found[0], lost + found[1]
            rows += sum(len(commit.tokens) for commit in commits)
        print(f"{rows} rows: {lost} lost, {wrong} wrong")
        assert wrong == 0 and 0 < lost < rows


def test_a_killed_draft_worker_leaves_a_decode_engine_that_writes_on(tmp_path: Path) -> None:
    with pair(tmp_path, SHAPE, drafter) as (line, process):
        decode = Decode(line)
        decode.round()
        torch.cuda.synchronize(0)
        process.kill()
        process.join()
        for _ in range(20):
            decode.round()
        torch.cuda.synchronize(0)  # no fault
        assert line.take() == [] and line.gone
    assert torch.ones(3, device="cuda:0").sum() == 3
