"""A decode engine's sequences and their places in the rings of draft workers: who has one, and since when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeDriver
from test_draft_engine import SPEC, VOCAB, WIDTH, _sequences
from test_draft_lines import PEER, RECORDS, WORKER, Pair

from eyas.engine.batch.sequence import Sequence
from eyas.engine.ipc.messages import DraftClosed, DraftCommit, DraftDown, DraftLine
from eyas.engine.ipc.row_memory import Gpu
from eyas.engine.speculation.drafter import Commit
from eyas.engine.speculation.lines import CUDA_IPC, GRPC, SHM, AnsweredLines, OfferedLines
from eyas.engine.speculation.remote import RemoteDrafter

PLACES = 2


class RingPair(Pair):
    """Both have a GPU. `commit` as after a round whose features the device has put where `ringed` says."""

    def __init__(self, folder: Path, *, mails: bool = False) -> None:
        ours, theirs = (Gpu(FakeDriver(name), "float32", lambda: None) for name in (b"gpu-a", b"gpu-b"))
        line = DraftLine({}, 0, RECORDS, SPEC.deepest + 1, WIDTH, SPEC.draft_tokens)
        names = (folder / f"eyas-{i}" for i in itertools.count())
        shape = DraftLine(
            *(line.export, 0, line.records, line.rows, line.width, line.nodes),
            gpu=b"gpu-a",
            dtype="float32",
            places=PLACES,
            kept=16,
        )
        self.offered = OfferedLines(shape, lambda: next(names), ours)
        self.answered = AnsweredLines(WIDTH, str(folder), theirs)
        spec = SPEC if mails else replace(SPEC, ngram=True)  # which wants the host to choose
        self.drafter = RemoteDrafter(spec, VOCAB, self.offered)
        self.gpus = (ours.driver, theirs.driver)

    def landed(self, seq: Sequence, base: int, ringed: int) -> list[DraftCommit]:
        """What comes by the line of a round that was launched when `ringed` was the sequence's generation."""
        self.drafter.post([Commit(seq, base, [9], torch.full((1, WIDTH), float(base)), SPEC, ringed)])
        return [commit for up in self.answered.take() for commit in up.commits]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RingPair]:
    both = RingPair(tmp_path)
    both.connect()
    yield both
    both.offered.end(WORKER)
    both.answered.close()
    assert [gpu.mappings for gpu in both.gpus] == [0, 0]


def test_features_that_the_device_has_put_do_not_come_by_the_line(pair: RingPair) -> None:
    seq = pair.direct()
    ring = seq.ring
    assert ring is not None
    (commit,) = pair.landed(seq, 5, ring.generation)
    assert (commit.place, commit.features, commit.generation) == (ring.number, b"", ring.generation)
    rows = pair.answered.rows(PEER)
    assert rows is not None and rows.ring == pair.offered._lines[WORKER].rows.ring
    assert pair.drafter.sent == {GRPC: 1, CUDA_IPC: 1}


@pytest.mark.parametrize("ringed", [0, -1])
def test_those_of_a_step_that_was_launched_before_the_sequence_opened_do(pair: RingPair, ringed: int) -> None:
    """It wrote nothing, or under another generation."""
    seq = pair.direct()
    (commit,) = pair.landed(seq, 5, ringed)
    assert commit.place == -1 and len(commit.features) == 4 * WIDTH
    assert pair.drafter.sent == {GRPC: 1, SHM: 1}


def test_the_first_commit_has_its_features_whatever_was_put(pair: RingPair) -> None:
    (seq,) = _sequences(pair.drafter, 1)
    assert seq.ring is not None
    pair.landed(seq, 4, seq.ring.generation)
    (up,) = pair.drafter.outgoing()
    assert up.commits[0].place == -1 and len(up.commits[0].features) == 4 * WIDTH


def test_a_place_is_free_again_when_its_sequence_is_followed_no_more(pair: RingPair) -> None:
    first, second, third = _sequences(pair.drafter, 3)
    assert first.ring is not None and second.ring is not None and third.ring is None
    assert first.ring.number != second.ring.number
    number = first.ring.number
    pair.drafter.close(first)
    assert first.ring is None
    assert pair.drafter.open(third, 4, None) and third.ring is not None and third.ring.number == number
    assert third.ring.generation > second.ring.generation
    closed = DraftClosed(second.uid, second.ring.generation, "")
    pair.drafter.deliver(DraftDown(closed=(closed,), worker=WORKER))
    assert second.ring is None


def test_a_dead_draft_worker_leaves_no_sequence_with_an_address(pair: RingPair) -> None:
    first, second = _sequences(pair.drafter, 2)
    pair.answered.close()
    pair.hear()
    assert first.ring is None and second.ring is None
    assert pair.gpus[0].mappings == 0 and not first.drafting
