"""The two ends of a channel between a decode and a draft engine."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from engine_rig import VOCAB

from eyas.common.config import SpeculationConfig
from eyas.engine.batch.sequence import Sequence
from eyas.engine.ipc.mailbox import HALF, NEWEST
from eyas.engine.ipc.messages import DraftChannel, DraftDown, DraftProposal
from eyas.engine.ipc.row_ring import tag
from eyas.engine.speculation.drafters.base import AcceptedRows
from eyas.engine.speculation.drafters.channels import DecodeChannels, DraftChannels
from eyas.engine.speculation.drafters.remote import RemoteDrafter
from tests.unit.draft_engine_drive import SPEC, WIDTH, opened_sequences

WORKER, PEER = "w", 4
PLACES, KEPT = 2, 16
SHAPE = DraftChannel({}, WIDTH, SPEC.draft_tokens, PLACES, KEPT)


class Pair:
    """A decode engine's drafter and a draft worker's channels; what goes by fronts the test passes on."""

    def __init__(self, folder: Path, *, shape: DraftChannel | None = SHAPE, width: int = WIDTH) -> None:
        names = (folder / f"eyas-{i}" for i in itertools.count())
        self.offered = DecodeChannels(shape, lambda: next(names))
        self.answered = DraftChannels(width, str(folder))
        self.drafter = RemoteDrafter(SPEC, VOCAB, self.offered)
        self.places: dict[int, int] = {}  # by sequence, as the opens say

    def connect(self) -> None:
        """The stream comes up, and whatever is to be said of a channel."""
        self.drafter.deliver(DraftDown(worker=WORKER))
        for up in self.drafter.outgoing():
            if up.channel is not None and (reason := self.answered.answer(PEER, up.channel)):
                self.drafter.deliver(DraftDown(no_channel=reason, worker=WORKER))
        self.hear()

    def hear(self) -> None:
        for down in self.drafter.arrived():
            self.drafter.deliver(down)

    def commit(self, seq: Sequence, base: int, want: SpeculationConfig | None = SPEC) -> None:
        rows = torch.full((1, WIDTH), float(base))
        self.drafter.post([AcceptedRows(seq, base, [9], rows, want)])

    def propose(self, seq: Sequence, base: int, *, by_front: bool = False) -> None:
        proposal = DraftProposal(seq.uid, self.generation(seq), base, (1, 2), (-1, 0))
        place, box = self.places.get(seq.uid, -1), self.answered.mailbox(PEER)
        if by_front or place < 0:
            self.drafter.deliver(DraftDown((proposal,), worker=WORKER))
        else:
            assert box is not None and box.propose(place, proposal)
            self.answered.wake([PEER])
        self.hear()

    def generation(self, seq: Sequence) -> int:
        return self.drafter._followed[seq.uid].generation

    def by_front(self) -> list[int]:
        """The bases of the commits that went by the front since the last call."""
        ups = self.drafter.outgoing()
        self.places |= {one.seq: one.place for up in ups for one in up.opens}
        return [commit.base_len for up in ups for commit in up.commits]

    def is_posted(self, seq: Sequence, base: int) -> bool:
        """Is a row of this position in the sequence's mailbox, with its feature?"""
        box, place = self.answered.mailbox(PEER), self.places[seq.uid]
        assert box is not None
        word = int(box.words[place, base % KEPT])
        generation = self.generation(seq)
        if word != (tag(generation, base) & HALF) << 32 | 9 | NEWEST:
            return False
        return box.features(place, generation, base, 1) == np.full(WIDTH, base, np.float32).tobytes()

    def direct(self) -> Sequence:
        """A sequence whose first commit was answered."""
        (seq,) = opened_sequences(self.drafter, 1)
        self.commit(seq, 4)
        assert self.by_front() == [4] and not self.is_posted(seq, 4)
        self.propose(seq, 5)
        return seq


def mapped() -> int:
    """How many channels this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:eyas-drafts")
