"""The direct channels of an engine: of a decode engine to its draft workers, of a draft worker to its peers.

Which peer has one, and in the log which way drafts go and why. What has none goes by the fronts: with an
adaptive depth, which is chosen when a step lands and goes with each commit, everything. Where a device writes
its rounds and takes its drafts, so does all that needs the host in every round: a grammar, which cuts drafts,
and what is looked up, which competes with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from eyas.common.config import SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.engine.batch.sequence import RingPlace, Sequence
from eyas.engine.ipc.draft_channel import MailChannel, OfferedChannel, answer
from eyas.engine.ipc.mailbox import DraftMailbox, MailLayout
from eyas.engine.ipc.messages import DraftChannel
from eyas.engine.ipc.row_ring import LocalGpu, RowMemory, ring_rows

SHM, GRPC, MAILBOX = "shm", "grpc", "mailbox"
"""The paths of drafts: by memory that both hosts share; by the fronts; by memory that the decode engine's GPU
and the draft worker share, past the decode engine's host.
"""

_log = logging.getLogger("eyas.engine")


def mail_place(spec: SpeculationConfig) -> MailLayout:
    """For the rows and proposals of one sequence."""
    return MailLayout(ring_rows(spec.deepest + 1), max(spec.steps, spec.draft_tokens))


def may_mail(spec: SpeculationConfig) -> bool:
    """May a device mail rounds of any sequence? Those of chains."""
    return not (spec.adaptive or spec.ngram or spec.topk > 1)


def mails(seq: Sequence, spec: SpeculationConfig) -> bool:
    """May it those of this one?"""
    request = seq.generation.request
    return may_mail(spec) and request.params.grammar is None and not request.predicted


class DecodeChannels:
    """A decode engine's, by draft worker. `shape`: what each is to be like, without an export; None: there
    are to be none.

    `new_path`: a new name for a socket in the folder that the host's workers share. `gpu`: of this engine, if
    it may write features into that of a draft worker.
    """

    def __init__(
        self, shape: DraftChannel | None, new_path: Callable[[], Path], gpu: LocalGpu | None = None
    ) -> None:
        self._shape = shape
        self._new_path = new_path
        self._gpu = gpu
        self._offers: dict[str, OfferedChannel] = {}
        self._channels: dict[str, MailChannel] = {}

    @property
    def descriptors(self) -> list[int]:
        """Each can be read when `listen` has something to do."""
        offers = [offer.descriptor for offer in self._offers.values()]
        return [*offers, *(channel.descriptor for channel in self._channels.values())]

    def mailbox(self, worker: str) -> DraftMailbox | None:
        """Where rounds and drafts of this worker's sequences go, if there is such a place."""
        channel = self._channels.get(worker)
        return None if channel is None else channel.mailbox

    def take_place(self, worker: str, generation: int, *, by_device: bool) -> RingPlace | None:
        """For a sequence; None: none is free. Without the address of a ring it is for this host's rounds.

        `by_device`: may a device do without the host in each of its rounds? Where it may not, only such a
        place will do.
        """
        channel = self._channels.get(worker)
        if channel is None or (channel.rows is not None and not by_device):
            return None
        if (number := channel.take_place()) < 0:
            return None
        if channel.rows is None:
            return RingPlace(number, 0, generation)
        return RingPlace(number, channel.rows.address(number), generation, channel.mailbox.address(number))

    def give_back(self, worker: str, place: RingPlace) -> None:
        """The sequence that had it is followed no more."""
        if (channel := self._channels.get(worker)) is not None:
            channel.give_back(place.number)

    def offer(self, worker: str) -> DraftChannel | None:
        """What to tell a draft worker that has just been connected; None: nothing, it gets no channel."""
        self.end(worker)
        if self._shape is None:
            self.refused(worker, "--transfer or --spec-adaptive asks for another way")
            return None
        try:
            offer = self._offers[worker] = OfferedChannel(self._new_path(), self._shape, self._gpu)
        except ConfigError as error:
            self.refused(worker, error.message)
            return None
        return msgspec.structs.replace(self._shape, export=offer.export)

    def refused(self, worker: str, reason: str) -> None:
        """The worker takes no offer for as long as it is connected. One that it has taken already stays."""
        _log.info("drafts of %s: by gRPC (no memory is shared: %s)", worker, reason)
        if (offer := self._offers.pop(worker, None)) is not None:
            offer.close()

    def end(self, worker: str) -> None:
        """Lets go of the channel to a worker, or of its offer."""
        for one in (self._offers.pop(worker, None), self._channels.pop(worker, None)):
            if one is not None:
                one.close()

    def close(self) -> None:
        """Lets go of all channels and offers."""
        for worker in [*self._offers, *self._channels]:
            self.end(worker)

    def lend(self, worker: str, data: NDArray[np.float32]) -> int:
        """The number by which this worker fetches these bytes past the fronts; 0: it cannot. Hosts that wake
        each other by the socket keep it for that.
        """
        channel = self._channels.get(worker)
        return 0 if channel is None or channel.rows is None else channel.lend(data)

    def wake(self, workers: Iterable[str]) -> None:
        """These have something to look for."""
        for worker in workers:
            self._channels[worker].wake()

    def listen(self) -> list[str]:
        """Takes answers; says whose channel has broken, which is let go of by `end`."""
        for worker, offer in list(self._offers.items()):
            self._accept(worker, offer)
        for channel in self._channels.values():
            channel.listen()
        return [worker for worker, channel in self._channels.items() if channel.gone]

    def _accept(self, worker: str, offer: OfferedChannel) -> None:
        try:
            channel = offer.accept()
        except ConfigError as error:
            self.refused(worker, error.message)
            return
        if channel is not None:
            del self._offers[worker]
            self._channels[worker] = channel
            _log.info("drafts of %s: %s", worker, _way(channel))


