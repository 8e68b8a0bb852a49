"""Commits by a line and by the front, in any interleaving: the draft worker hears each sequence in order."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_draft_engine import PEER, WIDTH, Drive

from eyas.common.params import SamplingParams
from eyas.engine.ipc.messages import DraftClose, DraftCommit, DraftOpen, DraftUp, Proposal
from eyas.engine.speculation.early import MOST_EARLY

Message = DraftOpen | DraftCommit | DraftClose


def commit(seq: int, generation: int, base: int) -> DraftCommit:
    return DraftCommit(seq, generation, base, (base % 50,), np.zeros(WIDTH, np.float32).tobytes(), 2, 1, 3)


def opened(seq: int, generation: int) -> DraftOpen:
    return DraftOpen(seq, generation, 3, SamplingParams(), 0)


class Worker:
    """A draft engine that hears by both ways, message by message."""

    def __init__(self) -> None:
        self.drive = Drive(pages=64)
        self.engine = self.drive.engine
        self.proposals: list[Proposal] = []
        self.closed: list[tuple[int, int]] = []

    def by_front(self, message: Message) -> None:
        kinds = (DraftOpen, DraftCommit, DraftClose)
        self.engine._sequences.up(
            DraftUp(*((message,) if isinstance(message, k) else () for k in kinds), peer=PEER)
        )
        self._turn()

    def by_line(self, message: DraftCommit) -> None:
        self.engine._early.add(DraftUp(commits=(message,), peer=PEER))
        self._turn()

    def _turn(self) -> None:
        self.drive.events = []
        self.engine._early.pass_on()
        self.engine._step()
        self.engine._send_replies()
        for down in self.drive.events:
            self.proposals += down.proposals
            self.closed += [(one.seq, one.generation) for one in down.closed]

    @property
    def waiting(self) -> int:
        return sum(map(len, self.engine._early._waiting.values()))


def story(seq: int, generation: int, line: list[bool]) -> tuple[list[Message], list[DraftCommit]]:
    """What goes by the front and by the line: the first commit with its open, the others as `line` says."""
    commits = [commit(seq, generation, 3 + i) for i in range(len(line) + 1)]
    front: list[Message] = [opened(seq, generation), commits[0]]
    front += [one for one, direct in zip(commits[1:], line, strict=True) if not direct]
    return front, [one for one, direct in zip(commits[1:], line, strict=True) if direct]


@given(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=3), st.integers(0, 2**32))
@settings(max_examples=40)
def test_no_interleaving_loses_a_row(lines: list[list[bool]], seed: int) -> None:
    """Once by the line, always by the line, and opens in order: that is all that the decode side promises."""
    worker, draws = Worker(), random.Random(seed)
    front: list[Message] = []
    line: list[DraftCommit] = []
    for seq, ways in enumerate(lines, start=1):
        ways = sorted(ways)  # False before True
        for queue, part in zip((front, line), story(seq, seq, ways), strict=True):
            queue += part  # type: ignore[arg-type]
    while front or line:
        if front and (not line or draws.random() < 0.5):
            worker.by_front(front.pop(0))
        else:
            worker.by_line(line.pop(0))
    assert worker.closed == [] and worker.waiting == 0
    newest = {p.seq: p.base_len for p in worker.proposals}
    assert newest == {seq: 4 + len(ways) for seq, ways in enumerate(lines, start=1)}


def test_without_waiting_rows_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.engine.speculation.early.MOST_EARLY", -1)
    worker = Worker()
    worker.by_line(commit(1, 1, 4))
    worker.by_front(opened(1, 1))
    worker.by_front(commit(1, 1, 3))
    assert worker.closed and [p.base_len for p in worker.proposals] == [4]


def test_what_follows_an_end_is_dropped_in_silence() -> None:
    worker = Worker()
    for message in (opened(1, 1), commit(1, 1, 3), DraftClose(1, 1)):
        worker.by_front(message)
    worker.by_line(commit(1, 1, 4))
    worker.by_front(opened(1, 2))
    worker.by_line(commit(1, 1, 5))
    assert worker.closed == [] and worker.waiting == 0
    worker.by_front(commit(1, 2, 3))
    worker.by_line(commit(1, 2, 4))
    assert [p.generation for p in worker.proposals] == [1, 2, 2]


def test_a_commit_whose_open_never_comes_waits_for_the_next_open_at_most() -> None:
    worker = Worker()
    worker.by_line(commit(1, 1, 4))
    assert worker.waiting == 1
    worker.by_front(opened(2, 2))
    assert worker.waiting == 0 and worker.closed == []


def test_of_one_sequence_not_everything_waits() -> None:
    worker = Worker()
    for i in range(MOST_EARLY + 1):
        worker.by_line(commit(1, 1, 4 + i))
    assert worker.closed == [(1, 1)] and worker.waiting == MOST_EARLY


def test_a_repetition_ends_the_sequence() -> None:
    worker = Worker()
    for message in (opened(1, 1), commit(1, 1, 3)):
        worker.by_front(message)
    worker.by_line(commit(1, 1, 3))
    assert worker.closed == [(1, 1)]


def test_nothing_waits_for_a_peer_that_is_gone() -> None:
    worker = Worker()
    worker.by_line(commit(1, 1, 4))
    worker.engine._peer_gone(type("Gone", (), {"peer": PEER}))
    assert worker.waiting == 0 and worker.engine._sequences.opened == {}
