"""Pages of latents between engines of unequal numbers of ranks, as `tests.unit.test_cuda_ipc` has heads."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as replace_geometry

from eyas.common.types import RankPages
from kv_transfer.backends.base import CopyJob
from tests.unit.fake_gpu import COUNT, GEOMETRY, FakeDriver, FakePool, copied, opened


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (2, 2), (4, 2), (2, 8)])
def test_latents_come_from_one_rank_since_all_have_them(tmp_path: Path, theirs: int, ours: int) -> None:
    """Every rank of ours gets everything once; a peer's rank that gives nothing proves nothing wrong."""
    geometry = replace_geometry(GEOMETRY, fields=1, kv_heads=1)
    whole = np.random.default_rng(5).integers(0, 256, (COUNT + 1, geometry.page_bytes), np.uint8)

    def pool(ranks: int) -> FakePool:
        return FakePool(str(tmp_path), *(FakeDriver() for _ in range(ranks)), geometry=geometry)

    owner_, puller, moved = pool(theirs), pool(ours), 0
    for rank in range(theirs):
        owner_.fill(whole, rank)
    for rank in range(theirs):
        source, truth = opened(puller, owner_.backend.export(rank) or {}), zlib.crc32(whole[COUNT].tobytes())
        proof = CopyJob(1, -1 - rank, RankPages(rank, (COUNT,)), (0,), proof=truth)
        assert copied(puller, source, proof).ok and puller.backend.checksum(proof) == truth
        result = copied(puller, source, CopyJob(1, rank, RankPages(rank, (3, 1, 2)), (5, 6, 9)))
        assert result.ok
        moved += result.bytes
    assert moved == 3 * ours * geometry.page_bytes
    assert all((puller.pages(rank)[[5, 6, 9]] == whole[[3, 1, 2]]).all() for rank in range(ours))
