"""Host memory for pages of the pools: slots that hold a page of every pool, and the threads that copy.

It is taken in pieces, page-locked where a pool is a GPU's, by a thread of its own: slots become usable one
piece after the other while the engine serves, with a pause after each, in which steps go on. Pages leave and
come back on threads and a stream each, so that neither waits for the other and a step for none. What a slot
holds is the business of its callers.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from eyas.engine.kv.pinned import host_bytes, unpin
from eyas.engine.kv.pool import KvPool
from kv_transfer.backends.base import runs
from kv_transfer.copy_threads import CopyThreads, Then
from kv_transfer.gpu.driver import CopyBlock

PIECE_BYTES = 2**25  # taken at a time: launches of kernels wait meanwhile, for some ms
PAUSE = 1.0  # as many times as long as a piece took, before the next one: steps go on
GPU_THREADS = 2  # per direction: one launches copies while another waits for its own
_log = logging.getLogger("eyas.engine")


class HostMemory:
    """`slots` places, each for one page of every pool. The pools share page numbers and a device.

    Of the slots the first `ready` can be used. `bytes_out` and `bytes_in`: copied so far; `copy_s`: the
    seconds that this took.
    """

    def __init__(self, pools: Sequence[KvPool], slots: int) -> None:
        self._pools = [pool.pages[: pool.shape.pages] for pool in pools]
        self.page_bytes = sum(pool.shape.page_bytes for pool in pools)
        self.ready = 0
        self.bytes_out = self.bytes_in = 0
        self.copy_s = 0.0
        self._piece_slots = max(PIECE_BYTES // self.page_bytes, 1)
        self._pieces: list[list[torch.Tensor]] = []  # of each: the slots, per pool
        self._numbers = itertools.count()
        self._then: dict[int, Then] = {}
        allocation = pools[0].device_area().allocation
        self._driver = None if allocation is None else allocation.driver
        self._taker: CopyThreads[int] = CopyThreads("host-memory")
        count = 1 if self._driver is None else GPU_THREADS
        self._out: CopyThreads[int] = CopyThreads("host-out", count=count)
        self._in: CopyThreads[int] = CopyThreads("host-in", count=count)
        self._closing = False
        self._taker.submit(slots, lambda: self._take(slots))

    # --- copies ----------------------------------------------------------------------------------------

    def copy_out(self, pages: Sequence[int], slots: Sequence[int], then: Then) -> None:
        """Pages of the pools to slots. Every row in them must be past its device event."""
        self._submit(self._out, lambda: self._copy(pages, slots, out=True), then)

    def copy_in(self, slots: Sequence[int], pages: Sequence[int], then: Then) -> None:
        """Slots to pages of the pools, which no step in flight may write."""
        self._submit(self._in, lambda: self._copy(pages, slots, out=False), then)

    def parts(self, slot: int) -> list[memoryview]:
        """The bytes of a slot: its page of every pool. Any thread may ask."""
        piece, at = divmod(slot, self._piece_slots)
        return [host[at].view(torch.uint8).numpy().data for host in self._pieces[piece]]

    def poll(self) -> None:
        """Tells of the copies that stopped, and counts them."""
        for done in self._taker.finished():
            size = self.ready * self.page_bytes / 2**30
            if done.error is not None:
                _log.warning("the host cache has %.1f GiB and gets no more: %s", size, done.error.message)
            else:
                _log.info("the host cache has all of its %.1f GiB after %.1f s", size, done.seconds)
        for thread in (self._out, self._in):
            for done in thread.finished():
                self.bytes_out += done.bytes * (thread is self._out)
                self.bytes_in += done.bytes * (thread is self._in)
                self.copy_s += done.seconds if done.bytes else 0.0
                self._then.pop(done.job)(done.error)

    @property
    def copying(self) -> bool:
        """True while there is a copy that `poll` has not reported."""
        return bool(self._then)

    def close(self, deadline: float) -> bool:
        """Ends the threads and gives the memory back; False if one still copies at `deadline` (monotonic)."""
        self._closing = True
        if not all([thread.close(deadline) for thread in (self._taker, self._out, self._in)]):
            return False
        for piece in itertools.chain(*self._pieces) if self._pools[0].is_cuda else ():
            unpin(piece)
        self._pieces, self._pools = [], []
        return True

    def _submit(self, thread: CopyThreads[int], do: Callable[[], int], then: Then) -> None:
        number = next(self._numbers)
        self._then[number] = then
        thread.submit(number, do)

    @torch.inference_mode()
    def _copy(self, pages: Sequence[int], slots: Sequence[int], *, out: bool) -> int:
        """The bytes moved; when it returns they are there. On a thread."""
        moves = runs(tuple(slots), tuple(pages), self._piece_slots)
        if self._driver is not None:
            self._driver.copy_host(list(self._blocks(moves, out)), out=out)
            return len(pages) * self.page_bytes
        for slot, page, count in moves:
            piece, at = divmod(slot, self._piece_slots)
            for pool, host in zip(self._pools, self._pieces[piece], strict=True):
                there, here = pool[page : page + count], host[at : at + count]
                source, target = (there, here) if out else (here, there)
                target.copy_(source)
        return len(pages) * self.page_bytes

    def _blocks(self, moves: Iterable[tuple[int, int, int]], out: bool) -> Iterator[CopyBlock]:
        """The blocks of runs, (first slot, first page, count) each: a driver takes them all in one call."""
        for slot, page, count in moves:
            piece, at = divmod(slot, self._piece_slots)
            for pool, host in zip(self._pools, self._pieces[piece], strict=True):
                size = pool.shape[1] * pool.itemsize
                there, here = pool.data_ptr() + page * size, host.data_ptr() + at * size
                source, target = (there, here) if out else (here, there)
                yield CopyBlock(source, target, count * size)

    # --- memory ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _take(self, slots: int) -> int:
        """Piece after piece; returns the bytes of all. On a thread."""
        for first in range(0, slots, self._piece_slots):
            if self._closing:
                break
            began, count = time.monotonic(), min(self._piece_slots, slots - first)
            self._pieces.append([self._piece(pool, count) for pool in self._pools])
            self.ready += count
            time.sleep(PAUSE * (time.monotonic() - began))
        return self.ready * self.page_bytes

    def _piece(self, pool: torch.Tensor, slots: int) -> torch.Tensor:
        """[slots, elements]."""
        room = host_bytes(slots * pool.shape[1] * pool.itemsize, pool.device)
        return room.view(pool.dtype).view(slots, -1)
