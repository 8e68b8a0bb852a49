"""Fused models of experts, and of weights in FP8 blocks, against the plain ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.config import EngineConfig
from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.checkpoint.quantized import Fp8Config
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.kernels.experts import combine_rounded
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.refusal import refusal
from eyas.engine.models.table import read_model
from tests.unit.families import write_family
from tests.unit.fp8_block_weights import write_fp8
from tests.unit.fused_experts import BLOCKS, ERROR, TIPPED, logits_differ
from tests.unit.fused_models import FIRST, SLOTS, Steps, Twin, same_forwards, with_tokens
from tests.unit.model_rig import Rig

pytestmark = pytest.mark.slow

SMALL = {"vocab_size": 128, "num_hidden_layers": 2}
WAYS = [("narrow", family) for family in ("qwen3_moe", "qwen3_moe_shares", "mixtral", "mixtral_window")]
WAYS += [("wide", family) for family in ("qwen3_moe", "mixtral")]


@pytest.mark.parametrize(("way", "family"), WAYS)
def test_every_family(tmp_path: Path, way: str, family: str) -> None:
    write_family(tmp_path, family, **SMALL)
    same_forwards(tmp_path, FIRST[way])


CHANGES: dict[str, dict[str, Any]] = {
    "the weights": {"normalised": False},
    "their sum": {"scale": 0.5},
    "the scores": {"scores": "sigmoid"},
    "how many": {"per_row": 2},
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_number_of_a_router_counts(tmp_path: Path, change: str) -> None:
    write_family(tmp_path, "qwen3_moe", **SMALL | {"mlp_only_layers": []})
    config = changed(read_model(tmp_path), **CHANGES[change])
    with pytest.raises(AssertionError):
        same_forwards(tmp_path, FIRST["narrow"], config)


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    """With other experts."""
    layers = tuple(
        replace(layer, feed_forward=replace(layer.feed_forward, **changes)) for layer in config.layers
    )
    return replace(config, layers=layers)


@pytest.mark.parametrize(
    ("family", "powers", "hidden"),
    [
        *((family, powers, 192) for family in ("qwen3", "qwen3_moe") for powers in (False, True)),
        pytest.param("qwen3_moe", False, 256, id="whole blocks: rows are scored and rounded at once"),
    ],
)
def test_fp8_blocks_are_the_plain_ones(tmp_path: Path, family: str, powers: bool, hidden: int) -> None:
    fp8_blocks_are_the_plain_ones(tmp_path, family, powers, hidden)


def test_a_program_for_each_row_adds_up_norms_and_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of prompts, here of few rows."""
    calls = Mock(side_effect=combine_rounded._combine_rows)
    monkeypatch.setattr(combine_rounded, "MAX_ROWS", 0)
    monkeypatch.setattr(combine_rounded, "_combine_rows", calls)
    fp8_blocks_are_the_plain_ones(tmp_path, "qwen3_moe", False, 256)
    assert calls.called


def fp8_blocks_are_the_plain_ones(tmp_path: Path, family: str, powers: bool, hidden: int) -> None:
    more: dict[str, Any] = {"hidden_size": hidden}
    if family == "qwen3_moe":
        more["moe_intermediate_size"] = 128
    write_family(tmp_path / "plain", family, std=0.08, **SMALL | BLOCKS | more)
    scales = torch.float8_e8m0fnu if powers else None
    write_fp8(tmp_path / "blocks", tmp_path / "plain", scales)
    assert logits_differ(tmp_path / "blocks", tmp_path / "blocks") < TIPPED
    stored = load_file(tmp_path / "blocks" / "model.safetensors")
    name = next(name for name in stored if name.endswith("o_proj.weight_scale_inv"))
    stored[name] = (stored[name].float() * 2.0).to(stored[name].dtype)
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt" / "config.json").write_text((tmp_path / "blocks" / "config.json").read_text())
    save_file(stored, tmp_path / "spoilt" / "model.safetensors")
    assert logits_differ(tmp_path / "spoilt", tmp_path / "blocks") > ERROR


def test_chance_may_choose_experts_for_benchmarks(tmp_path: Path) -> None:
    """And the engine says so; a model without experts has nothing to choose."""
    write_family(tmp_path / "experts", "mixtral", **SMALL)
    write_family(tmp_path / "dense", "qwen3", **SMALL)
    asked = EngineConfig(draft=None, num_pages=4, attention_backend="triton", uniform_experts=True)
    told = {
        name: EngineSpec.of(replace(asked, model=str(tmp_path / name))).uniform_experts
        for name in ("experts", "dense")
    }
    assert told == {"experts": True, "dense": False}
    rig = Rig(tmp_path / "experts")
    twin = Twin(rig.config, rig.pool, torch.zeros(SLOTS, 16, dtype=torch.int32))
    found = []
    for context in (twin.context, replace(twin.context, uniform_experts=True)):
        with FolderWeights(tmp_path / "experts", rig.config.spelling) as weights:
            model = Decoder(rig.config, weights, DeviceMachine(context))
        rounds, chunks, _, tokens = next(iter(Steps(rig, FIRST["narrow"])))
        found.append(model.forward(with_tokens(twin.rows(rounds, chunks), tokens.tolist()), twin.pool)[0])
    assert found[1].isfinite().all() and not torch.allclose(*found)


def test_experts_that_no_kernel_has_are_refused_by_name(tmp_path: Path) -> None:
    write_family(tmp_path, "mixtral", **SMALL)
    config = read_model(tmp_path)
    assert isinstance(config.layers[0].feed_forward, ExpertsSpec)
    assert refusal(config, 128) == ""
    assert "40 of 64 experts" in refusal(changed(config, per_row=40, experts=64), 128)
    assert "intermediate_size 96 in FP8 blocks" in refusal(
        replace(config, quantized=Fp8Config("block", rows="block")), 128
    )
    assert "a shared expert of 40 columns" in refusal(changed(config, shared_width=40), 128)
