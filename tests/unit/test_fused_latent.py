"""Latent attention in a fused model against the plain one's, narrow and wide; and what is refused of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import fp8
from eyas.engine.checkpoint.config import LatentSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.quantized import RowScales
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.formats.fp8 import Fp8Projection
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.products.blocks import StoredWeight
from eyas.engine.models.latent_attention import halves_last
from eyas.engine.models.refusal import refusal
from eyas.engine.models.table import read_model
from tests.unit.fp8_block_weights import write_fp8
from tests.unit.fused_experts import ERROR, TIPPED, logits_differ
from tests.unit.fused_models import FIRST, same_forwards
from tests.unit.tiny_deepseek import SMALL, write_tiny_deepseek

DENSE = SMALL | {"vocab_size": 128, "num_hidden_layers": 2, "first_k_dense_replace": 2}
BIASES = DENSE | {"attention_bias": True}
LITE = DENSE | {"q_lora_rank": None, "rope_parameters": SMALL["rope_parameters"] | {"mscale_all_dim": 0.707}}


BLOCKS = DENSE | {
    "hidden_size": 192,
    "intermediate_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
"""Matrices with part of a block: 96 rows of kv_a, 192 columns of what leaves a layer."""


def changed(config: ModelConfig, **fields: Any) -> ModelConfig:
    """With other attention in every layer."""
    layers = [
        dataclasses.replace(x, attention=dataclasses.replace(x.attention, **fields)) for x in config.layers
    ]
    return dataclasses.replace(config, layers=tuple(layers))


def attention(config: ModelConfig) -> LatentSpec:
    layer: LayerSpec = config.layers[0]
    assert isinstance(layer.attention, LatentSpec)
    return layer.attention


@pytest.mark.parametrize(
    ("sizes", "way"),
    [
        pytest.param(DENSE, "narrow", id="two factors, narrow"),
        pytest.param(LITE, "narrow", id="one factor, narrow", marks=pytest.mark.slow),
        pytest.param(DENSE, "wide", id="two factors, wide", marks=pytest.mark.slow),
        pytest.param(BIASES, "narrow", id="biases, narrow", marks=pytest.mark.slow),
        pytest.param(
            LITE | {"attention_bias": True}, "wide", id="biases, one factor, wide", marks=pytest.mark.slow
        ),
        pytest.param(LITE, "wide", id="one factor, wide", marks=pytest.mark.slow),
    ],
)
def test_latents_are_the_plain_models(tmp_path: Path, sizes: dict[str, Any], way: str) -> None:
    write_tiny_deepseek(tmp_path, sizes)
    same_forwards(tmp_path, FIRST[way])


@pytest.mark.slow
@pytest.mark.parametrize("special", ["scale", "mscale", "rope", "pairs", "biases"])
def test_what_is_special_counts(tmp_path: Path, special: str) -> None:
    write_tiny_deepseek(tmp_path, BIASES)
    config = read_model(tmp_path)
    spec = attention(config)
    plain = (spec.plain_dim + spec.rotated_dim) ** -0.5
    assert spec.scale > 1.5 * plain
    fields: dict[str, dict[str, Any]] = {
        "scale": {"scale": spec.head_dim**-0.5},
        "mscale": {"scale": plain},
        "rope": {"rope": dataclasses.replace(spec.rope, kind="default")},
        "pairs": {"adjacent": False},
        "biases": {"qkv_bias": False},
    }
    with pytest.raises((AssertionError, ConfigError)):
        same_forwards(tmp_path, FIRST["narrow"], changed(config, **fields[special]))


@pytest.mark.slow
@pytest.mark.parametrize("powers", [False, True])
def test_fp8_blocks_are_the_plain_ones(tmp_path: Path, powers: bool) -> None:
    """Scores are made smaller first: the rounding of rows to 4 bits would decide what is attended to."""
    write_tiny_deepseek(tmp_path / "plain", BLOCKS)
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    save_file(
        {n: t / 4 if "q_b_proj" in n else t for n, t in stored.items()},
        tmp_path / "plain" / "model.safetensors",
    )
    write_fp8(tmp_path / "blocks", tmp_path / "plain", torch.float8_e8m0fnu if powers else None)
    assert logits_differ(tmp_path / "blocks", tmp_path / "blocks") < TIPPED
    for part in ("kv_b", "o"):
        stored = load_file(tmp_path / "blocks" / "model.safetensors")
        name = next(n for n in stored if f".{part}_proj" in n and n.endswith("scale_inv"))
        stored[name] = (stored[name].float() * 2.0).to(stored[name].dtype)
        (spoilt := tmp_path / part).mkdir()
        (spoilt / "config.json").write_text((tmp_path / "blocks" / "config.json").read_text())
        save_file(stored, spoilt / "model.safetensors")
        assert logits_differ(spoilt, tmp_path / "blocks") > ERROR


@pytest.mark.parametrize("scales", ["block", "token"])
def test_rows_change_places_with_what_is_theirs(scales: RowScales) -> None:
    """Those of a head of 96, of which a third are rotated; below another matrix, with part of a block.

    A block's scale stays where it is, a row's goes with it.
    """
    parts = [stored(rows, scales) for rows in (256, 96)]
    rows = torch.arange(96).view(1, 96, 1)
    order = halves_last(rows, SPEC).flatten()
    assert not torch.equal(order, rows.flatten())
    both = parts[0].below(parts[1].in_order(order))
    meant = torch.cat((widened(parts[0]), widened(parts[1])[order]))
    assert torch.equal(widened(both), meant)


SPEC = LatentSpec(4, 1, 96, RopeConfig(), 1.0, kv_rank=64, query_rank=128, plain_dim=64, value_dim=64)


def stored(rows: int, scales: RowScales) -> Fp8Projection:
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.randn(rows, 130, generator=generator).to(torch.float8_e4m3fn)
    sizes = (-(-rows // 128), 2) if scales == "block" else (rows,)
    scaled = torch.rand(sizes, generator=generator)
    return Fp8Projection(StoredWeight(numbers, scaled, fp8.RowRounding(scales)))


def widened(made: Projection) -> torch.Tensor:
    assert made.weight.scales is not None
    return fp8.widened(made.weight.stored, made.weight.scales)


def test_what_no_kernel_computes_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_deepseek(tmp_path, DENSE)
    config = read_model(tmp_path)
    power = "(a power of two from 16 to 512 is needed)"
    wanted: dict[str, dict[str, Any]] = {
        "": {},
        "latent attention with a window": {"window": 9},
        "latent attention with a soft cap and norms of heads": {"soft_cap": 3.0, "head_norms": True},
        f"kv_lora_rank 48 {power}": {"kv_rank": 48, "head_dim": 64},
        f"kv_lora_rank 1024 {power}": {"kv_rank": 1024, "head_dim": 1040},
        f"qk_rope_head_dim 8 {power}": {"head_dim": 40},
        "q_lora_rank 40 (a multiple of 16 is needed)": {"query_rank": 40},
        "columns of o_proj 52 (a multiple of 16 is needed)": {"value_dim": 13},
    }
    for why, fields in wanted.items():
        assert refusal(changed(config, **fields), 128) == why
