"""The paged pool: layout, moves, files in shared memory."""

from __future__ import annotations

import mmap
import zlib
from pathlib import Path

import pytest
import torch

from eyas.common.errors import ConfigError
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from kv_transfer.host_files import new_path

SHAPE = PoolShape(KvFormat(layers=3, kv_heads=2, head_dim=8), pages=4, page_size=4)


def filled() -> KvPool:
    pool = KvPool(SHAPE)
    pool.tensor.copy_(torch.arange(pool.tensor.numel()).view(SHAPE.sizes))
    return pool


def row(pool: KvPool, index: int) -> torch.Tensor:
    return pool.tensor[index // 4, :, :, index % 4].clone()


def test_written_rows_land_in_their_page_layer_and_slot() -> None:
    pool = KvPool(SHAPE)
    k, v = torch.randn(2, 3, 2, 8)
    pool.write(1, pool.slots(torch.tensor([0, 7])), k, v)  # the third row is padding
    assert torch.equal(pool.layer(1)[0, 0, 0], k[0]) and torch.equal(pool.layer(1)[0, 1, 0], v[0])
    assert torch.equal(pool.layer(1)[1, 0, 3], k[1]) and torch.equal(pool.layer(1)[1, 1, 3], v[1])
    assert pool.tensor.count_nonzero() == 4 * 16


def test_a_move_reads_every_source_before_it_writes() -> None:
    pool = filled()
    before = [row(pool, i) for i in range(16)]
    pool.move(torch.tensor([6, 7, 9]), torch.tensor([5, 6, 7]))
    after = [row(pool, i) for i in range(16)]
    expected = before[:5] + [before[6], before[7], before[9]] + before[8:]
    assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True))


def test_a_copied_page_equals_its_source() -> None:
    pool = filled()
    pool.copy_page(1, 3)
    assert torch.equal(pool.tensor[3], pool.tensor[1])
    assert not torch.equal(pool.tensor[2], pool.tensor[1])


def test_another_mapping_of_the_file_sees_whole_pages(tmp_path: Path) -> None:
    path = new_path("target", tmp_path)
    pool = KvPool(SHAPE, path)
    pool.tensor[2].fill_(3.5)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as seen:
        assert len(seen) == SHAPE.nbytes + SHAPE.page_bytes  # the proof page
        page = seen[2 * SHAPE.page_bytes : 3 * SHAPE.page_bytes]
        assert page == torch.full((SHAPE.page_bytes // 4,), 3.5).numpy().tobytes()
        assert not any(seen[: SHAPE.page_bytes])
    pool.close()
    pool.close()
    assert not path.exists()


@pytest.mark.parametrize("in_a_file", [True, False])
def test_a_proof_page_lies_behind_the_last_page(tmp_path: Path, in_a_file: bool) -> None:
    """In every pool other bytes, of which the checksum is known; and no row is one of its."""
    pools = [KvPool(SHAPE, tmp_path / str(i) if in_a_file else None) for i in range(2)]
    proofs = [pool.pages[4].view(torch.uint8).numpy().tobytes() for pool in pools]
    assert [zlib.crc32(proof) for proof in proofs] == [pool.checksum for pool in pools]
    assert proofs[0] != proofs[1] and len(proofs[0]) == SHAPE.page_bytes
    for pool in pools:
        assert pool.tensor.shape == SHAPE.sizes and not pool.tensor.any()
        pool.tensor.fill_(1.0)
        assert pool.tensor.data_ptr() == pool.pages.data_ptr()
    assert [pool.pages[4].view(torch.uint8).numpy().tobytes() for pool in pools] == proofs
    area = pools[0].device_area()
    assert (area.address, area.geometry) == (pools[0].pages.data_ptr(), SHAPE.geometry)
    for pool in pools:
        pool.close()


def test_a_pool_that_does_not_fit_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    huge = PoolShape(KvFormat(3, 2, 64), pages=1 << 40, page_size=16)
    with pytest.raises(ConfigError, match="cannot hold .* GiB of KV pages"):
        KvPool(huge, tmp_path / "pool")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="nowhere cannot hold KV pages: No such file or directory"):
        KvPool(SHAPE, tmp_path / "nowhere" / "pool")
