"""Weights on their way to a GPU: what arrives is what was stored, and how fast it comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.engine.checkpoint.weights import DummyWeights, FolderWeights, WeightPlacement
from eyas.engine.loading.memory import DeviceMemory
from tests.unit.tiny import write_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

LARGE = (28672, 4096)  # 224 MiB of bf16, many pieces
MATRICES = 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_tensor_arrives(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_tiny_llama(tmp_path, layers=2)
    stored = load_file(folder / "model.safetensors")
    with FolderWeights(folder, placement=WeightPlacement("cuda", dtype)) as weights:
        for name, tensor in stored.items():
            taken = weights.take(name, tuple(tensor.shape))
            assert taken.is_cuda and torch.equal(taken.cpu(), tensor.to(dtype)), name


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `MATRICES` large matrices, in the page cache."""
    folder = tmp_path_factory.mktemp("large")
    noise = torch.randn(LARGE, generator=torch.Generator().manual_seed(1)).bfloat16()
    save_file({f"m{i}": noise + i for i in range(MATRICES)}, folder / "model.safetensors")
    return folder


def test_shares_of_large_tensors_arrive(large: Path) -> None:
    stored = load_file(large / "model.safetensors")["m3"]
    with FolderWeights(large, placement=WeightPlacement("cuda", torch.bfloat16, rank=1, ranks=4)) as weights:
        rows, columns = weights.take_rows("m3", LARGE), weights.take_columns("m3", LARGE)
        assert torch.equal(weights.take("m3", LARGE).cpu(), stored)
    assert torch.equal(rows.cpu(), stored[7168:14336])
    assert columns.is_contiguous() and torch.equal(columns.cpu(), stored[:, 1024:2048])


def test_seconds_for_16_gb(large: Path) -> None:
    """Told, and judged generously: 16 GB from the page cache within 10 s, dummies within 2 s."""
    placement = WeightPlacement("cuda", torch.bfloat16)
    with FolderWeights(large, placement=placement) as weights:
        stored = _seconds_for_16_gb(lambda i: weights.take(f"m{i}", LARGE))
    dummies = DummyWeights(placement=placement)
    dummy = _seconds_for_16_gb(lambda i: dummies.take(f"m{i}", LARGE))
    print(f"\n16 GB: {stored:.1f} s from the page cache, {dummy:.2f} s of noise")
    assert stored < 10.0 and dummy < 2.0


def _seconds_for_16_gb(take: Callable[[int], torch.Tensor]) -> float:
    take(0)  # buffers, the generator's kernel
    torch.cuda.synchronize()
    began = time.monotonic()
    taken = sum(take(i).nbytes for i in range(MATRICES))
    torch.cuda.synchronize()
    return (time.monotonic() - began) * 16e9 / taken


def test_what_a_device_says_of_itself() -> None:
    before = DeviceMemory.measure("cuda")
    block = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    after = DeviceMemory.measure("cuda")
    assert after.total == before.total
    assert after.allocated - before.allocated == before.free - after.free == block.nbytes
