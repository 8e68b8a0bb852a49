"""Rank 0 maps the pools of an engine's further ranks, or says why it cannot."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from eyas.common.errors import ConfigError, TransferFailed
from eyas.engine.kv.rank_pools import FollowerPool
from kv_transfer.gpu.driver import DriverError
from tests.unit.closed_after import closed_after
from tests.unit.fake_gpu import GEOMETRY, FakeDriver, FakePool

COUNT, PAGE = GEOMETRY.pages, GEOMETRY.page_bytes

closing = closed_after(FakePool, FakePool.close)


def contents() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (COUNT + 1, PAGE), np.uint8)


def test_rank_0_finds_the_pools_of_its_followers(tmp_path: Path) -> None:
    follower, driver = FakePool(str(tmp_path)), FakeDriver()
    follower.fill(contents())
    found = FollowerPool.at(Path(follower.areas[0].giver), GEOMETRY, lambda: driver)
    assert found.checksum == zlib.crc32(contents()[COUNT].tobytes())
    assert driver.read(found.area.address + 3 * PAGE, PAGE) == contents()[3].tobytes()
    found.close()
    assert driver.mappings == 0
    follower.giver.close()
    with pytest.raises(TransferFailed, match="gives no memory"):
        FollowerPool.at(Path(follower.areas[0].giver), GEOMETRY, lambda: driver)


def test_a_follower_s_gpu_without_a_driver_is_told(tmp_path: Path) -> None:
    def none() -> FakeDriver:
        raise DriverError("cuDevicePrimaryCtxRetain: out of memory (CUDA error 2)")

    giver = Path(FakePool(str(tmp_path)).areas[0].giver)
    with pytest.raises(ConfigError, match=r"a rank's KV pool cannot be mapped: .* out of memory"):
        FollowerPool.at(giver, GEOMETRY, none)
