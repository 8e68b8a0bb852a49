"""Host memory beside a device's pool, in a file that other processes map: pages pass through it.

Where it has slots in the devices' memory too, a slot's number is that of a place in the host's memory and of
one in each device's. There parts of pages stand one behind the other: a NIC takes neighbours together.

Threads of each rank copy between the two, on a stream of their own, and wait for the copies themselves: the
step loop never does. Whose pages they are, and which slots are free, is the business of its callers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eyas.common.errors import ConfigError
from eyas.common.types import ALL_OF_RANK_0, PageShare
from eyas.engine.kv.pinned import copying_on, pin, unpin
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.rank_pages import PagesByHeads
from eyas.engine.kv.slots import SlotAllocator
from kv_transfer.area import DeviceSlots, PoolArea, create_file
from kv_transfer.backends.base import runs
from kv_transfer.copy_threads import CopyThreads, Ring, Then, silent
from kv_transfer.gpu.driver import CopyBlock
from kv_transfer.layout import part_places, parts_in_slot, parts_per_slot, slots_for
from kv_transfer.windows import PagePiece

GPU_THREADS = 2  # of a rank: one launches copies while another waits for its own
FEW_RUNS = 4  # of pages in a row; more are copied by two kernels, whatever their number
STOP_S = 5.0  # the end waits this long for a copy that still runs


class PageStaging:
    """`slots` places for pages of `pool`, page-locked where that is a GPU's. Closed by its pool.

    `others`: the pages of further ranks, as that pool's are. `ring`: called when a copy has stopped.
    `area`: the slots in the host's memory; `on_devices`: those of each rank, uint8 [slots + 1, bytes of a
    page], once they are made.

    Raises ConfigError if the file system cannot hold it, or the driver cannot lock it.
    """

    def __init__(
        self,
        pool: KvPool,
        path: Path,
        slots: int,
        others: Sequence[torch.Tensor] = (),
        ring: Ring = silent,
    ) -> None:
        shape = pool.shape
        self._path, self._geometry = path, shape.geometry
        self._file = create_file(path, slots * shape.page_bytes)
        slots_bytes = np.frombuffer(memoryview(self._file), np.uint8)
        self.area = PoolArea(slots_bytes.reshape(slots, shape.page_bytes), str(path))
        self._host = torch.frombuffer(self._file, dtype=torch.uint8).view(slots, -1)
        self._ranks = [PagesByHeads(pages, shape) for pages in (pool.pages, *others)]
        self.on_devices: tuple[torch.Tensor, ...] = ()
        allocation = pool.device_area().allocation
        self._driver = None if allocation is None else allocation.driver  # of rank 0's GPU
        self._locked = pool.pages.is_cuda
        if self._locked:
            pin(self._host)
        count = GPU_THREADS if self._locked else 1
        self._threads: list[CopyThreads[int]] = [CopyThreads("staging", ring, count) for _ in self._ranks]
        self._numbers = itertools.count()
        self._running: dict[int, Then] = {}
        pool.attached.append(self)

    def make_device_slots(self) -> tuple[DeviceSlots, ...]:
        """Slots in the memory of each rank's device, of torch's allocator: a NIC reads what that gives.

        Raises ConfigError if a device has no room.
        """
        slots, size = self.area.pages.shape
        try:
            self.on_devices = tuple(
                torch.empty((slots + 1, size), dtype=torch.uint8, device=rank.whole.device)
                for rank in self._ranks
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"a GPU has no room for {slots} slots of {size} bytes") from error
        return tuple(
            DeviceSlots(memory.data_ptr(), size, slots, max(memory.get_device(), 0), memory)
            for memory in self.on_devices
        )

    def slots_for(self, parts: int, share: PageShare) -> int:
        """The number of slots that this number of parts of pages takes, each that share of one."""
        return slots_for(parts, parts_in_slot(self._geometry, share))

    def copy_out(
        self, pages: Sequence[int], slots: Sequence[int], then: Then, share: PageShare = ALL_OF_RANK_0
    ) -> None:
        """Pages of a rank's pool, or its proof page, to slots; of each what `share` says, to the beginning of
        its slot. What counts is past its device event.
        """
        self._submit(share, lambda: self._copy_out(share, pages, slots), then)

    def copy_in(
        self, slots: Sequence[int], pages: Sequence[int], then: Then, share: PageShare = ALL_OF_RANK_0
    ) -> None:
        """Slots to pages of a rank's pool, or to the heads of `share` in them."""
        self._submit(share, lambda: self._copy_in(share, slots, pages), then)

    def piece(self, slot: int, share: PageShare) -> bytes:
        """The bytes in a slot of a rank."""
        return bytes(self._piece(slot, share).cpu().numpy())

    def joined(self, pieces: Sequence[PagePiece]) -> bytes:
        """One page of a peer's rank, of all its pieces."""
        rank, heads = self._ranks[0], sum(share.heads for _, share in pieces)
        if not heads:
            ((whole, _),) = pieces
            return whole
        page = np.empty((rank.rows, heads, rank.head_bytes), np.uint8)
        for piece, share in pieces:
            rows = np.frombuffer(piece, np.uint8).reshape(rank.rows, share.heads, -1)
            page[:, share.first : share.first + share.heads] = rows
        return page.tobytes()

    def poll(self) -> None:
        """Tells of the copies that stopped: of a CPU's pool in the order in which they were asked for."""
        for thread in self._threads:
            for done in thread.finished():
                self._running.pop(done.job)(done.error)

    @property
    def copying(self) -> bool:
        """True while there is a copy that `poll` has not reported."""
        return bool(self._running)

    def stop(self, deadline: float) -> bool:
        """Ends the threads; False if one still copies at `deadline` (monotonic seconds)."""
        return all([thread.close(deadline) for thread in self._threads])

    def close(self) -> None:
        """Ends the threads and removes the file; the memory goes with the last view of it."""
        if self.stop(time.monotonic() + STOP_S):
            if self._locked:
                unpin(self._host)
            self._host, self._ranks, self.on_devices = torch.empty(0), [], ()
        self._path.unlink(missing_ok=True)

    def _submit(self, share: PageShare, do: Callable[[], int], then: Then) -> None:
        number = next(self._numbers)
        self._running[number] = then
        self._threads[share.rank].submit(number, do)

    @torch.inference_mode()
    def _copy_out(self, share: PageShare, pages: Sequence[int], slots: Sequence[int]) -> int:
        """The bytes moved; when it returns they are there. On a thread of the rank, as `_copy_in`."""
        rank, memory = self._ranks[share.rank], self._memory(share)
        if rank.is_whole(share):
            return self._copy_whole(share, pages, slots, out=True)
        with copying_on(rank.stream):
            parts = rank.gather(pages, share)
            if share.on_device:
                words = parts.view(rank.word)
                blocks, places = _blocks(memory.view(rank.word), words.shape[1], slots, len(pages))
                blocks.index_copy_(0, rank.index(places), words)
            else:
                for slot, part in zip(slots, parts, strict=True):
                    self._piece(slot, share).copy_(part, non_blocking=True)
        return parts.nbytes

    @torch.inference_mode()
    def _copy_in(self, share: PageShare, slots: Sequence[int], pages: Sequence[int]) -> int:
        rank, memory = self._ranks[share.rank], self._memory(share)
        width = rank.part_bytes(share)
        if rank.is_whole(share):
            return self._copy_whole(share, pages, slots, out=False)
        with copying_on(rank.stream):
            if share.on_device:
                words = width // rank.word.itemsize
                blocks, places = _blocks(memory.view(rank.word), words, slots, len(pages))
                parts = blocks.index_select(0, rank.index(places)).view(torch.uint8)
            else:
                parts = torch.empty((len(slots), width), dtype=torch.uint8, device=rank.whole.device)
                for slot, part in zip(slots, parts, strict=True):
                    part.copy_(self._piece(slot, share), non_blocking=True)
            rank.scatter(parts, pages, share)
        return parts.nbytes

    def _copy_whole(self, share: PageShare, pages: Sequence[int], slots: Sequence[int], *, out: bool) -> int:
        """Runs of pages in one go; returns the bytes. A driver takes all runs in one call, where a thread
        would wait for the interpreter's lock at each.
        """
        rank, memory = self._ranks[share.rank], self._memory(share)
        moves = list(runs(tuple(pages), tuple(slots)))
        if self._driver is not None and share.rank == 0 and not share.on_device:
            self._driver.copy_host(list(_blocks_of(rank.whole, memory, moves, out)), out=out)
            return len(pages) * memory.shape[1]
        with copying_on(rank.stream):
            if share.on_device and len(moves) > FEW_RUNS:
                rank.copy_whole(memory, pages, slots, out=out)
                return len(pages) * memory.shape[1]
            for page, slot, count in moves:
                here, there = rank.whole[page : page + count], memory[slot : slot + count]
                source, target = (here, there) if out else (there, here)
                target.copy_(source, non_blocking=True)
        return len(pages) * memory.shape[1]

    def _memory(self, share: PageShare) -> torch.Tensor:
        """The slots for a rank: uint8 [slots, bytes of a page]."""
        return self.on_devices[share.rank] if share.on_device else self._host

    def _piece(self, slot: int, share: PageShare) -> torch.Tensor:
        """The beginning of a slot: uint8 [bytes of a part]."""
        piece: torch.Tensor = self._memory(share)[slot, : self._ranks[0].part_bytes(share)]
        return piece


