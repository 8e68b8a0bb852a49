"""Pools and weights that leave their memory: addresses stay, and what comes back is what it must be."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from eyas.common.errors import ConfigError
from eyas.common.machine.memory import discard
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.loading import device_build
from eyas.engine.loading.weight_memory import WeightBlocks
from kv_transfer.gpu.driver import DeviceAllocation, DriverError, GpuMemory
from kv_transfer.gpu.handover import DescriptorGiver, take
from tests.unit.fake_gpu import FakeDriver

FOLDER = Path("/dev/shm")
SHAPE = PoolShape(KvFormat(2, 2, 16), pages=64, page_size=16, dtype=torch.float32)


@pytest.fixture(params=["file", "plain"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> KvPool:
    path = FOLDER / f"eyas-test-sleep-{tmp_path.name}" if request.param == "file" else None
    pool = KvPool(SHAPE, path)
    request.addfinalizer(pool.close)
    return pool


def test_a_pool_leaves_its_memory_and_is_new_when_it_comes_back(pool: KvPool) -> None:
    pool.pages[:-1].fill_(7.0)
    proof, address = pool.pages[-1].clone(), pool.pages.data_ptr()
    left = pool.release()
    assert SHAPE.nbytes - 8192 <= left <= SHAPE.nbytes
    assert pool.restore() == SHAPE.nbytes
    assert pool.pages.data_ptr() == address
    assert not pool.pages[:-1].any()
    assert torch.equal(pool.pages[-1].view(torch.int32), proof.view(torch.int32))


def test_a_file_of_pages_takes_no_blocks_while_it_sleeps(tmp_path: Path) -> None:
    path = FOLDER / f"eyas-test-sleep-blocks-{tmp_path.name}"
    pool = KvPool(SHAPE, path)
    try:
        awake = path.stat().st_blocks
        pool.release()
        assert path.stat().st_blocks * 512 <= SHAPE.page_bytes + 8192  # the proof page stays
        pool.restore()
        assert path.stat().st_blocks == awake
    finally:
        pool.close()


def test_plain_memory_that_is_discarded_leaves_the_process() -> None:
    memory = torch.ones(2**26, dtype=torch.uint8)
    before = psutil.Process().memory_info().rss
    left = discard(memory.data_ptr(), memory.nbytes, shared=False)
    assert left > memory.nbytes - 8192
    assert before - psutil.Process().memory_info().rss > memory.nbytes // 2
    assert memory[4096:-4096].sum() == 0


class FullGpu(FakeDriver):
    """Has room for `refills` blocks once they have left."""

    def __init__(self, refills: int) -> None:
        super().__init__()
        self.left = refills

    def refill(self, memory: GpuMemory) -> GpuMemory:
        self.left -= 1
        if self.left < 0:
            raise DriverError("out of memory")
        return super().refill(memory)


def blocks_of(driver: FakeDriver) -> tuple[WeightBlocks, list[int]]:
    blocks = WeightBlocks(driver, torch.device("cpu"))
    addresses = [blocks.take(4096 * size) for size in (1, 3, 2)]
    for i, address in enumerate(addresses):
        assert address is not None
        ctypes.memset(address, i + 1, 4096)
    return blocks, [address for address in addresses if address]


def test_weights_come_back_to_their_addresses() -> None:
    blocks, addresses = blocks_of(FakeDriver())
    for _ in range(2):
        assert blocks.release() == 6 * 4096 == blocks.restore()
        assert [ctypes.string_at(each, 4096) for each in addresses] == [bytes([i]) * 4096 for i in (1, 2, 3)]


def test_no_copy_reaches_from_one_locked_piece_into_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses one that does."""
    monkeypatch.setattr("eyas.engine.loading.weight_memory.PIECE_BYTES", 2 * 4096)
    blocks, addresses = blocks_of(FakeDriver())
    blocks.release()
    assert blocks._host is not None
    starts = [copy.target - blocks._host.data_ptr() for copy in blocks._copies(out=True)]
    assert starts == [0, 4096, 8192, 16384]
    blocks.restore()
    assert [ctypes.string_at(each, 4096) for each in addresses] == [bytes([i]) * 4096 for i in (1, 2, 3)]


def test_weights_without_room_stay_on_the_host_and_come_back_later() -> None:
    driver = FullGpu(refills=2)
    blocks, addresses = blocks_of(driver)
    blocks.release()
    with pytest.raises(ConfigError, match="no room for"):
        blocks.restore()
    driver.left = 3
    blocks.restore()
    assert ctypes.string_at(addresses[2], 4096) == b"\3" * 4096


def test_a_block_that_is_freed_is_not_moved() -> None:
    blocks, addresses = blocks_of(FakeDriver())
    blocks.give(addresses[1])
    assert blocks.size == 3 * 4096 == blocks.release()


@pytest.mark.parametrize(("device", "number"), [("cuda", 0), ("cuda:3", 3)])
def test_weights_that_sleep_are_on_a_gpu_that_is_named_by_number(
    monkeypatch: pytest.MonkeyPatch, device: str, number: int
) -> None:
    """Torch's pool takes no other."""
    monkeypatch.setattr(device_build, "CudaDriver", lambda number: number)
    monkeypatch.setattr(device_build, "WeightMemory", lambda *made: made)
    loaded = SimpleNamespace(config=SimpleNamespace(memory_saver=True, device=device))
    assert device_build._weight_memory(loaded) == (number, torch.device("cuda", number))
    loaded.config.memory_saver = False
    assert device_build._weight_memory(loaded) is None


def test_a_gpu_s_pool_that_a_peer_has_mapped_stays(tmp_path: Path) -> None:
    driver = FakeDriver()
    memory = DeviceAllocation.new(driver, 8192)
    giver = DescriptorGiver(tmp_path / "giver", memory.memory.size, memory.export)
    pool = KvPool(SHAPE)
    pool.attached.append(giver)
    pool.release()
    pool.restore()
    taken = take(str(tmp_path / "giver"))
    with pytest.raises(ConfigError, match="other workers have its KV pages mapped"):
        pool.release()
    taken.giver.close()
    pool.release()
    os.close(taken.descriptor)
    pool.close()
