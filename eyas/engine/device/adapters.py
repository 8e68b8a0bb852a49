"""The slots of adapters on a device: one block of memory, from which the products of all layers read.

An adapter is copied from pinned memory by a stream of its own, behind the steps that may still read what was
in its slot; those that are launched meanwhile go on with the other slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from eyas.common.errors import EyasError, InvalidRequest
from eyas.engine.adapters.reader import AdapterReader
from eyas.engine.adapters.reading_process import ReadingProcess
from eyas.engine.adapters.sites import AdapterSites, PackedAdapter, filled
from eyas.engine.device import calls
from eyas.engine.device.adapter_rooms import PIECE_BYTES, AdapterRooms
from eyas.engine.formats.adapted import AdaptedProjection
from eyas.engine.ipc.adapter_messages import LORA_PATH
from eyas.engine.kernels.products.updates import SiteNumbers
from eyas.engine.parallel.leader import RankLeader
from eyas.engine.parallel.ranks import RankCall, RankCalls, RankChannel

READ_S = 300.0  # the slowest rank may take so much longer to read an adapter than rank 0


class DeviceAdapters:
    """An `AdapterMemory`: the slots for these matrices of a model on `device`, or a rank's share of them."""

    def __init__(
        self, reader: AdapterReader, matrices: Sequence[AdaptedProjection], slots: int, device: str
    ) -> None:
        """`matrices`: of the model, and of its draft head where adapters may update that."""
        self.slots = slots
        self._reader, self._device, rank = reader, device, reader.most_rank
        self._sites = AdapterSites([site for matrix in matrices for site in matrix.sites])
        self._words = self._sites.words(rank)
        dtype = matrices[0].site.placement.dtype
        self._numbers = torch.zeros(slots * self._words, dtype=dtype, device=device)
        count = len(self._sites.sites)
        self._places = torch.zeros(slots + 1, count, 2, dtype=torch.int64, device=device)
        self._stream = torch.cuda.Stream(device) if device.startswith("cuda") else None
        self._process = None if self._stream is None else ReadingProcess(reader, self._sites)
        self._rooms = None if self._stream is None else AdapterRooms(self._stream)
        first = 0
        for matrix in matrices:
            own = matrix.sites[0]  # of experts all are alike
            places = self._places[:, first] if len(matrix.sites) == 1 else self._places.view(-1, 2)[first:]
            parts = own.part_of_rows.to(device), len(own.parts)
            matrix.numbers, matrix.apart = SiteNumbers(self._numbers, places, *parts, filled(rank)), count
            first += len(matrix.sites)

    def read(self, folder: Path) -> PackedAdapter:
        """The adapter in a folder, in memory that is page-locked as long as it lives. Called by a thread of
        its own.
        """
        if self._process is None or self._rooms is None:
            torch.set_num_threads(1)
            return self._sites.packed(self._reader.read(folder, self._sites.check), folder)
        with torch.cuda.stream(self._stream):  # what the gains are copied by waits for no step
            return self._process.read(folder, self._rooms)

    def forget(self, adapter: PackedAdapter) -> None:
        """Does nothing: its memory goes with its last reference."""

    def renew(self, adapter: PackedAdapter) -> None:
        """Multiplies its lower factors by the gains as they are now; in its own memory."""
        self._sites.renew(adapter)

    @torch.inference_mode()
    def fill(self, slot: int, adapter: PackedAdapter) -> Callable[[], bool]:
        """Begins the copy."""
        first = (slot - 1) * self._words
        places = adapter.places.clone()
        places[:, 0] += first
        room = self._numbers[first : first + adapter.numbers.shape[0]]
        if self._stream is None:
            room.copy_(adapter.numbers)
            self._places[slot].copy_(places)
            return lambda: True
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        event, places = torch.cuda.Event(), places.pin_memory()
        with torch.cuda.stream(self._stream):
            each = PIECE_BYTES // room.itemsize  # no copy may reach from one locked piece into the next
            for own, piece in zip(room.split(each), adapter.numbers.split(each), strict=True):
                own.copy_(piece, non_blocking=True)
            self._places[slot].copy_(places, non_blocking=True)
            event.record()
        return lambda: bool(event.query()) and places is not None  # which stays as long as it is read

    def wait(self) -> None:
        """Steps that are launched from now on run behind the copies that have begun."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class LeaderAdapters:
    """An `AdapterMemory` over several ranks: what rank 0's slots take, the followers' take too."""

    def __init__(self, own: DeviceAdapters, leader: RankLeader) -> None:
        self.slots = own.slots
        self._own, self._leader = own, leader

    def read(self, folder: Path) -> PackedAdapter:
        """The adapter that all ranks have read there. Raises InvalidRequest if it was not the same on all."""
        number = self._leader.ask(calls.read_adapter(folder))
        try:
            packed = self._own.read(folder)
        except Exception:
            self._forget_each(folder, self._read_by_others(number))
            raise
        others = self._read_by_others(number)
        if set(others) == {packed.id}:
            return packed
        self._forget_each(folder, others)
        text = f"{folder} changed while it was read: not all ranks have the same adapter of it"
        raise InvalidRequest(text, param=LORA_PATH)

    def _read_by_others(self, number: int) -> list[str]:
        """What each of the others has read at that call; "": nothing."""
        return [each.decode() for each in self._leader.answers(number, READ_S)]

    def _forget_each(self, folder: Path, names: Sequence[str]) -> None:
        """Each drops what it has just read itself: of any other adapter it may have one that serves."""
        for rank, name in enumerate(names, start=1):
            if name:
                self._leader.tell_one(rank, calls.forget_adapter(folder, name))

    def forget(self, adapter: PackedAdapter) -> None:
        """The others drop it."""
        self._tell(calls.forget_adapter(adapter.folder, adapter.id))

    def renew(self, adapter: PackedAdapter) -> None:
        """All renew it."""
        self._tell(calls.renew_adapter(adapter.folder, adapter.id))
        self._own.renew(adapter)

    def fill(self, slot: int, adapter: PackedAdapter) -> Callable[[], bool]:
        """All begin to copy."""
        with self._leader.together():
            self._leader.tell(calls.fill_adapter(slot, adapter.folder, adapter.id))
            return self._own.fill(slot, adapter)

    def _tell(self, call: RankCall) -> None:
        with self._leader.together():
            self._leader.tell(call)


class FollowerAdapters:
    """What a rank above 0 has of adapters: it reads what rank 0 reads, at about the same time. `calls`: what
    it does, by their kinds.

    A folder may hold another adapter each time that it is read, and the one before may still serve.
    """

    def __init__(self, own: DeviceAdapters, channel: RankChannel, settle: Callable[[], None]) -> None:
        """`settle`: waits until the device has computed the steps that were launched."""
        self._own, self._channel, self._settle = own, channel, settle
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._reads: list[tuple[Path, PackedAdapter]] = []  # what its thread has read
        self.calls: RankCalls = {
            calls.READ_ADAPTER: lambda call: self.read(call.numbers[0], calls.folder_of(call)),
            calls.FILL_ADAPTER: lambda call: self.fill(call.numbers[0], *calls.adapter_of(call)),
            calls.FORGET_ADAPTER: lambda call: self.forget(*calls.adapter_of(call)),
            calls.RENEW_ADAPTER: lambda call: self.renew(*calls.adapter_of(call)),
        }

    def read(self, number: int, folder: Path) -> None:
        """Begins to read a folder; then answers the call `number` with the adapter's id, or with nothing.
        Steps and other calls go on meanwhile.
        """
        self._reader.submit(self._read, number, folder)

    def _read(self, number: int, folder: Path) -> None:
        name = ""
        try:
            packed = self._own.read(folder)
            self._reads.append((folder, packed))
            name = packed.id
        finally:
            self._channel.answer(number, name.encode())

    def fill(self, slot: int, folder: Path, name: str) -> None:
        """Begins to fill a slot with the adapter `name`, which was read there. The next steps wait for that:
        rank 0, which says when it may be read, knows of its own copy alone.
        """
        self._own.fill(slot, self._one(folder, name))
        self._own.wait()

    def renew(self, folder: Path, name: str) -> None:
        """As of rank 0, which finds the same wrong, and drops it then."""
        self._settle()
        with contextlib.suppress(EyasError):
            self._own.renew(self._one(folder, name))

    def _one(self, folder: Path, name: str) -> PackedAdapter:
        place = self._place(folder, name)
        assert place is not None, "rank 0 has heard that it was read"
        return self._reads[place][1]

    def forget(self, folder: Path, name: str) -> None:
        """The adapter `name`, read there, is not needed any more; another one may be."""
        place = self._place(folder, name)
        if place is not None:
            del self._reads[place]

    def _place(self, folder: Path, name: str) -> int | None:
        for place, (other, packed) in enumerate(self._reads):
            if other == folder and packed.id == name:
                return place
        return None
