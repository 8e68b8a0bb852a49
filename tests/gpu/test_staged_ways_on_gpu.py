"""Ways out of pinned slots into a GPU's pool, and what the driver says of the pool to those who read it."""

from __future__ import annotations

import itertools
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from kv_transfer import windows
from kv_transfer.gpu.cuda import CudaDriver
from kv_transfer.gpu.driver import DeviceAllocation
from tests.unit.fake_gpu import GEOMETRY
from tests.unit.shm_ends import COUNT, PAGE, Owner, Puller

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_gpu_takes_pages_out_of_its_peers_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy, of as many windows as there are, right to the byte, proof and all."""
    monkeypatch.setattr(windows, "AT_ONCE", 3)  # the owner's slots hold no more
    owner = Owner(np.random.default_rng(3).integers(0, 256, (COUNT + 1, PAGE), np.uint8))
    try:
        puller = Puller(owner, CudaDriver(0), itertools.count())
        source, rng = puller.open(), np.random.default_rng(1)
        assert source.is_staging and source.direct
        for count in (1, 5, 30, COUNT):
            src, dst = rng.permutation(COUNT)[:count], rng.permutation(COUNT)[:count]
            result = puller.copy(source, tuple(src.tolist()), tuple(dst.tolist()))
            assert (result.error, result.bytes) == (None, count * PAGE)
            np.testing.assert_array_equal(puller.pages()[dst], owner.pool[src])
        assert puller.copy(source, (COUNT,), (7,), zlib.crc32(owner.pool[COUNT].tobytes())).ok
        assert puller.backend.close(time.monotonic() + 5.0)
    finally:
        Path(owner.area.path).unlink()


def test_the_driver_knows_where_the_gpu_is_and_that_cards_may_read_its_pools() -> None:
    driver = CudaDriver(0)
    assert (Path("/sys/bus/pci/devices") / driver.pci_address / "vendor").read_text().strip() == "0x10de"
    pool = DeviceAllocation.new(driver, GEOMETRY.pool_bytes)
    assert driver.rdma_capable(pool.memory.address), "the flag of the allocation is a wish"
    pool.free()
