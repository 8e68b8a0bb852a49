"""`nixl`: pages by one-sided READs of the NIXL library (UCX), for peers on other hosts.

The owner's side is its agent alone, which the library's own thread serves. The puller's side adds a peer's
agent when the first copy from it begins. All calls of the library are made by one thread of this backend;
the engine's loop hands it commands. What becomes of a copy is in `nixl_reads`; that a device's pages must be
staged by their owner first, in `staged_reads`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from eyas.common.errors import ConfigError, EyasError
from eyas.common.wire.pool import Export
from kv_transfer import nics
from kv_transfer.backends.base import BackendSite, CopyJob, PeerSource
from kv_transfer.backends.nixl_agent import NixlAgent, NixlMemory, NixlPeer, OwnPages, RemotePages, load
from kv_transfer.backends.nixl_reads import DEVICE, HOST, NixlReads
from kv_transfer.backends.staged_reads import ReadingBackend, is_staging
from kv_transfer.copy_threads import CopyDone
from kv_transfer.gpu.driver import DriverError

SLOW = 1.5e9  # bytes per second; below it the library takes a GPU's memory through a host's, without a word
AGENT_S = 30.0  # an agent that is not made by then is none
_MEMORY = struct.Struct("<QQQq")  # address, pages, bytes of a page, device; -1: the host's memory
_MOST_PAGES = 2**31 - 1  # the library numbers them so
_CARD = "card"  # of an export: an RDMA card of its host is up
_EAGER_S, _PATIENT_S = 5e-5, 2e-3  # between looks at what runs: at first, and after a while
_IDLE_S = 0.05  # between looks at what was given up

_log = logging.getLogger("eyas.pulls")

Command = Callable[[NixlReads], None]


class NixlBackend(ReadingBackend):
    """Reads the pages of other agents. `bindings` gives the library's, or raises ConfigError."""

    name = "nixl"
    on_device: ClassVar[bool] = False
    """Whether what it reads is in the memory of GPUs."""
    reads_pools: ClassVar[bool] = False
    """Whether that is their pools, and lands in ours."""

    def __init__(self, site: BackendSite, bindings: Callable[[], Any] = load) -> None:
        super().__init__(site)  # (a device's pool by its staging; `rdma` reads the pool itself)
        self._cards = tuple(card.name for card in site.cards or ())
        self._bindings = bindings
        self._ring = site.ring
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[CopyDone[CopyJob]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def drawback(self, export: Export) -> str:
        """What speaks against it: by TCP it carried 1.2 GB/s of a GPU's pages where `tcp` carried 5.4
        (docs/experiments.md).
        """
        if self.on_device or (self._has_card and export.get(_CARD)):
            return ""
        whose = "the peer's" if self._has_card else "this"
        return f"no RDMA card of {whose} host is up, and by TCP the library is slow: --transfer nixl takes it"

    @property
    def _has_card(self) -> bool:
        return bool(self._cards) or nics.any_up()

    def _offered(self, fields: Export) -> Export:
        return super()._offered({**fields, _CARD: b"1"} if self._has_card else fields)

    def export(self, rank: int = 0) -> Export | None:
        """Makes the agent, and waits for that up to AGENT_S."""
        made: Future[Export] = Future()

        def offer(reads: NixlReads) -> None:
            try:
                agent = reads.export()
                memory = _packed(agent.own[rank if self.on_device else 0].memory)
                export = {"agent": agent.name.encode(), "metadata": agent.metadata(), "memory": memory}
                made.set_result(export)
            except EyasError as error:
                made.set_exception(error)

        self._tell(offer)
        try:
            return self._offered(made.result(AGENT_S))
        except (EyasError, TimeoutError) as error:
            reason = f"no agent within {AGENT_S:g} s" if isinstance(error, TimeoutError) else error
            _log.warning("KV pages cannot be read by %s: %s", self.name, reason)
            return None

    def open(self, export: Export) -> PeerSource:
        try:
            agent, metadata = export["agent"].decode(), export["metadata"]
            address, pages, page_bytes, device = _MEMORY.unpack(export["memory"])
        except (KeyError, ValueError, struct.error) as error:
            raise ConfigError(f"what the peer exports is not a NIXL agent's: {error!r}") from error
        if not 0 < pages <= _MOST_PAGES:
            raise ConfigError(f"what the peer exports has {pages} pages")
        if not 0 < page_bytes or (page_bytes != self.area.pages.shape[1] and not is_staging(export)):
            raise ConfigError(f"what the peer exports has pages of {page_bytes} bytes")
        memory = NixlMemory(address, page_bytes, pages, None if device < 0 else device)
        if (memory.device is not None) != self.on_device:
            raise ConfigError("what the peer exports is in memory of another kind")
        remote = RemotePages(agent, metadata, memory, self._floor(export))
        in_slots = self.on_device and not self.reads_pools
        return NixlPeer(remote, is_staging(export), in_slots, direct=self.reads_pools)

    def _own_pages(self) -> Sequence[OwnPages]:
        return (OwnPages.in_host(self.area),)

    def _floor(self, export: Export) -> float:
        """Bytes per second that READs of the pages must have. Raises ConfigError for a bad export."""
        return SLOW if self.on_device else 0.0

    def close(self, deadline: float) -> bool:
        if self._thread is None:
            return True
        self._tell(NixlReads.close)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _read(self, source: PeerSource, job: CopyJob) -> None:
        assert isinstance(source, NixlPeer)
        self._tell(lambda reads: reads.add(source, job, time.monotonic()))

    def _stop(self, job: CopyJob) -> None:
        self._tell(lambda reads: reads.cancel(job))

    def _stopped(self) -> list[CopyDone[CopyJob]]:
        return [self._done.get() for _ in range(self._done.qsize())]

    def _tell(self, command: Command) -> None:
        self._commands.put(command)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"copy-{self.name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with contextlib.ExitStack() as on_gpu:
            self._follow(NixlReads(lambda: self._agent(on_gpu), DEVICE if self.on_device else HOST))

    def _agent(self, on_gpu: contextlib.ExitStack) -> NixlAgent:
        """Makes the agent, on the thread that makes all its calls. Raises an EyasError."""
        try:
            on_gpu.enter_context(self._gpu())
        except DriverError as error:
            raise ConfigError(f"the thread of {self.name} cannot be on the GPU: {error}") from None
        return NixlAgent(self._bindings(), self._own_pages(), self._cards)

    def _gpu(self) -> contextlib.AbstractContextManager[None]:
        """Puts the thread on the GPU into whose memory pages are read, if it is one's."""
        return contextlib.nullcontext()

    def _follow(self, reads: NixlReads) -> None:
        active = time.monotonic()  # when something last happened
        while reads.busy or not reads.closing:
            heard = self._obey(reads, _pause(reads, time.monotonic() - active))
            stopped = reads.step(time.monotonic())
            for done in stopped:
                self._done.put(done)
            if stopped:
                self._ring()
            if heard or stopped:
                active = time.monotonic()

    def _obey(self, reads: NixlReads, pause: float | None) -> bool:
        """Waits `pause` seconds (None: as long as it takes) for a command; whether one came."""
        try:
            self._commands.get(timeout=pause)(reads)
        except queue.Empty:
            return False
        for _ in range(self._commands.qsize()):
            self._commands.get()(reads)
        return True


def _packed(memory: NixlMemory) -> bytes:
    device = -1 if memory.device is None else memory.device
    return _MEMORY.pack(memory.address, memory.pages, memory.page_bytes, device)


def _pause(reads: NixlReads, quiet: float) -> float | None:
    """Returns the pause until the next poll: longer the longer nothing has happened; None without work."""
    if not reads.busy:
        return None
    return min(max(quiet / 8, _EAGER_S), _PATIENT_S) if reads.urgent else _IDLE_S
