"""Workers of several ranks on a CPU: kernels interpreted, and every rank's pool a file that rank 0 maps.

A rank above 0 is a process of its own, as on GPUs; so its pool is another process's memory. Workers whose
pools lie in different folders see nothing of each other's memory, as on two hosts.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from eyas.common.config import EngineConfig
from eyas.common.types import KvKind
from eyas.engine.kv.pool import KvPool
from eyas.engine.loading import follower, travel
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.parallel.ranks import RankChannel, RankInfo
from kv_transfer.area import DeviceArea

MEMORY = {"attention_backend": "triton", "prefill_attention_backend": "triton", "overlap_schedule": True}
"""Of an engine on the device path."""


def pool_of_rank(spec: EngineSpec, group: KvKind) -> KvPool:
    """As a device's: rank 0's in no file; another one's where rank 0 finds it."""
    return KvPool(spec.shape(group), spec.giver(group, spec.rank) if spec.rank else None)


def mapped(spec: EngineSpec, group: KvKind, pool: KvPool) -> list[travel.OtherRank]:
    """The pools of the other ranks, which have made them."""
    others = []
    for rank in range(1, spec.config.tensor_parallel_size):
        theirs = KvPool(pool.shape, spec.giver(group, rank), theirs=True)
        pool.attached.append(theirs)
        proof = zlib.crc32(theirs.pages[-1].view(-1).numpy().view("u1"))
        area = DeviceArea(theirs.pages.data_ptr(), pool.shape.geometry)
        others.append(travel.OtherRank(area, theirs.pages, proof))
    return others


def follow(loaded: EngineSpec, rank_info: RankInfo, channel: RankChannel) -> None:
    """A follower as `install` has rank 0."""
    from tests.unit import interpreted

    interpreted.install()
    EngineSpec.pool = pool_of_rank  # type: ignore[method-assign]
    follower_main(loaded, rank_info, channel)


follower_main = follower.main


def install(patch: pytest.MonkeyPatch) -> None:
    """Engines that are built from now on have such ranks."""
    patch.setattr(EngineSpec, "pool", pool_of_rank)
    patch.setattr(travel, "other_ranks", mapped)
    patch.setattr(follower, "main", follow)


def of_ranks(config: EngineConfig, ranks: int, folder: str) -> EngineConfig:
    """A worker on a host of its own."""
    return dataclasses.replace(config, **MEMORY, tensor_parallel_size=ranks, pool_dir=folder)


def no_group_stays() -> Iterator[None]:
    """The body of a fixture: a group that has lost a rank is given up after the test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
