"""The calls of the CUDA driver, by its C interface, for one GPU.

Source: CUDA Driver API, "Virtual Memory Management" and "Memory Management". Without libcuda this file loads,
and making a `CudaDriver` raises DriverError.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Iterator, Sequence

from kv_transfer.gpu.driver import CopyBlock, DriverError, GpuMemory

PINNED, DEVICE, FILE_DESCRIPTOR = 1, 1, 1  # CUmemAllocationType, CUmemLocationType, CUmemAllocationHandleType
READ_WRITE = 3
OPEN_WITH_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
IN_ALL_CONTEXTS, FOR_KERNELS = 1, 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP
RECOMMENDED = 1
RDMA_CAPABLE = 15  # CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
RDMA_WITH_VMM = 110  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
IN_STREAM_ORDER = 1  # CUmemcpySrcAccessOrder
BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
NON_BLOCKING = 1  # of streams: not ordered with the default stream
SLEEP = 1 | 2  # of events: a waiting thread sleeps, and nothing is timed
ON_DEVICE = 2  # CUmemorytype
BATCH = 512
"""Copies per call: calls of tens of thousands are known to crash."""
COPIES = 2
"""Copies of a direction that are launched at once: one waits behind the other, and nothing idles between."""
STREAMS = 4
"""Copies are dealt to several. 192 pages of 2 MiB between two H200s: 295 GB/s on one stream, 333 on two, 356
on four; one piece of 1 GiB: 391. Kernels reach no more, and take processors from the steps."""


class _MemoryLocation(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]  # of characters a zero would be the last


class _AllocFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _MemoryLocation),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocFlags),
    ]


class _AccessDesc(ctypes.Structure):
    _fields_ = [("location", _MemoryLocation), ("flags", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    _fields_ = [
        ("order", ctypes.c_int),
        ("source_hint", _MemoryLocation),
        ("target_hint", _MemoryLocation),
        ("flags", ctypes.c_uint),
    ]


class _Copy2D(ctypes.Structure):
    _fields_ = [
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_kind", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_kind", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
    ]


class _Road:
    """Streams that carry one copy after the other. `launching`: by one thread at a time, all of its copy.

    `ends`: sets of events, one per stream, that no copy has.
    """

    def __init__(self, streams: list[ctypes.c_void_p], ends: list[list[ctypes.c_void_p]]) -> None:
        self.streams = streams
        self.launching = threading.Lock()
        self.ends: queue.SimpleQueue[list[ctypes.c_void_p]] = queue.SimpleQueue()
        for events in ends:
            self.ends.put(events)


class CudaDriver:
    """The driver for GPU number `ordinal` of this process; its context is the one that torch uses too."""

    def __init__(self, ordinal: int) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"the CUDA driver cannot be loaded: {error}") from None
        self._call("cuInit", ctypes.c_uint(0))
        self.ordinal = ordinal
        self._device = self._nth(ordinal)
        self.uuid = self._uuid(self._device)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._location = _MemoryLocation(DEVICE, ordinal)
        with self.bound():
            self._peers, self._out, self._in = self._road(STREAMS), self._road(1), self._road(1)

    @property
    def pci_address(self) -> str:
        """Its place on the PCI bus, as sysfs writes it."""
        text = ctypes.create_string_buffer(16)
        self._call("cuDeviceGetPCIBusId", text, ctypes.c_int(len(text)), self._device)
        return text.value.decode().lower()

    def rdma_capable(self, address: int) -> bool:
        """Whether network cards may be given the memory at `address`: its allocation asked for that, in vain
        perhaps.
        """
        able = ctypes.c_int()
        with self.bound():
            attribute, place = ctypes.c_int(RDMA_CAPABLE), ctypes.c_uint64(address)
            self._call("cuPointerGetAttribute", ctypes.byref(able), attribute, place)
        return able.value != 0

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """The thread is on this GPU meanwhile, and then where it was: there torch launches its kernels."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def obstacle(self, uuid: bytes) -> str:
        """Returns why this GPU cannot read the memory of the GPU `uuid`; empty: it can."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        for device in map(self._nth, range(count.value)):
            if self._uuid(device) == uuid:
                return self._no_access(device)
        return "this process does not see the peer's GPU"

    def allocate(self, size: int) -> GpuMemory:
        """Allocates at least `size` bytes of this GPU, not initialised, that can be exported."""
        with self.bound():
            size = self._whole(size, self._prop())
            with self._created(size) as handle:
                return GpuMemory(self._map(handle, size), size, handle.value)

    def export(self, memory: GpuMemory) -> int:
        """A file descriptor that gives another process `memory`; the caller closes it."""
        descriptor = ctypes.c_int()
        with self.bound():
            self._call(
                "cuMemExportToShareableHandle",
                ctypes.byref(descriptor),
                ctypes.c_uint64(memory.handle),
                ctypes.c_int(FILE_DESCRIPTOR),
                ctypes.c_uint64(0),
            )
        return descriptor.value

    def map(self, descriptor: int, size: int) -> GpuMemory:
        """Maps another process's memory; its handle is let go at once, since the mapping holds it."""
        handle = ctypes.c_uint64()
        with self.bound():
            self._call(
                "cuMemImportFromShareableHandle",
                ctypes.byref(handle),
                ctypes.c_void_p(descriptor),
                ctypes.c_int(FILE_DESCRIPTOR),
            )
            try:
                return GpuMemory(self._map(handle, size), size)
            finally:
                self._call("cuMemRelease", handle)

    def open_handle(self, handle: bytes) -> int:
        """Opens memory that cudaMalloc allocated in another process."""
        if len(handle) != ctypes.sizeof(_IpcHandle):
            raise DriverError(f"a CUDA IPC handle has {ctypes.sizeof(_IpcHandle)} bytes, not {len(handle)}")
        address, whole = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(handle)
        with self.bound():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                whole,
                ctypes.c_uint(OPEN_WITH_PEERS),
            )
        return address.value

    def extent(self, address: int) -> int:
        """Bytes from `address`, where an allocation begins, to its end."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self.bound():
            place = ctypes.c_uint64(address)
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), place)
        return base.value + size.value - address

    def close_handle(self, address: int) -> None:
        """Lets go of it."""
        with self.bound():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def unmap(self, memory: GpuMemory) -> None:
        """Gives memory back, own or mapped. Nothing may use it any more."""
        with self.bound():
            self._call("cuMemUnmap", ctypes.c_uint64(memory.address), ctypes.c_size_t(memory.size))
            self._call("cuMemAddressFree", ctypes.c_uint64(memory.address), ctypes.c_size_t(memory.size))
            if memory.handle:
                self._call("cuMemRelease", ctypes.c_uint64(memory.handle))

    def empty(self, memory: GpuMemory) -> GpuMemory:
        """Unmaps the bytes and lets them go; the reservation of their addresses stays."""
        with self.bound():
            self._call("cuMemUnmap", ctypes.c_uint64(memory.address), ctypes.c_size_t(memory.size))
            self._call("cuMemRelease", ctypes.c_uint64(memory.handle))
        return GpuMemory(memory.address, memory.size)

    def refill(self, memory: GpuMemory) -> GpuMemory:
        """Maps new bytes at the reserved addresses: graphs that know these stay valid."""
        with self.bound(), self._created(memory.size) as handle:
            self._place(ctypes.c_uint64(memory.address), handle, memory.size)
            return GpuMemory(memory.address, memory.size, handle.value)

    def register(self, address: int, size: int) -> int:
        """Locks memory of the host, and gives the address by which kernels of this GPU use it."""
        here, device_address = ctypes.c_void_p(address), ctypes.c_uint64()
        flags = ctypes.c_uint(IN_ALL_CONTEXTS | FOR_KERNELS)
        with self.bound():
            self._call("cuMemHostRegister_v2", here, ctypes.c_size_t(size), flags)
            try:
                self._call(
                    "cuMemHostGetDevicePointer_v2", ctypes.byref(device_address), here, ctypes.c_uint(0)
                )
            except DriverError:
                self._call("cuMemHostUnregister", here)
                raise
        return device_address.value

    def unregister(self, address: int) -> None:
        """Undoes `register`."""
        with self.bound():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def copy(self, blocks: Sequence[CopyBlock]) -> None:
        """Copies by the copy engines, which leave the GPU's processors to compute."""
        self._copy(self._peers, blocks)

    def copy_host(self, blocks: Sequence[CopyBlock], *, out: bool) -> None:
        """One stream per direction: the link between GPU and host is one."""
        self._copy(self._out if out else self._in, blocks)

    def read(self, address: int, size: int) -> bytes:
        """Bytes of a GPU."""
        target = ctypes.create_string_buffer(size)
        source, length = ctypes.c_uint64(address), ctypes.c_size_t(size)
        with self.bound(), self._launched(self._out) as streams:
            self._call("cuMemcpyDtoHAsync_v2", target, source, length, streams[0])
        return target.raw

    def _copy(self, road: _Road, blocks: Sequence[CopyBlock]) -> None:
        with self.bound(), self._launched(road) as streams:
            whole = [block for block in blocks if block.rows == 1]
            for i, stream in enumerate(streams):
                mine = whole[len(whole) * i // len(streams) : len(whole) * (i + 1) // len(streams)]
                for start in range(0, len(mine), BATCH):
                    self._batch(mine[start : start + BATCH], stream)
            for i, block in enumerate(block for block in blocks if block.rows > 1):
                self._rows(block, streams[i % len(streams)])

    @contextlib.contextmanager
    def _launched(self, road: _Road) -> Iterator[list[ctypes.c_void_p]]:
        """Waits at its end, however that comes, for what the `with` launches on the streams."""
        ends = road.ends.get()
        try:
            with road.launching:
                try:
                    yield road.streams
                finally:  # what was launched before an error writes as well
                    for stream, end in zip(road.streams, ends, strict=True):
                        self._call("cuEventRecord", end, stream)
        finally:
            try:
                for end in ends:
                    self._call("cuEventSynchronize", end)
            finally:
                road.ends.put(ends)

    def _batch(self, blocks: Sequence[CopyBlock], stream: ctypes.c_void_p) -> None:
        count = len(blocks)
        words, sizes = ctypes.c_uint64 * count, ctypes.c_size_t * count
        how = _CopyAttributes(order=IN_STREAM_ORDER, flags=BESIDE_COMPUTE)
        self._call(
            "cuMemcpyBatchAsync_v2",
            words(*(block.target for block in blocks)),
            words(*(block.source for block in blocks)),
            sizes(*(block.width for block in blocks)),
            ctypes.c_size_t(count),
            ctypes.byref(how),
            ctypes.byref(ctypes.c_size_t(0)),  # the attributes are those of copy 0 and all that follow
            ctypes.c_size_t(1),
            stream,
        )

    def _rows(self, block: CopyBlock, stream: ctypes.c_void_p) -> None:
        copy = _Copy2D(
            source_kind=ON_DEVICE,
            source=block.source,
            source_pitch=block.source_pitch,
            target_kind=ON_DEVICE,
            target=block.target,
            target_pitch=block.target_pitch,
            width=block.width,
            rows=block.rows,
        )
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream)

    def _road(self, streams: int) -> _Road:
        ends = [[self._new("cuEventCreate", SLEEP) for _ in range(streams)] for _ in range(COPIES)]
        return _Road([self._new("cuStreamCreate", NON_BLOCKING) for _ in range(streams)], ends)

    def _new(self, call: str, flags: int) -> ctypes.c_void_p:
        """A stream or an event."""
        made = ctypes.c_void_p()
        self._call(call, ctypes.byref(made), ctypes.c_uint(flags))
        return made

    @contextlib.contextmanager
    def _created(self, size: int) -> Iterator[ctypes.c_uint64]:
        """New bytes, whole granules; they are let go if what the `with` does with them fails."""
        handle, prop = ctypes.c_uint64(), self._prop()
        whole, no_flags = ctypes.c_size_t(size), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), whole, ctypes.byref(prop), no_flags)
        try:
            yield handle
        except DriverError:
            self._call("cuMemRelease", handle)
            raise

    def _map(self, handle: ctypes.c_uint64, size: int) -> int:
        address = ctypes.c_uint64()
        length = ctypes.c_size_t(size)
        zero = ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), length, ctypes.c_size_t(0), zero, zero)
        try:
            self._place(address, handle, size)
        except DriverError:
            self._call("cuMemAddressFree", address, length)
            raise
        return address.value

    def _place(self, address: ctypes.c_uint64, handle: ctypes.c_uint64, size: int) -> None:
        """Maps bytes at reserved addresses, for this GPU to read and write."""
        length = ctypes.c_size_t(size)
        self._call("cuMemMap", address, length, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        try:
            access = _AccessDesc(self._location, READ_WRITE)
            self._call("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))
        except DriverError:
            self._cuda.cuMemUnmap(address, length)
            raise

    def _whole(self, size: int, prop: _AllocationProp) -> int:
        """The bytes of the granules that `size` bytes take."""
        granule = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granule),
            ctypes.byref(prop),
            ctypes.c_int(RECOMMENDED),
        )
        return -(-size // granule.value) * granule.value

    def _prop(self) -> _AllocationProp:
        rdma = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(rdma), ctypes.c_int(RDMA_WITH_VMM), self._device)
        flags = _AllocFlags(rdma=int(rdma.value != 0))  # so that network cards can read it too
        return _AllocationProp(PINNED, FILE_DESCRIPTOR, self._location, None, flags)

    def _no_access(self, device: ctypes.c_int) -> str:
        if device.value == self._device.value:
            return ""
        able = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(able), self._device, device)
        return "" if able.value else f"GPUs {self._device.value} and {device.value} have no peer access"

    def _nth(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        return device

    def _uuid(self, device: ctypes.c_int) -> bytes:
        uuid = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", uuid, device)
        return bytes(uuid)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown').decode()} (CUDA error {code})")
