"""The way of a tensor through pinned buffers, with a stand-in for the GPU: pieces land where they belong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from eyas.engine.checkpoint import staging
from eyas.engine.checkpoint.staging import WeightStaging, rows_per_piece

PIECE = 1024  # bytes


class SlowFetch:
    """An event that must be awaited before a buffer is written again."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        time.sleep(0.001)

    def record(self, stream: object) -> None:
        pass


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> WeightStaging:
    monkeypatch.setattr(staging, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(staging, "_PinnedBuffer", _unpinned)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    return WeightStaging("cpu")


def _unpinned() -> SimpleNamespace:
    return SimpleNamespace(memory=torch.empty(PIECE, dtype=torch.uint8), fetched=SlowFetch())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize(
    "view",
    [
        lambda whole: whole,
        lambda whole: whole[7:50],
        lambda whole: whole[:, 16:48],
        lambda whole: whole[0],
        lambda whole: whole.view(4, 25, 64),
        lambda whole: whole.view(1, -1),
        lambda whole: whole[0, 0],
    ],
    ids=["whole", "rows", "columns", "vector", "deep", "one long row", "scalar"],
)
def test_what_arrives_is_what_was_sent(
    way: WeightStaging, dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    source = view(torch.randint(0, 100, (100, 64), generator=torch.Generator().manual_seed(1)).to(dtype))
    arrived = way.upload(source)
    assert arrived.is_contiguous() and torch.equal(arrived, source)
    assert arrived.data_ptr() != source.data_ptr()
    way.close()


def test_a_piece_fits_its_buffer() -> None:
    for shape in [(128256, 4096), (10, 3), (1, 128256)]:
        rows = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        height = rows_per_piece(rows)
        assert height * shape[1] * 2 <= staging.PIECE_BYTES
        assert (height + 1) * shape[1] * 2 > staging.PIECE_BYTES or height >= shape[0]
