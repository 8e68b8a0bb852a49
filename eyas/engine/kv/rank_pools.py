"""The pools of an engine's further ranks, mapped into the process of rank 0, which copies for all of them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.common.errors import ConfigError
from eyas.common.wire.pool import PoolGeometry
from eyas.engine.kv.pool import PoolShape, bytes_of
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

    def pages(self, shape: PoolShape, device: str) -> torch.Tensor:
        """[pages + 1, elements of a page]: the pool, which is of that GPU, and its proof page."""
        size = (shape.all_pages + 1) * shape.page_bytes
        return bytes_of(self.mapped.memory, device)[:size].view(shape.dtype).view(shape.all_pages + 1, -1)

    def close(self) -> None:
        """Unmaps it."""
        self.mapped.free()
