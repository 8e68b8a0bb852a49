"""Checkpoints of numbers in e2m1 are read as what they mean: to the bit, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.folder import tensor_shapes
from eyas.engine.checkpoint.fp4 import powers
from eyas.engine.checkpoint.methods import read_quantized
from eyas.engine.checkpoint.sizes import weight_bytes
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.models.table import read_model
from tests.unit.fp4_formats import FP4, gpt_oss, modelopt, mx_experts
from tests.unit.model_rig import Rig
from tests.unit.packed_formats import SHAPE, UP, compressed, logits, read, write_packed
from tests.unit.tiny import edit, write_tiny_llama

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "plain", layers=2, vocab=96, tied=False)


@pytest.mark.parametrize("name", FP4)
def test_logits_are_those_of_what_the_numbers_mean(tmp_path: Path, plain: Path, name: str) -> None:
    write_packed(tmp_path / "packed", plain, FP4[name])
    found = logits(tmp_path / "packed")
    assert torch.equal(found, logits(tmp_path / "meant"))
    assert not torch.equal(found, logits(plain))
    config = read_model(tmp_path / "packed")
    amounts = [weight_bytes(config, "bfloat16", device).total for device in ("cpu", "cuda")]
    assert amounts[0] == weight_bytes(read_model(plain), "bfloat16", "cpu").total > 2 * amounts[1]


def _halves_turned(packed: torch.Tensor) -> torch.Tensor:
    return (packed & 15) << 4 | packed >> 4


def _groups_turned(scales: torch.Tensor) -> torch.Tensor:
    return scales.flip(-1)


def _one_less(scales: torch.Tensor) -> torch.Tensor:
    return scales - 1


def _neighbours(scales: torch.Tensor) -> torch.Tensor:
    return scales.roll(1, -2)


MISTAKES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "order of numbers": (_halves_turned, "packed"),
    "groups": (_groups_turned, "scale"),
    "scale of the neighbour": (_neighbours, "scale"),
    "exponents": (_one_less, "scale"),
}


def _changed(tensors: dict[str, torch.Tensor], mistake: str) -> dict[str, torch.Tensor]:
    change, end = MISTAKES[mistake]
    ends = ("_blocks", "weight_packed", ".weight") if end == "packed" else ("_scales", "weight_scale")
    made = {}
    for name, tensor in tensors.items():
        if name.endswith(ends) and tensor.itemsize == 1:
            made[name] = change(tensor.view(torch.uint8)).contiguous().view(tensor.dtype)
    assert made
    return made


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", FP4)
def test_a_mistake_in_reading_would_be_noticed(tmp_path: Path, plain: Path, name: str, mistake: str) -> None:
    stored = write_packed(tmp_path / "packed", plain, FP4[name])
    meant = load_file(tmp_path / "meant" / "model.safetensors")[f"{UP}.weight"]
    assert torch.equal(read(tmp_path / "packed"), meant)
    parts = {key: tensor for key, tensor in stored.items() if key.startswith(UP)}
    edit(tmp_path / "packed", _changed(parts, mistake))
    assert not torch.allclose(read(tmp_path / "packed"), meant, atol=1e-3)


def experts_in(folder: Path, *parts: Any) -> list[torch.Tensor]:
    """Parts of the experts, [3, 64, 10] in all."""
    config = read_quantized({"quantization_config": gpt_oss()})
    with FolderWeights(folder, quantized=config) as weights:
        assert EXPERTS in weights and not weights.is_packed(EXPERTS)
        whole = weights.take(EXPERTS, (3, 64, 10))
        reader = weights._mapped(EXPERTS, (3, 64, 10))
        return [whole, *(reader[part] for part in parts)]


@pytest.fixture
def experts(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 64, 10, generator=generator) * torch.rand(3, 1, 10, generator=generator)
    stored, meant = mx_experts(EXPERTS, weights)
    save_file(stored, tmp_path / "model.safetensors")
    return tmp_path, meant


def test_experts_are_those_of_transformers(experts: tuple[Path, torch.Tensor]) -> None:
    folder, meant = experts
    stored = load_file(folder / "model.safetensors")
    blocks, scales = (stored[f"{EXPERTS}_{end}"] for end in ("blocks", "scales"))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    (ours,) = experts_in(folder)
    assert torch.equal(ours, meant) and torch.equal(ours, theirs)
    config = read_quantized({"quantization_config": gpt_oss()})
    assert tensor_shapes(folder, config) == {EXPERTS: (3, 64, 10)}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_experts_would_be_noticed(experts: tuple[Path, torch.Tensor], mistake: str) -> None:
    folder, meant = experts
    stored = load_file(folder / "model.safetensors")
    save_file(stored | _changed(stored, mistake), folder / "model.safetensors")
    assert not torch.allclose(experts_in(folder)[0], meant, atol=1e-3)


def test_parts_of_experts(experts: tuple[Path, torch.Tensor]) -> None:
    """Those of one, of some, and columns that gate and up take in turn."""
    folder, meant = experts
    every = slice(None)
    parts: list[Any] = [1, slice(1, 3), (2, every, slice(1, None, 2)), (every, slice(8, 40)), ...]
    for part, found in zip(parts, experts_in(folder, *parts)[1:], strict=True):
        assert torch.equal(found, meant[part])


def test_exponents_are_powers_of_two() -> None:
    found = powers(torch.arange(256, dtype=torch.uint8).reshape(2, 128)).flatten()
    assert found[:255].tolist() == [2.0 ** (each - 127) for each in range(255)]
    assert not found[255].isfinite()


def stored_bytes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"scales": None}, f"has no tensor {EXPERTS}_scales"),
        ({"blocks": stored_bytes(3, 10, 2, 8)}, r"_blocks of .* is \(3, 10, 2, 8\), not \(3, 10, 2, 16\)"),
        ({"blocks": stored_bytes(3, 10, 32)}, r"_blocks of .* is \(3, 10, 32\): no packed matrix"),
        ({"blocks": stored_bytes(3, 10, 1, 16)}, r"gate_up_proj of .* is \(3, 32, 10\), its config says"),
        ({"scales": stored_bytes(3, 2, 10)}, r"_scales of .* is \(3, 2, 10\), not \(3, 10, 2\)"),
        ({"scales": torch.ones(3, 10, 2)}, "_scales of .* is stored as F32, not as U8 or F8_E8M0"),
        ({"scales": torch.full((3, 10, 2), 255, dtype=torch.uint8)}, "gate_up_proj of .* holds NaN"),
    ],
)
def test_experts_that_are_not_as_the_format_says(
    experts: tuple[Path, torch.Tensor], changes: dict[str, torch.Tensor | None], why: str
) -> None:
    folder, _ = experts
    stored = load_file(folder / "model.safetensors")
    for end, tensor in changes.items():
        del stored[f"{EXPERTS}_{end}"]
        if tensor is not None:
            stored[f"{EXPERTS}_{end}"] = tensor
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=why):
        experts_in(folder)


def test_modules_that_are_left_out_by_a_star(experts: tuple[Path, torch.Tensor]) -> None:
    config = read_quantized({"quantization_config": gpt_oss()})
    assert config is not None and not config.keeps(EXPERTS)
    for module in ("self_attn", "self_attn.q_proj", "mlp.router"):
        assert config.keeps(f"model.layers.11.{module}.weight")
    assert not config.keeps("model.layers.11.self_attn_q.weight")
    config = read_quantized({"quantization_config": gpt_oss(modules_to_not_convert=["*.mlp.experts"])})
    with pytest.raises(ConfigError, match="gate_up_proj_blocks, though quantization_config says that it is"):
        FolderWeights(experts[0], quantized=config)


@pytest.mark.parametrize(("name", "end"), [("nvfp4", "weight_global_scale"), ("modelopt", "weight_scale_2")])
def test_the_scale_of_a_whole_matrix(tmp_path: Path, plain: Path, name: str, end: str) -> None:
    """One divides, the other multiplies; that of rows is not read."""
    stored = write_packed(tmp_path / "packed", plain, FP4[name])
    meant = load_file(tmp_path / "meant" / "model.safetensors")[f"{UP}.weight"]
    edit(tmp_path / "packed", {f"{UP}.{end}": stored[f"{UP}.{end}"] * 2})
    found = read(tmp_path / "packed")
    assert torch.equal(found, meant / 2 if name == "nvfp4" else meant * 2)
    edit(tmp_path / "packed", {f"{UP}.{end}": torch.zeros(1)})
    if name == "nvfp4":
        with pytest.raises(ConfigError, match="up_proj.weight of .* holds NaN or infinity"):
            read(tmp_path / "packed")
    edit(tmp_path / "packed", {f"{UP}.{end}": torch.ones(2)})
    with pytest.raises(ConfigError, match=rf"up_proj.{end} of .* is \(2,\), not \(1,\)"):
        read(tmp_path / "packed")


def test_modelopt_tells_of_it_beside_config_json(tmp_path: Path, plain: Path) -> None:
    write_packed(tmp_path / "packed", plain, FP4["modelopt"])
    found = logits(tmp_path / "packed")
    edit(tmp_path / "packed", quantization_config=None)
    told = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    beside = tmp_path / "packed" / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt", "version": "0.29"}, "quantization": told}))
    assert torch.equal(logits(tmp_path / "packed"), found)
    beside.write_text(json.dumps({"quantization": told | {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ConfigError, match="modelopt with quant_algo 'W4A8_AWQ'"):
        read_model(tmp_path / "packed")
    beside.write_text(json.dumps({"quantization": told | {"quant_algo": None}}))
    assert read_model(tmp_path / "packed").quantized is None
    beside.write_text("[")
    with pytest.raises(ConfigError, match="hf_quant_config.json"):
        read_model(tmp_path / "packed")


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (modelopt("MIXED_PRECISION"), "modelopt with quant_algo 'MIXED_PRECISION'"),
        (modelopt(quant_algo=["FP8"]), r"modelopt with quant_algo \['FP8'\]"),
        (modelopt(group_size=32), "modelopt's NVFP4 with group_size 32"),
        (
            compressed("nvfp4-pack-quantized", type="float", group_size=32),
            "nvfp4-pack-quantized with weights of",
        ),
        (gpt_oss(group_size=16), "mxfp4 with group_size 16"),
        (
            FP4["mxfp4"].told | compressed("mxfp4-pack-quantized", type="float", group_size=16),
            "with weights of",
        ),
        (compressed("mxfp4-pack-quantized"), "format mxfp4-pack-quantized"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, told: dict[str, Any], why: str) -> None:
    edit(write_tiny_llama(tmp_path, layers=1), quantization_config=told)
    with pytest.raises(ConfigError, match=f"quantization_config: .*{why}.*is not supported"):
        read_model(tmp_path)


@pytest.mark.parametrize("name", FP4)
def test_a_missing_part_is_refused_by_name(tmp_path: Path, plain: Path, name: str) -> None:
    stored = write_packed(tmp_path / "packed", plain, FP4[name])
    for key in [key for key in stored if key.startswith(UP) and "input" not in key]:
        edit(tmp_path / "packed", {**stored, key: None})
        with pytest.raises(ConfigError, match=UP):
            Rig(tmp_path / "packed")
    shape = (SHAPE[0], SHAPE[1] // 4)
    packed = next(key for key in stored if key.startswith(UP) and stored[key].dtype == torch.uint8)
    edit(tmp_path / "packed", {**stored, packed: torch.zeros(shape, dtype=torch.uint8)})
    with pytest.raises(ConfigError, match=UP):
        Rig(tmp_path / "packed")
