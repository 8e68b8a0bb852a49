"""Tensors that a folder stores as one are read as those that models ask for, by any rank and in FP8 too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.fp8 import widened
from eyas.engine.checkpoint.fused_tensors import FusedTensor
from eyas.engine.checkpoint.quantized import Fp8Config
from eyas.engine.checkpoint.transposed_tensors import GroupsTensor
from eyas.engine.checkpoint.weights import CPU, FolderWeights, WeightPlacement

GROUPS = GroupsTensor("both", 2, (("one", 128), ("two", 256)))
FUSED = (FusedTensor("qkv_proj", (("q_proj", 256), ("k_proj", 128), ("v_proj", 128))),)


def reading(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    placement: WeightPlacement = CPU,
    fp8: Fp8Config | None = None,
) -> FolderWeights:
    save_file(tensors, folder / "model.safetensors")
    return FolderWeights(folder, placement=placement, quantized=fp8, fused=FUSED)


def test_parts_are_rows_of_the_whole(tmp_path: Path) -> None:
    whole, bias = torch.randn(512, 32), torch.randn(512)
    with reading(tmp_path, {"a.qkv_proj.weight": whole, "a.qkv_proj.bias": bias}) as weights:
        assert torch.equal(weights.take("a.q_proj.weight", (256, 32)), whole[:256])
        assert torch.equal(weights.take("a.v_proj.bias", (128,)), bias[384:])
        assert weights.left(("a.",)) == [
            "a.k_proj.bias",
            "a.k_proj.weight",
            "a.q_proj.bias",
            "a.v_proj.weight",
        ]
        assert "a.qkv_proj.weight" not in weights


def test_a_rank_has_its_rows_of_each_part(tmp_path: Path) -> None:
    whole = torch.randn(512, 32)
    with reading(tmp_path, {"a.qkv_proj.weight": whole}, WeightPlacement(rank=1, ranks=2)) as weights:
        names = [f"a.{part}_proj.weight" for part in "qkv"]
        stacked = weights.stack_rows(names, [256, 128, 128], 32)
        assert torch.equal(stacked, torch.cat((whole[128:256], whole[320:384], whole[448:])))
        assert torch.equal(weights.take_columns(names[1], (128, 32)), whole[256:384, 16:])


@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_scales_go_with_their_rows(tmp_path: Path, kind: str) -> None:
    stored = torch.randn(512, 256).to(torch.float8_e4m3fn)
    scales = torch.rand({"block": (4, 2), "channel": (512, 1), "tensor": (1,)}[kind]) + 0.5
    told = Fp8Config(kind, rows="block" if kind == "block" else "token")  # type: ignore[arg-type]
    tensors = {"a.qkv_proj.weight": stored, "a.qkv_proj.weight_scale": scales}
    with reading(tmp_path, tensors, fp8=told) as weights:
        numbers, own = weights.take_stored("a.k_proj.weight", (128, 256), None)
        each = {
            "block": scales[2:3],
            "channel": scales.flatten()[256:384],
            "tensor": scales.flatten()[:1].expand(128),
        }
        assert torch.equal(own, each[kind])
        assert torch.equal(numbers.view(torch.uint8), stored[256:384].view(torch.uint8))
        assert torch.equal(weights.take("a.k_proj.weight", (128, 256)), widened(numbers, own))


def test_other_rows_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tensor a.qkv_proj.weight is \(500, 32\): rows cannot be 256 of q_proj"
    ):
        reading(tmp_path, {"a.qkv_proj.weight": torch.randn(500, 32)})


@pytest.mark.parametrize("side", [1, 128])
def test_rows_by_groups_and_scales_of_their_blocks_are_read_by_parts(side: int) -> None:
    stored = torch.arange(768 // side)[:, None]
    parts = {name: view(stored)[:] for name, view in GROUPS.split("layer.both.weight", tuple(stored.shape))}
    groups = stored.view(2, -1, 1)
    assert torch.equal(parts["layer.one.weight"], groups[:, : 128 // side].reshape(-1, 1))
    assert torch.equal(parts["layer.two.weight"], groups[:, 128 // side :].reshape(-1, 1))


def test_rows_by_groups_of_another_number_are_refused() -> None:
    for kind, rows in ((GroupsTensor("both", 2, (("one", 64), ("two", 64))), 2), (GROUPS, 767)):
        with pytest.raises(ConfigError, match=r"it has not the \d+ rows of one, two"):
            list(kind.split("layer.both.weight", (rows, 4)))