class DraftChannels:
    """A draft worker's, by peer. `width`: of its head's features. `gpu`: its own, if features may come there
    from other GPUs.
    """

    def __init__(self, width: int, pool_dir: str, gpu: LocalGpu | None = None) -> None:
        self._width = width
        self._pool_dir = pool_dir
        self._gpu = gpu
        self._channels: dict[int, MailChannel] = {}

    @property
    def descriptors(self) -> list[int]:
        """Each can be read when `listen` has something to do."""
        return [channel.descriptor for channel in self._channels.values()]

    def answer(self, peer: int, offer: DraftChannel) -> str:
        """Takes a peer's offer. Why not, if that cannot be; else empty."""
        self.end(peer)
        rows = self._room(peer, offer)
        try:
            made = self._channels[peer] = answer(offer, self._width, self._pool_dir, rows)
        except ConfigError as error:
            _log.info("drafts for peer %d: by gRPC (no memory is shared: %s)", peer, error.message)
            if rows is not None:
                rows.close()
            return error.message
        _log.info("drafts for peer %d: %s", peer, _way(made))
        return ""

    def _room(self, peer: int, offer: DraftChannel) -> RowMemory | None:
        """For features from the peer's GPU, if it has one to write them."""
        if not offer.gpu:
            return None
        try:
            return RowMemory.new(offer, self._gpu)
        except ConfigError as error:
            _log.info("features of peer %d: by its host (%s)", peer, error.message)
            return None

    def rows(self, peer: int) -> RowMemory | None:
        """Where features of a peer's sequences are, if they come from GPU to GPU."""
        channel = self._channels.get(peer)
        return None if channel is None else channel.rows

    def fetch(self, peer: int, number: int) -> bytes:
        """What a peer has lent by this number; empty: nothing."""
        channel = self._channels.get(peer)
        return (channel.fetch(number) if channel is not None else None) or b""

    def mailbox(self, peer: int) -> DraftMailbox | None:
        """Where rounds and drafts of a peer's sequences go, if there is such a place."""
        channel = self._channels.get(peer)
        return None if channel is None else channel.mailbox

    def end(self, peer: int) -> None:
        """Lets go of the channel to a peer, if it has one."""
        if (channel := self._channels.pop(peer, None)) is not None:
            channel.close()

    def close(self) -> None:
        """Lets go of all channels."""
        for peer in list(self._channels):
            self.end(peer)

    def listen(self) -> None:
        """A channel that broke is let go of; its peer knows."""
        for peer, channel in list(self._channels.items()):
            channel.listen()
            if channel.gone:
                self.end(peer)

    def wake(self, peers: Iterable[int]) -> None:
        """The hosts of these, if they look for drafts themselves, have some."""
        for peer in peers:
            channel = self._channels.get(peer)
            if channel is not None and channel.rows is None:
                channel.wake()


def _way(channel: MailChannel) -> str:
    """For the log."""
    return "by shared memory" if channel.rows is None else "by a mailbox, from GPU to GPU"