def _blocks_of(
    pool: torch.Tensor, slots: torch.Tensor, moves: Sequence[tuple[int, int, int]], out: bool
) -> Iterator[CopyBlock]:
    """The blocks of runs of pages, (first page, first slot, count) each. [pages or slots, bytes] each."""
    size = pool.shape[1]
    for page, slot, count in moves:
        here, there = pool.data_ptr() + page * size, slots.data_ptr() + slot * size
        yield CopyBlock(here, there, count * size) if out else CopyBlock(there, here, count * size)


def _blocks(
    memory: torch.Tensor, width: int, slots: Sequence[int], parts: int
) -> tuple[torch.Tensor, Sequence[int]]:
    """Slots of a device as [blocks, width], and the blocks of `slots` that some parts of pages take."""
    each = parts_per_slot(memory.shape[1], width)
    blocks = memory[:, :width] if each == 1 else memory.view(-1, width)
    return blocks, part_places(slots, each, parts)


@dataclass(frozen=True)
class StagingInlet:
    """The entry of pages, a `kv_transfer.windows.LandingSlots`: some of a staging's slots."""

    staging: PageStaging
    slots: SlotAllocator

    @property
    def total(self) -> int:
        """The number of all slots."""
        return self.slots.total

    @property
    def free(self) -> int:
        """The number of those that are not taken."""
        return self.slots.free

    def take(self, count: int) -> list[int] | None:
        """Takes `count` slots; None: not now."""
        return self.slots.take(count)

    def give(self, slots: Sequence[int]) -> None:
        """Takes slots back, in which nothing is copied any more."""
        self.slots.give(slots)

    def copy_in(self, slots: Sequence[int], pages: Sequence[int], then: Then, target: PageShare) -> None:
        """Copies slots to pages of a rank's pool; `poll` calls `then` when that has stopped."""
        self.staging.copy_in(slots, pages, then, target)

    def piece(self, slot: int, target: PageShare) -> bytes:
        """The bytes that have come to a slot for a rank's pool."""
        return self.staging.piece(slot, target)

    def joined(self, pieces: Sequence[PagePiece]) -> bytes:
        """One page of a peer's rank, of all its pieces."""
        return self.staging.joined(pieces)

    def poll(self) -> None:
        """Tells of the copies that have stopped."""
        self.staging.poll()

    def stop(self, deadline: float) -> bool:
        """Ends the copies; False if one still runs at `deadline` (monotonic seconds)."""
        return self.staging.stop(deadline)
