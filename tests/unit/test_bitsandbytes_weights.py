"""Checkpoints of bitsandbytes are read as what they mean: to the bit, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.folder import tensor_shapes
from eyas.engine.models.heads import read_head
from eyas.engine.models.table import read_model
from tests.unit.bitsandbytes_formats import FORMATS, state, text, told
from tests.unit.families import write_family
from tests.unit.model_rig import Rig
from tests.unit.packed_formats import UP, logits, read, write_packed
from tests.unit.tiny import edit, write_tiny_eagle3, write_tiny_llama

STATE = f"{UP}.weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "plain", layers=2, vocab=96, tied=False)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_what_the_numbers_mean(tmp_path: Path, plain: Path, name: str) -> None:
    write_packed(tmp_path / "packed", plain, FORMATS[name])
    found = logits(tmp_path / "packed")
    assert torch.equal(found, logits(tmp_path / "meant"))
    assert not torch.equal(found, logits(plain))
    config = read_model(tmp_path / "packed")
    assert tensor_shapes(tmp_path / "packed", config.quantized) == tensor_shapes(plain, None)


def test_fused_matrices_and_draft_heads(tmp_path: Path) -> None:
    write_family(
        tmp_path / "plain", "phi3", std=0.08, num_hidden_layers=1, hidden_size=64, intermediate_size=128
    )
    write_packed(tmp_path / "packed", tmp_path / "plain", FORMATS["nf4, nested"])
    assert torch.equal(logits(tmp_path / "packed"), logits(tmp_path / "meant"))
    write_tiny_llama(tmp_path / "target", vocab=96)
    write_tiny_eagle3(tmp_path / "head", tmp_path / "target")
    write_packed(tmp_path / "packed", tmp_path / "head", FORMATS["nf4"], ("lm_head", "norm"))
    assert read_head(tmp_path / "packed", read_model(tmp_path / "target")).algorithm == "eagle3"


def _halves_turned(packed: torch.Tensor) -> torch.Tensor:
    return (packed & 15) << 4 | packed >> 4


def _other_block(largest: torch.Tensor) -> torch.Tensor:
    return largest.roll(1)


def _no_offset(state: torch.Tensor) -> torch.Tensor:
    return text(json.loads(bytes(state.tolist())) | {"nested_offset": 0.0})


def _other_value(values: torch.Tensor) -> torch.Tensor:
    return values.flip(0)


@pytest.mark.parametrize(
    ("name", "end", "change"),
    [
        ("nf4", "weight", _halves_turned),
        ("nf4", "weight.absmax", _other_block),
        ("nf4", "weight.quant_map", _other_value),
        ("nf4, nested", "weight.absmax", _other_block),
        ("nf4, nested", "weight.nested_quant_map", _other_value),
        ("nf4, nested", "weight.quant_state.bitsandbytes__nf4", _no_offset),
        ("int8", "SCB", _other_block),
    ],
)
def test_a_mistake_in_reading_would_be_noticed(
    tmp_path: Path, plain: Path, name: str, end: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    stored = write_packed(tmp_path / "packed", plain, FORMATS[name])
    meant = load_file(tmp_path / "meant" / "model.safetensors")[f"{UP}.weight"]
    assert torch.equal(read(tmp_path / "packed"), meant)
    edit(tmp_path / "packed", {f"{UP}.{end}": change(stored[f"{UP}.{end}"]).contiguous()})
    assert not torch.allclose(read(tmp_path / "packed"), meant, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weight.quant_state.bitsandbytes__nf4": None}, "absmax of .*: no packed matrix"),
        ({"weight.quant_state.bitsandbytes__nf4": text([])}, "absmax of .*: no packed matrix"),
        (
            {"weight.quant_state.bitsandbytes__nf4": torch.full((9,), 91, dtype=torch.uint8)},
            "no packed matrix",
        ),
        (
            {"weight.quant_state.bitsandbytes__nf4": torch.full((90000,), 91, dtype=torch.uint8)},
            "no packed matr",
        ),
        ({"weight.quant_state.bitsandbytes__nf4": torch.ones(9)}, "absmax of .*: no packed matrix"),
        (
            {"weight.quant_state.bitsandbytes__nf4": state(shape=[64, 128])},
            r"is \(64, 128\), its config says",
        ),
        ({"weight.quant_state.bitsandbytes__nf4": state(shape=[0, 64])}, "no packed matrix"),
        (
            {"weight.quant_state.bitsandbytes__nf4": state(blocksize=128)},
            "nf4: blocksize 128 must be 64 or less",
        ),
        ({"weight.quant_state.bitsandbytes__nf4": state(nested_offset=None)}, "nf4 has no 'nested_offset'"),
        ({"weight.nested_absmax": None}, "there is no weight.nested_absmax for scales of eight bits"),
        ({"weight.quant_map": torch.ones(15)}, r"quant_map of .* is \(15,\), not \(16,\)"),
        ({"weight": torch.ones(4096, 1)}, "up_proj.weight of .* is stored as F32, not as U8"),
        ({"weight.absmax": torch.ones(127)}, r"absmax of .* is \(127,\), not \(128,\)"),
    ],
)
def test_what_is_not_as_the_format_says_is_refused_by_name(
    tmp_path: Path, plain: Path, changes: dict[str, Any], why: str
) -> None:
    write_packed(tmp_path / "packed", plain, FORMATS["nf4, nested"])
    edit(tmp_path / "packed", {f"{UP}.{end}": tensor for end, tensor in changes.items()})
    with pytest.raises(ConfigError, match=why) as refused:
        Rig(tmp_path / "packed")
    assert UP in str(refused.value)


def test_rows_in_another_order_are_refused(tmp_path: Path, plain: Path) -> None:
    write_packed(tmp_path / "packed", plain, FORMATS["int8"])
    edit(tmp_path / "packed", {f"{UP}.weight_format": torch.ones((), dtype=torch.uint8)})
    with pytest.raises(ConfigError, match=f"{UP}.weight_format is 1: only rows"):
        Rig(tmp_path / "packed")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (told(bnb_4bit_quant_storage="bfloat16"), "bnb_4bit_quant_storage 'bfloat16'"),
        (told(2), "bitsandbytes with neither load_in_4bit nor load_in_8bit"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    edit(write_tiny_llama(tmp_path, layers=1), quantization_config=change)
    with pytest.raises(ConfigError, match=f"quantization_config: .*{why}.*is not supported"):
        read_model(tmp_path)


def test_modules_that_are_left_out(tmp_path: Path, plain: Path) -> None:
    out = ("lm_head", "embed_tokens", "norm", "o_proj")
    skipped = {"llm_int8_skip_modules": ["o_proj", "lm_head"]}
    write_packed(tmp_path / "packed", plain, FORMATS["nf4"], out, **skipped)
    assert torch.equal(logits(tmp_path / "packed"), logits(tmp_path / "meant"))
    write_packed(tmp_path / "packed", plain, FORMATS["nf4"], **skipped)
    with pytest.raises(
        ConfigError, match="o_proj.weight.absmax, though quantization_config says that it is not"
    ):
        Rig(tmp_path / "packed")
