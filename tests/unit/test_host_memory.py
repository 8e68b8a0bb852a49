"""Pages on the host: the bytes that come back are those that left, of all pools, wherever the slots lie."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from eyas.engine.kv import host_memory, pinned
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.host_memory import HostMemory
from eyas.engine.kv.pool import KvPool, PoolShape
from kv_transfer.gpu.driver import DeviceAllocation, GpuMemory
from tests.unit.fake_gpu import FakeDriver

PAGES, SLOTS, PIECE_SLOTS = 24, 10, 4
SHAPES = (
    PoolShape(KvFormat(2, 1, 4), pages=PAGES, page_size=4),
    PoolShape(KvFormat(1, 1, 8), pages=PAGES, page_size=4, dtype=torch.bfloat16),
    PoolShape(KvFormat(1, 2, 8), pages=PAGES, page_size=4, dtype=torch.float8_e4m3fn),  # with scales
)


def until(memory: HostMemory, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
        memory.poll()


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> tuple[KvPool, ...]:
    """Their memory on the host comes in pieces of four slots, the last of two."""
    pools = tuple(KvPool(shape) for shape in SHAPES)
    monkeypatch.setattr(host_memory, "PIECE_BYTES", PIECE_SLOTS * sum(shape.page_bytes for shape in SHAPES))
    for pool in pools:
        pages = whole(pool)
        pages.copy_(torch.randint(127, pages.shape, generator=torch.Generator().manual_seed(1)))
    return pools


def whole(pool: KvPool) -> torch.Tensor:
    """The bytes of its pages."""
    return pool.pages[:PAGES].view(torch.uint8)


@pytest.fixture(params=["torch", "driver"])
def memory(pools: tuple[KvPool, ...], request: pytest.FixtureRequest) -> Iterator[HostMemory]:
    """As beside a CPU's pools, and as beside a GPU's."""
    if request.param == "driver":
        first = pools[0]
        first._allocation = DeviceAllocation(FakeDriver(), GpuMemory(first.pages.data_ptr(), 0))
    memory = HostMemory(pools, SLOTS)
    until(memory, lambda: memory.ready == SLOTS)
    yield memory
    assert memory.close(time.monotonic() + 5.0)
    pools[0]._allocation = None


def test_what_comes_back_is_what_left(pools: tuple[KvPool, ...], memory: HostMemory) -> None:
    rng = random.Random(2)
    truth = [whole(pool).clone() for pool in pools]
    for _ in range(20):
        count = rng.randrange(1, SLOTS + 1)
        first, slot = rng.randrange(PAGES - count + 1), rng.randrange(SLOTS - count + 1)
        in_a_row = list(range(first, first + count)), list(range(slot, slot + count))
        scattered = rng.sample(range(PAGES), count), rng.sample(range(SLOTS), count)
        pages, slots = rng.choice([in_a_row, scattered])
        errors: list[object] = []
        memory.copy_out(pages, slots, errors.append)
        until(memory, lambda errors=errors: len(errors) == 1)
        back = rng.sample(range(PAGES), count)
        memory.copy_in(slots, back, errors.append)
        until(memory, lambda errors=errors: len(errors) == 2)
        assert errors == [None, None] and not memory.copying
        for pool, content in zip(pools, truth, strict=True):
            content[back] = content[pages]
            assert torch.equal(whole(pool), content)
    assert memory.bytes_out == memory.bytes_in > 0 and memory.copy_s > 0


def test_memory_that_is_refused_is_none_and_no_failure(
    pools: tuple[KvPool, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tier serves with the pieces that it got."""
    pieces, real = iter(range(2 * len(SHAPES))), pinned.mmap.mmap

    def mmap(_: int, size: int) -> object:
        if next(pieces, None) is None:
            raise OSError("no memory")
        return real(-1, size)

    monkeypatch.setattr(pinned.mmap, "mmap", mmap)
    memory = HostMemory(pools, SLOTS)
    until(memory, lambda: "gets no more" in caplog.text)
    assert memory.ready == 2 * PIECE_SLOTS
    assert memory.close(time.monotonic() + 5.0)
