"""The direct lines of an engine: of a decode engine to its draft workers, of a draft worker to its peers.

It knows which peer has a line, and says in the log which way drafts go and why. What has no line goes by the
fronts. Everything that comes by a line is given out as the message that a front would have brought.
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from eyas.common.errors import ConfigError
from eyas.engine.batch.sequence import RingPlace
from eyas.engine.ipc.draft_line import Line, OfferedLine, answer
from eyas.engine.ipc.mailbox import Mailbox
from eyas.engine.ipc.messages import (
    DraftClosed,
    DraftCommit,
    DraftDown,
    DraftLine,
    DraftUp,
    Proposal,
)
from eyas.engine.ipc.row_memory import Gpu, RowMemory

SHM, GRPC, CUDA_IPC, MAILBOX = "shm", "grpc", "cuda_ipc", "mailbox"
"""The paths of drafts: by a line in shared memory; by the fronts; by a line, and features from GPU to GPU; by
a mailbox, past the decode engine's host.
"""

_log = logging.getLogger("eyas.engine")


class OfferedLines:
    """A decode engine's, by draft worker. `shape`: what each is to be like, without an export; None: there
    are to be none.

    `new_path`: a new name for a socket in the folder that the host's workers share. `gpu`: of this engine, if
    it may write features into that of a draft worker.
    """

    def __init__(self, shape: DraftLine | None, new_path: Callable[[], Path], gpu: Gpu | None = None) -> None:
        self._shape = shape
        self._new_path = new_path
        self._gpu = gpu
        self._offers: dict[str, OfferedLine] = {}
        self._lines: dict[str, Line[DraftCommit, Proposal]] = {}

    @property
    def descriptors(self) -> list[int]:
        """Each can be read when `take` has something to do."""
        offers = [offer.descriptor for offer in self._offers.values()]
        return [*offers, *(line.descriptor for line in self._lines.values())]

    def has(self, worker: str) -> bool:
        """Is there a line to this worker?"""
        return worker in self._lines

    def take_place(self, worker: str, generation: int, *, mailed: bool) -> RingPlace | None:
        """Where a sequence's features may go from GPU to GPU; None: nowhere. `mailed`: with a mailbox, if
        there is one.
        """
        line = self._lines.get(worker)
        if line is None or line.rows is None or (number := line.rows.take_place()) < 0:
            return None
        box = line.mailbox if mailed else None
        address = line.rows.address(number)
        return RingPlace(number, address, generation, 0 if box is None else box.address(number))

    def give_back(self, worker: str, place: RingPlace) -> None:
        """The sequence that had it is followed no more."""
        line = self._lines.get(worker)
        if line is not None and line.rows is not None:
            line.rows.give_back(place.number)

    def offer(self, worker: str) -> DraftLine | None:
        """What to tell a draft worker that has just been connected; None: nothing, it has no line."""
        self.end(worker)
        if self._shape is None:
            self.refused(worker, "--transfer names another path")
            return None
        line = msgspec.structs.replace(self._shape, epoch=secrets.randbits(32))
        try:
            offer = self._offers[worker] = OfferedLine(self._new_path(), line, self._gpu)
        except ConfigError as error:
            self.refused(worker, error.message)
            return None
        return msgspec.structs.replace(line, export=offer.export)

    def refused(self, worker: str, reason: str) -> None:
        """The worker has no line, and will have none for as long as it is connected."""
        _log.info("drafts of %s: by gRPC (no line in shared memory: %s)", worker, reason)
        self.end(worker)

    def end(self, worker: str) -> None:
        """Lets go of the line to a worker, or of its offer."""
        for one in (self._offers.pop(worker, None), self._lines.pop(worker, None)):
            if one is not None:
                one.close()

    def close(self) -> None:
        """Lets go of all lines and offers."""
        for worker in [*self._offers, *self._lines]:
            self.end(worker)

    def post(self, worker: str, commit: DraftCommit) -> bool:
        """To a worker that `ring` then wakes. False: its line takes nothing more, or it has none."""
        line = self._lines.get(worker)
        return line is not None and line.post(commit)

    def ring(self, workers: Iterable[str]) -> None:
        """These have something to take."""
        for worker in workers:
            self._lines[worker].ring()

    def take(self) -> list[DraftDown]:
        """Everything that came since the last call. A broken line drops all sequences of its worker."""
        for worker, offer in list(self._offers.items()):
            self._accept(worker, offer)
        downs = []
        for worker, line in list(self._lines.items()):
            if proposals := line.take():
                downs.append(DraftDown(tuple(proposals), worker=worker))
            if line.gone:
                downs.append(DraftDown(closed=(DraftClosed(0, 0, "its line broke"),), worker=worker))
                self.end(worker)
        return downs

    def _accept(self, worker: str, offer: OfferedLine) -> None:
        try:
            line = offer.accept()
        except ConfigError as error:
            self.refused(worker, error.message)
            return
        if line is not None:
            del self._offers[worker]
            self._lines[worker] = line
            _log.info("drafts of %s: by a line in shared memory%s", worker, _beside(line))


class AnsweredLines:
    """A draft worker's, by peer. `width`: of its head's features. `gpu`: its own, if features may come there
    from other GPUs.
    """

    def __init__(self, width: int, pool_dir: str, gpu: Gpu | None = None) -> None:
        self._width = width
        self._pool_dir = pool_dir
        self._gpu = gpu
        self._lines: dict[int, Line[Proposal, DraftCommit]] = {}

    @property
    def descriptors(self) -> list[int]:
        """Each can be read when `take` has something to do."""
        return [line.descriptor for line in self._lines.values()]

    def answer(self, peer: int, line: DraftLine) -> str:
        """Takes a peer's offer. Why not, if that cannot be; else empty."""
        self.end(peer)
        rows = self._room(peer, line)
        try:
            made = self._lines[peer] = answer(line, self._width, self._pool_dir, rows)
        except ConfigError as error:
            _log.info("drafts for peer %d: by gRPC (no line in shared memory: %s)", peer, error.message)
            if rows is not None:
                rows.close()
            return error.message
        _log.info("drafts for peer %d: by a line in shared memory%s", peer, _beside(made))
        return ""

    def _room(self, peer: int, line: DraftLine) -> RowMemory | None:
        """For features from the peer's GPU, if it has one to write them."""
        if not line.gpu:
            return None
        try:
            return RowMemory.new(line, self._gpu)
        except ConfigError as error:
            _log.info("features of peer %d: by shared memory (%s)", peer, error.message)
            return None

    def rows(self, peer: int) -> RowMemory | None:
        """Where features of a peer's sequences are, if they come from GPU to GPU."""
        line = self._lines.get(peer)
        return None if line is None else line.rows

    def mailbox(self, peer: int) -> Mailbox | None:
        """Where the rounds and drafts of a peer's sequences are, if its device takes them there."""
        line = self._lines.get(peer)
        return None if line is None else line.mailbox

    def end(self, peer: int) -> None:
        """Lets go of the line to a peer, if it has one."""
        line = self._lines.pop(peer, None)
        if line is not None:
            line.close()

    def close(self) -> None:
        """Lets go of all lines."""
        for peer in list(self._lines):
            self.end(peer)

    def take(self) -> list[DraftUp]:
        """Everything that came since the last call. A line that broke is let go of; its peer knows."""
        ups = []
        for peer, line in list(self._lines.items()):
            if commits := line.take():
                ups.append(DraftUp(commits=tuple(commits), peer=peer))
            if line.gone:
                self.end(peer)
        return ups

    def post(self, proposals: dict[int, list[Proposal]]) -> dict[int, list[Proposal]]:
        """Sends proposals by peer; gives back those of peers without a line. A full line drops some."""
        left: dict[int, list[Proposal]] = defaultdict(list)
        for peer, some in proposals.items():
            if peer not in self._lines:
                left[peer] = some
                continue
            line = self._lines[peer]
            for proposal in some:
                line.post(proposal)
            line.ring()
        return left


def _beside(line: Line[Any, Any]) -> str:
    """For the log."""
    return "".join(
        text
        for text, there in (
            (", features from GPU to GPU", line.rows is not None),
            (", rounds and drafts by a mailbox", line.mailbox is not None),
        )
        if there
    )
