"""The paged KV pool: one page-major tensor, slots of states and a proof page, in a file or a device's memory.

The scheduler decides who owns a page, and whether its rows are valid. A row is a token's place: physical row
= page * page_size + slot.

A slot of states takes several whole pages behind those of keys and values, so that it travels as they do.

It wraps memory of the CUDA driver as tensors: what torch's own allocator gives cannot be mapped by other
processes.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from eyas.common.errors import ConfigError
from eyas.common.machine.gpus import number_of
from eyas.common.machine.memory import discard
from eyas.common.wire.pool import PoolGeometry
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.groups import KvGroups, one_group
from eyas.engine.kv.scaled import FP8, LARGEST, PageScales, quantised
from eyas.engine.states.store import StateFormat, StateStore
from kv_transfer.area import DeviceArea, PoolArea, allocate_file, create_file, map_file
from kv_transfer.gpu.cuda import CudaDriver
from kv_transfer.gpu.driver import DeviceAllocation, DriverError, GpuMemory
from kv_transfer.gpu.handover import DescriptorGiver
from kv_transfer.layout import pages_for


class _DeviceBytes:
    """A view for `torch.as_tensor` of memory that is not torch's (CUDA Array Interface, version 3)."""

    def __init__(self, memory: GpuMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.size,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "strides": None,
            "version": 3,
        }


def bytes_of(memory: GpuMemory, device: str) -> torch.Tensor:
    """uint8 [size] over `memory`, which is of the GPU `device` and must live longer than the tensor.

    Raises ConfigError if it is of another one: torch would copy it, and pages would go to the copy.
    """
    tensor = torch.as_tensor(_DeviceBytes(memory), device=device)
    if tensor.data_ptr() != memory.address:
        raise ConfigError(f"KV memory is not on {device}", param="device")
    return tensor


