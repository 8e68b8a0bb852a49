"""Weights in FP8 blocks: a model of them is the one of the weights that they stand for, with rounded rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.types import KvKind
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.checkpoint.quantized import Fp8Config
from eyas.engine.checkpoint.weights import FolderWeights, WeightPlacement
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models.table import read_model
from tests.unit.families import write_family
from tests.unit.fp8_block_weights import plain, write_fp8
from tests.unit.model_rig import Rig

__all__ = ["plain"]  # a fixture


def logits(folder: Path, config: ModelConfig | None = None) -> torch.Tensor:
    rig = Rig(folder, config, pages=16)
    tokens = torch.randint(4096, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    found: torch.Tensor = rig.logits([QuerySpan(rig.table(40), 0, 40)], tokens)
    return found


@pytest.mark.parametrize(
    "scales_as",
    [
        pytest.param(None, id="float32"),
        pytest.param(torch.float32, id="powers of two", marks=pytest.mark.slow),
        pytest.param(torch.float8_e8m0fnu, id="ue8m0", marks=pytest.mark.slow),
    ],
)
def test_a_model_in_blocks_is_the_model_they_stand_for(
    tmp_path: Path, plain: Path, scales_as: torch.dtype | None
) -> None:
    """Scales as DeepSeek-V3 stores them, as V3.1 does, and in the eight bits that a power of two needs."""
    meant = write_fp8(tmp_path / "fp8", plain, scales_as)
    told = tmp_path / "meant"
    told.mkdir()
    (told / "config.json").write_text((plain / "config.json").read_text())
    save_file(meant, told / "model.safetensors")
    powers = scales_as is not None
    config = read_model(tmp_path / "fp8")
    assert config.quantized == Fp8Config("block", powers, rows="block") and read_model(told).quantized is None
    unrounded, found = config.quantized.with_rows_as_they_are(), logits(tmp_path / "fp8")
    wide = logits(tmp_path / "fp8", dataclasses.replace(config, quantized=unrounded))
    assert torch.equal(wide, logits(told))
    assert 1e-3 < (found - wide).pow(2).mean().sqrt() / wide.std() < 0.3
    original = logits(plain)
    error = (wide - original).pow(2).mean().sqrt() / original.std()
    assert 1e-3 < error < 0.3, "three bits behind the point: a weight is off by 2.6 %, experts change places"


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_are_rounded_where_a_device_computes(tmp_path: Path, plain: Path, backend: str) -> None:
    write_fp8(tmp_path / "fp8", plain)
    config = EngineConfig(model=str(tmp_path / "fp8"), draft=None, attention_backend=backend)
    loaded = EngineSpec(config, read_model(tmp_path / "fp8"), head=None, epoch=0)
    with loaded.weights(KvKind.TARGET) as weights:
        rounding = weights.rounding(["model.layers.0.self_attn.o_proj.weight"])
    assert rounding == (None if backend == "torch" else RowRounding("block"))


def test_a_dense_model_in_blocks_is_read_as_well(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", "qwen3")
    meant = write_fp8(tmp_path / "fp8", tmp_path / "plain")
    name = "model.layers.0.mlp.gate_proj.weight"
    stored = read_model(tmp_path / "fp8").quantized
    with FolderWeights(tmp_path / "fp8", quantized=stored) as weights:
        assert torch.equal(weights.take(name, (96, 48)), meant[name])
    half = WeightPlacement(rank=1, ranks=2)
    with FolderWeights(tmp_path / "fp8", placement=half, quantized=stored) as weights:
        assert torch.equal(weights.take_columns(name, (96, 48)), meant[name][:, 24:])
    short = WeightPlacement(dtype=torch.bfloat16)
    with FolderWeights(tmp_path / "fp8", placement=short, quantized=stored) as weights:
        assert torch.equal(weights.take(name, (96, 48)), meant[name].bfloat16())
    config = EngineConfig(model=str(tmp_path / "fp8"), draft=None, num_pages=4, attention_backend="triton")
    with pytest.raises(ConfigError, match="no implementation for a GPU: intermediate_size 96 in FP8 blocks"):
        EngineSpec.of(config)


@pytest.mark.parametrize(
    ("scales", "why"),
    [
        (None, "has no tensor .*kv_a_proj_with_mqa.weight_scale"),
        ((2, 5), r"kv_a_proj_with_mqa.weight_scale_inv of .* is \(2, 5\), its config says \(2, 4\)"),
    ],
    ids=["missing", "misfit"],
)
def test_scales_that_are_missing_or_misfit_are_named(
    tmp_path: Path, plain: Path, scales: tuple[int, int] | None, why: str
) -> None:
    write_fp8(tmp_path / "fp8", plain)
    file = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    del tensors[name]
    if scales is not None:
        tensors[name] = torch.ones(scales)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=why):
        Rig(tmp_path / "fp8")


def test_a_missing_expert_is_named(tmp_path: Path, plain: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.17.up_proj.weight"]
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="has no tensor model.layers.1.mlp.experts.17.up_proj.weight"):
        Rig(tmp_path)
