"""Rounds that a device has posted to a draft engine."""

from __future__ import annotations

import numpy as np
from fake_gpu import FakeDriver

from eyas.engine.ipc.mailbox import NEWEST, DraftMailbox, MailLayout
from eyas.engine.ipc.messages import DraftChannel, DraftClosed
from eyas.engine.ipc.row_ring import LocalGpu, RowMemory, tag
from tests.unit.draft_engine_drive import PEER, WIDTH, Drive, new_commit, new_sequence

PLACES, KEPT = 3, 8
OFFER = DraftChannel({}, WIDTH, 6, PLACES, KEPT, gpu=b"gpu-a", dtype="float32")


class MailDrive(Drive):
    """Its peer has mailboxes, into which its device writes, or its host (`width` above 0). `seen`: the
    extensions that were drafted for.
    """

    def __init__(self, width: int = 0) -> None:
        super().__init__(pages=64)
        self.memory = RowMemory.new(OFFER, LocalGpu(FakeDriver(), "float32", lambda: None, shared=True))
        place = MailLayout(KEPT, OFFER.nodes, width)
        self.box = DraftMailbox(memoryview(bytearray(place.nbytes(PLACES))), place, PLACES)
        self.engine._channels.rows = {PEER: self.memory}.get  # type: ignore[method-assign]
        self.boxes = {PEER: self.box}
        self.engine._posted._mailbox = self.boxes.get
        self.seen: list = []
        draft = self.runner.draft

        def seeing(asked, spec):
            self.seen += [one.extension for one in asked]
            return draft(asked, spec)

        self.runner.draft = seeing  # type: ignore[method-assign]

    def follow(self, seq: int = 1, place: int = 2, base: int = 3, **changes) -> None:
        """A sequence with one row, whose next ones are in a mailbox."""
        self.up(new_sequence(seq, base=base, place=place), new_commit(base, 10, seq=seq, **changes))

    def post(self, place: int, generation: int, first: int, *tokens: int, newest: bool = True) -> None:
        """A round's words; without the newest one's mark if it is not all there."""
        for i, token in enumerate(tokens):
            mark = NEWEST if newest and i == len(tokens) - 1 else 0
            above = (tag(generation, first + i) & 0xFFFFFFFF) << 32
            self.box.words[place, (first + i) % KEPT] = np.uint64(above | token | mark)

    def hear(self) -> list[DraftClosed]:
        """A loop: nothing is proposed by a record."""
        proposals, closed = self.up()
        assert not proposals
        return closed

    def left(self, place: int) -> tuple[int, list[int]]:
        """The tag and the tokens of the proposal at a place."""
        words, at = self.box.words[place].tolist(), self.box.place.header
        nodes = words[at] & 0xFFFFFFFF
        assert {word >> 32 for word in words[at : at + nodes + 1]} == {words[at] >> 32}
        return words[at] >> 32, [word & 0xFFFFFFFF for word in words[at + 1 : at + 1 + nodes]]