@dataclass(frozen=True)
class PoolShape:
    """Sizes of a pool; the tensor is [pages, layers, fields, page_size, kv_heads, head_dim].

    The fields are keys and values, or one for both. Behind each layer of a page are its scales, if there are
    some (`eyas.common.wire.pool.scale_rows`). `groups`: of a model's layers, if these do not all stand in
    every page. `slots`: of `states`, if other layers have some.
    """

    format: KvFormat
    pages: int
    page_size: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    groups: KvGroups = ()
    states: StateFormat | None = None
    slots: int = 0

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """The group of each layer of the model, and its number among the layers of that group's pages."""
        groups = self.groups or one_group(self.layers)
        return {
            layer: (number, place)
            for number, group in enumerate(groups)
            for place, layer in enumerate(group.layers)
        }

    @property
    def layers(self) -> int:
        """Layers of every page."""
        return self.format.layers

    @property
    def fields(self) -> int:
        """Rows per token in each layer: 2 for a key and a value, 1 for one that is both."""
        return self.format.slot[0]

    @property
    def kv_heads(self) -> int:
        """Heads per row of keys, and of values."""
        return self.format.kv_heads

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return self.format.head_dim

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """The sizes of the tensor, in the order of its dimensions."""
        fields, heads, elements = self.format.slot
        return self.pages, self.format.layers, fields, self.page_size, heads, elements

    @property
    def slot_pages(self) -> int:
        """Pages that one slot of states takes."""
        return 0 if self.states is None else pages_for(self.states.slot_bytes, self.page_bytes)

    @property
    def all_pages(self) -> int:
        """The number of pages, with those that slots of states take."""
        return self.pages + self.slots * self.slot_pages

    @property
    def page_bytes(self) -> int:
        """All layers of one page, which is one contiguous block."""
        return self.format.page_bytes(self.page_size, self.dtype.itemsize)

    @property
    def scale_rows(self) -> int:
        """Rows of heads with scales, in each layer of a page."""
        return self.format.scale_rows(self.page_size, self.dtype.itemsize)

    @property
    def layer_rows(self) -> int:
        """Rows of heads in each layer of a page."""
        return self.fields * self.page_size + self.scale_rows

    @property
    def geometry(self) -> PoolGeometry:
        """The sizes, as they are sent to pullers."""
        return PoolGeometry(
            pages=self.all_pages,
            page_size=self.page_size,
            layers=self.format.layers,
            kv_heads=self.format.kv_heads,
            head_dim=self.format.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            fields=self.fields,
            state_pages=self.slot_pages if self.slots else 0,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all pages; the proof page takes `page_bytes` more."""
        return self.all_pages * self.page_bytes


class ClosableResource(Protocol):
    """A resource that ends with a pool."""

    def close(self) -> None:
        """Frees its resources."""
        ...


class KvPool:
    """Owns the memory of one KV group (target or draft) until `close`.

    `pages`: [all pages + 1, elements of a page], the last one the proof page: random bytes, of which
    `checksum` is the CRC-32. `tensor`: the pages of keys and values, in the sizes of the shape. `states`: the
    slots of states, if there are some; `state_layers`: the model's layers of these, by number.
    """

    def __init__(self, shape: PoolShape, path: Path | None = None, *, theirs: bool = False) -> None:
        """`path`: a new file to map, so that other processes can use the pool; None: the device's memory.

        `theirs`: the file is another process's pool, which this one uses too and leaves as it is. All rows of
        a new pool start as zeros. Raises ConfigError if the file system cannot hold it.
        """
        self.shape = shape
        self.path = None if theirs else path
        self.area: PoolArea | None = None  # the pool, if it is in a file
        self.attached: list[ClosableResource] = []  # what serves the pool to others, and ends before it
        self._allocation: DeviceAllocation | None = None
        self._proof = torch.empty(0)  # while the bytes of a GPU's pool are gone
        self._giver = ""
        if path is None:
            self.pages, self._allocation = _on_device(shape)
            self.checksum = _fill_proof(self.pages[-1])
        else:
            memory = map_file(path) if theirs else create_file(path, shape.nbytes + shape.page_bytes)
            if not theirs:
                self.area = PoolArea.new(memoryview(memory), shape.page_bytes, str(path))
                self.checksum = self.area.checksum(shape.all_pages)
            self.pages = torch.frombuffer(memory, dtype=shape.dtype).view(shape.all_pages + 1, -1)
        cut = (shape.pages, shape.layers, shape.layer_rows, shape.kv_heads, shape.head_dim)
        whole = self.pages[: shape.pages].view(cut)
        numbers = whole[:, :, : shape.fields * shape.page_size]
        self.tensor = numbers.unflatten(2, (shape.fields, shape.page_size))
        self._scales = PageScales(whole, shape.page_size) if shape.scale_rows else None
        self._places = shape.places
        self._layers = {layer: self.tensor[:, place] for layer, (_, place) in self._places.items()}
        self.states = self._state_store()
        self.state_layers = {} if self.states is None else self.states.layers
        self._moved = as_bytes(self.tensor)
        rows = as_bytes(whole).view(-1, shape.kv_heads * shape.head_dim)
        fields = itertools.product(range(shape.layers), range(shape.fields))
        self._field_rows = [rows[i * shape.layer_rows + field * shape.page_size :] for i, field in fields]

    def _state_store(self) -> StateStore | None:
        shape = self.shape
        if shape.states is None:
            return None
        memory = self.pages[shape.pages : shape.all_pages].view(torch.uint8)
        return StateStore(shape.states, memory.view(shape.slots, -1))

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self.shape.page_size

    def hand_over(self, path: Path) -> None:
        """Lets other processes map the pool from now on, if it is a GPU's, by the socket `path`."""
        if self._allocation is not None:
            torch.cuda.synchronize(self.shape.device)  # they find it filled
            self._giver = str(path)
            self.attached.append(DescriptorGiver(path, self._allocation.memory.size, self._allocation.export))

    def device_area(self) -> DeviceArea:
        """The device memory of a pool that is in no file, for backends."""
        return DeviceArea(self.pages.data_ptr(), self.shape.geometry, self._allocation, self._giver)

    def layer(self, index: int, heads: tuple[int, int] | None = None) -> torch.Tensor:
        """View of one layer of the model, [pages, fields, page_size, kv_heads, head_dim].

        `heads`: how many it has and their elements, where that differs from the pool's. Heads have equal
        shares of a row then, each the first elements of its share.
        """
        layer: torch.Tensor = self._layers[index]
        if heads is None or heads == layer.shape[3:]:
            return layer
        return _of_heads(layer.flatten(3), *heads)

    def group_of(self, layer: int) -> int:
        """The group of a layer of the model."""
        return self._places[layer][0]

    def behind(self, layers: int, *sizes: int) -> torch.Tensor:
        """View [pages, *sizes] of what lies behind the first `layers` layers of each page."""
        first = self.pages.shape[1] // self.shape.layers * layers
        room = self.pages[: self.shape.pages, first : first + math.prod(sizes)]
        view: torch.Tensor = room.unflatten(1, sizes)
        return view

    def slots(self, kv_rows: torch.Tensor) -> torch.Tensor:
        """Physical rows int64 [R] as `write` takes them; once per forward, the same for all layers."""
        size = self.shape.page_size
        page, slot = kv_rows // size, kv_rows % size
        return page * (self.shape.layers * self.shape.layer_rows) + slot

    def write(self, layer: int, slots: torch.Tensor, *fields: torch.Tensor) -> None:
        """Stores the first len(slots) rows of each field [.., kv_heads, head_dim] in one layer of the model,
        whose heads may differ from the pool's, see `layer`; flat rows are of the pool's.
        """
        count, place = slots.shape[0], self._places[layer][1]
        first = place * self.shape.fields
        page_rows = self.shape.layers * self.shape.layer_rows
        for i, field in enumerate(fields):
            if field.dim() > 2 and field.shape[-1] != self.shape.head_dim:
                rows = stored(field[:count], self.shape.dtype)
                _of_heads(self._field_rows[first + i], *field.shape[-2:]).index_copy_(0, slots, rows)
                continue
            if self._scales is None:
                rows = stored(field[:count], self.shape.dtype)
            else:
                heads = field[:count].reshape(count, self.shape.kv_heads, self.shape.head_dim)
                rows, scales = quantised(heads)
                self._scales.write(place, i, slots // page_rows, slots % page_rows, scales)
            self._field_rows[first + i].index_copy_(0, slots, as_bytes(rows.reshape(count, -1)))

    def move(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies physical rows int64 [n] over all layers; all sources are read before any row is written."""
        size = self.shape.page_size
        taken = self._moved[src // size, :, :, src % size]
        self._moved[dst // size, :, :, dst % size] = taken
        if self._scales is not None:
            self._scales.move(src, dst)

    def copy_page(self, src: int, dst: int) -> None:
        """Copies all layers of page `src` to page `dst`."""
        pages = as_bytes(self.pages)
        pages[dst] = pages[src]

    def cleanse(self, pages: torch.Tensor) -> None:
        """Takes NaN and infinity out of `pages` int64 [n]; numbers stay as they are."""
        sound = self.tensor[pages].float().nan_to_num_(0.0, 0.0, 0.0)
        self.tensor[pages] = sound.to(self.tensor.dtype)
        if self._scales is not None:
            self._scales.cleanse(pages)

    def release(self) -> int:
        """Gives the bytes of all pages back, and keeps their addresses: graphs and mappings stay valid.

        Returns how many left. Nothing may touch the pool before `restore`. Raises ConfigError if another
        process has a GPU's pool mapped: it would go on to hold those bytes, and to read them.
        """
        if any(isinstance(each, DescriptorGiver) and each.taken for each in self.attached):
            raise ConfigError("other workers have its KV pages mapped: those of a GPU stay then")
        if self._allocation is not None:
            torch.cuda.synchronize(self.shape.device)
            self._proof = self.pages[-1].cpu()
            self._allocation.empty()
            return self._allocation.memory.size
        held = self.pages[:-1].view(torch.uint8).flatten()
        return discard(held.data_ptr(), held.nbytes, shared=self.path is not None)

    @torch.inference_mode()  # on a thread; the pool may have been made in it
    def restore(self) -> int:
        """Makes the pool as it was when it was new: zeros, and the same proof page. Returns its bytes.

        Raises ConfigError if there is no room for them; then it is as before.
        """
        if self._allocation is not None:
            try:
                self._allocation.refill()
            except DriverError as error:
                raise ConfigError(
                    f"no room for a KV pool of {self.shape.nbytes / 2**30:.1f} GiB: {error}"
                ) from None
            self.pages.zero_()
            self.pages[-1].copy_(self._proof)
            torch.cuda.synchronize(self.shape.device)
            return self._allocation.memory.size
        if self.path is not None:
            allocate_file(self.path)
        self.pages[:-1].zero_()
        return self.shape.nbytes

    def close(self) -> None:
        """Gives the memory back and removes the file; the mapping goes with the last view of it."""
        for closable in self.attached[::-1]:  # threads that copy to memory, before that
            closable.close()
        self.attached = []
        self.area = None
        self.pages = self.tensor = self._moved = torch.empty(0)
        self._layers, self._field_rows, self._scales = {}, [], None
        self.states, self.state_layers = None, {}
        if self._allocation is not None:
            torch.cuda.synchronize(self.shape.device)  # what was launched may still write to it
            self._allocation.free()
            self._allocation = None
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _of_heads(rows: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """Rows [.., elements] as heads [.., heads, dim]: the first elements of equal shares."""
    shares: torch.Tensor = rows.unflatten(-1, (heads, -1))
    return shares[..., :dim]


def stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows as a pool of that dtype keeps them without scales; in FP8 what is beyond its largest number
    becomes that.
    """
    return (rows.clamp(-LARGEST, LARGEST) if dtype is FP8 else rows).to(dtype)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Views rows in FP8 as bytes, since few operations support FP8; others as they are."""
    return rows.view(torch.uint8) if rows.dtype is FP8 else rows


def rows_at(rows: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a pool, those of `index` int64 [n], in that dtype."""
    return as_bytes(rows).index_select(0, index).view(rows.dtype).to(dtype)


def _on_device(shape: PoolShape) -> tuple[torch.Tensor, DeviceAllocation | None]:
    """Zeros for all pages and the proof page; on a GPU, in memory that other processes can map."""
    size = (shape.all_pages + 1) * shape.page_bytes
    if not shape.device.startswith("cuda"):
        return _as_pages(torch.zeros(size, dtype=torch.uint8, device=shape.device), shape), None
    try:
        allocation = DeviceAllocation.new(CudaDriver(number_of(shape.device)), size)
    except DriverError as error:
        raise ConfigError(f"a KV pool of {size / 2**30:.1f} GiB cannot be made: {error}") from None
    memory = bytes_of(allocation.memory, shape.device)[:size]
    memory.zero_()
    return _as_pages(memory, shape), allocation


def _as_pages(memory: torch.Tensor, shape: PoolShape) -> torch.Tensor:
    return memory.view(shape.dtype).view(shape.all_pages + 1, -1)


def _fill_proof(page: torch.Tensor) -> int:
    """Fills it with random bytes, which no other pool has; their CRC-32."""
    proof = os.urandom(page.nbytes)
    page.view(torch.uint8).copy_(torch.frombuffer(bytearray(proof), dtype=torch.uint8))
    return zlib.crc32(proof)
