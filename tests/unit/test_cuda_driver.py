"""The calls of the CUDA driver, made to a library of ours that keeps each thread's contexts as CUDA does.

What the calls do on a GPU is tried where there is one: tests/gpu/test_cuda_ipc_on_gpu.py.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from kv_transfer.gpu import cuda
from kv_transfer.gpu.cuda import BATCH, COPIES, STREAMS, CudaDriver
from kv_transfer.gpu.driver import CopyBlock, DriverError, GpuMemory

TORCH = 77  # the context that was there before
OURS = 42
ANYWHERE = ("cuInit", "cuDevice", "cuCtx", "cuMemGetAllocationGranularity", "cuGetErrorString")
LAUNCHES = {"cuMemcpyBatchAsync_v2", "cuMemcpy2DAsync_v2", "cuMemcpyDtoHAsync_v2"}


class FakeCuda:
    """`libcuda`. `contexts`: of the one thread, the current one last. `fails`: how many good launches come
    before the one that fails.
    """

    def __init__(self) -> None:
        self.contexts = [TORCH]
        self.called: list[str] = []
        self.fails: int | None = None
        self.seen = 1 << 40  # where kernels see memory of the host; 0: they do not

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.called.append(name)
            if not name.startswith(ANYWHERE):
                assert self.contexts[-1] == OURS, f"{name} goes to another GPU"
            return self._do(name, arguments)

        return call

    def _do(self, name: str, arguments: tuple) -> int:
        if name == "cuDevicePrimaryCtxRetain":
            _at(arguments[0], ctypes.c_void_p).value = OURS
        elif name == "cuCtxPushCurrent_v2":
            self.contexts.append(arguments[0].value)
        elif name == "cuCtxPopCurrent_v2":
            self.contexts.pop()
        elif name == "cuCtxSetCurrent":
            self.contexts[-1] = arguments[0].value
        elif name == "cuMemGetAllocationGranularity":
            _at(arguments[0], ctypes.c_size_t).value = 2 << 20
        elif name == "cuMemHostGetDevicePointer_v2":
            _at(arguments[0], ctypes.c_uint64).value = self.seen
            return 0 if self.seen else 1
        elif name in LAUNCHES and self.fails is not None:
            self.fails -= 1
            return 1 if self.fails < 0 else 0
        return 0


def _at(reference: object, kind: type) -> ctypes.c_void_p:
    return ctypes.cast(reference, ctypes.POINTER(kind)).contents  # type: ignore[arg-type]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: fake)
    return fake


BLOCKS = [CopyBlock(1, 2, 3)] * (STREAMS * BATCH + 1) + [
    CopyBlock(1, 2, 3, rows=4, source_pitch=3, target_pitch=6)
]


@pytest.mark.parametrize(
    "use",
    [
        lambda driver: driver.obstacle(b"gpu"),
        lambda driver: driver.allocate(5),
        lambda driver: driver.export(GpuMemory(1, 2, 3)),
        lambda driver: driver.map(1, 2),
        lambda driver: driver.unmap(GpuMemory(1, 2, 3)),
        lambda driver: driver.copy(BLOCKS),
        lambda driver: driver.copy_host(BLOCKS[:3], out=True),
        lambda driver: driver.read(1, 2),
        lambda driver: driver.register(4096, 8192),
        lambda driver: driver.unregister(4096),
        lambda driver: driver.open_handle(bytes(64)),
        lambda driver: driver.close_handle(4096),
    ],
)
def test_a_thread_stays_on_the_gpu_that_it_was_on(library: FakeCuda, use: Callable) -> None:
    """Rank 0 calls the drivers of all ranks' GPUs from the thread that launches its own kernels."""
    driver = CudaDriver(1)
    assert library.contexts == [TORCH]
    use(driver)
    assert library.contexts == [TORCH]


def test_a_handle_is_passed_on_whole(library: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are bytes of it as any other."""
    passed: list[bytes] = []

    def do(name: str, arguments: tuple) -> int:
        if name == "cuIpcOpenMemHandle_v2":
            passed.append(bytes(arguments[1]))
        return FakeCuda._do(library, name, arguments)

    monkeypatch.setattr(library, "_do", do)
    handle = bytes([7, 0, 9, *range(61)])
    CudaDriver(0).open_handle(handle)
    assert passed == [handle]
    with pytest.raises(DriverError, match="64 bytes"):
        CudaDriver(0).open_handle(handle[:5])


def test_memory_is_of_whole_granules(library: FakeCuda) -> None:
    assert CudaDriver(0).allocate((2 << 20) + 1).size == 4 << 20


@pytest.mark.parametrize("good", [0, 1, STREAMS])
def test_a_copy_that_fails_half_way_has_stopped_too(library: FakeCuda, good: int) -> None:
    """Its pages are free once the error is told, so what was launched before must be over by then."""
    driver = CudaDriver(0)
    library.fails = good
    with pytest.raises(DriverError, match="cuMemcpy"):
        driver.copy(BLOCKS)
    last = max(i for i, name in enumerate(library.called) if name in LAUNCHES)
    assert library.called[last:].count("cuEventSynchronize") == STREAMS
    assert library.contexts == [TORCH]


def test_copies_of_the_host_are_launched_behind_each_other_and_waited_for_side_by_side(
    library: FakeCuda,
) -> None:
    """So two threads' copies do not share the GPU's link, and it never idles between them."""
    driver, order, go = CudaDriver(0), [], threading.Event()
    library.contexts = [TORCH, OURS]  # of both threads

    def called(name: str, arguments: tuple) -> int:
        if name in LAUNCHES or name.startswith("cuEvent"):
            order.append(name)
        if name == "cuEventSynchronize":
            assert go.wait(10.0)
        return 0

    library._do = called  # type: ignore[method-assign]
    copy = partial(driver.copy_host, BLOCKS[:3], out=True)
    threads = [threading.Thread(target=copy) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 5.0
    while len(order) < 6 and time.monotonic() < deadline:
        time.sleep(0.001)
    waiting = order.count("cuEventSynchronize")
    go.set()
    for thread in threads:
        thread.join()
    assert waiting == 2, "one was launched only when the other had ended"
    launched = [name for name in order if name != "cuEventSynchronize"]
    assert launched == ["cuMemcpyBatchAsync_v2", "cuEventRecord"] * 2


def test_copies_of_a_gpu_that_has_failed_fail_and_wait_for_nothing(library: FakeCuda) -> None:
    driver, failed = CudaDriver(0), []

    def copy() -> None:
        for _ in range(COPIES + 1):
            with pytest.raises(DriverError, match="cuEventSynchronize"):
                driver.copy_host(BLOCKS[:3], out=True)
            failed.append(True)

    library._do = lambda name, arguments: int(name == "cuEventSynchronize")  # type: ignore[method-assign]
    library.contexts = [OURS]
    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    thread.join(10.0)
    assert len(failed) == COPIES + 1


def test_memory_of_the_host_has_the_address_by_which_kernels_see_it(library: FakeCuda) -> None:
    assert CudaDriver(0).register(4096, 8192) == 1 << 40
    assert library.called.count("cuMemHostRegister_v2") == 1 and "cuMemHostUnregister" not in library.called


def test_memory_of_the_host_that_no_kernel_sees_is_locked_no_more(library: FakeCuda) -> None:
    library.seen = 0
    with pytest.raises(DriverError, match="cuMemHostGetDevicePointer"):
        CudaDriver(0).register(4096, 8192)
    assert library.called.count("cuMemHostUnregister") == 1 and library.contexts == [TORCH]
