"""The pools of an engine's further ranks, mapped into the process of rank 0, which copies for all of them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.common.wire.pool import PoolGeometry
from kv_transfer.area import DeviceArea
from kv_transfer.gpu.driver import DeviceAllocation, DriverError, GpuDriver
from kv_transfer.gpu.handover import take

FOLLOWER_S = 60.0  # a follower that loads kernels may answer so late


@dataclass(frozen=True)
class FollowerPool:
    """One follower's pool, `mapped`. `checksum`: CRC-32 of its proof page."""

    area: DeviceArea
    mapped: DeviceAllocation
    checksum: int

    @classmethod
    def at(cls, giver: Path, geometry: PoolGeometry, gpu: Callable[[], GpuDriver]) -> FollowerPool:
        """`gpu` makes the driver of the follower's GPU.

        Raises ConfigError if the follower's memory cannot be mapped there; TransferFailed if the follower
        does not hand it over.
        """
        taken = take(str(giver), FOLLOWER_S)
        taken.giver.close()  # it lives as long as we do
        try:
            driver = gpu()
            mapped = DeviceAllocation(driver, driver.map(taken.descriptor, taken.size))
            proof = driver.read(mapped.memory.address + geometry.pool_bytes, geometry.page_bytes)
        except DriverError as error:
            raise ConfigError(f"a rank's KV pool cannot be mapped: {error}") from None
        finally:
            os.close(taken.descriptor)
        area = DeviceArea(mapped.memory.address, geometry, mapped, str(giver))
        return cls(area, mapped, zlib.crc32(proof))

    def close(self) -> None:
        """Unmaps it."""
        self.mapped.free()
