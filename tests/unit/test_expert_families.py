"""Each special of a family with experts counts: a decoder that leaves it out gives other logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ExpertsSpec, FeedForwardSpec
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.layers.activations import CLAMP_LIMIT, CLAMP_STEEPNESS, clamped_swiglu
from eyas.engine.models.table import read_model
from tests.unit.crossed import crossed
from tests.unit.families import write_family
from tests.unit.family_changes import (
    CLOSE,
    Change,
    attention,
    common,
    edit,
    every,
    feed_forward,
    prompt,
    unnoticed,
    wanted,
    whole,
)
from tests.unit.fp4_formats import gpt_oss, mx_experts
from tests.unit.model_rig import Rig

ROPE = RopeConfig(10000.0)

EXPERTS_ALONE = ExpertsSpec(
    width=32, activation="gelu_tanh", experts=6, per_row=3, scores="softmax", normalised=True
)
SPECIALS: dict[str, dict[str, Change]] = {
    "dots1": {
        "norms of heads": attention(head_norms=False),
        "windows": attention(window=0),
        "correction": feed_forward(corrected=False),
    },
    "glm4_moe": {
        "rotated in part": attention(rope=ROPE),
        "norms of heads": attention(head_norms=False),
        "sigmoid": feed_forward(scores="softmax"),
        "correction": feed_forward(corrected=False),
        "scale": feed_forward(scale=1.0),
        "normalised": feed_forward(normalised=False),
        "groups": feed_forward(topk_groups=4),
        "shared": feed_forward(shared_width=0),
    },
    "glm4_moe_lite": {
        "neighbours": attention(adjacent=False),
        "correction": feed_forward(corrected=False),
        "dense layers": lambda config: dataclasses.replace(config, layers=config.layers[1::2] * 2),
    },
    "glm_moe_dsa": {"neighbours": attention(adjacent=False), "groups": feed_forward(topk_groups=4)},
    "glm4v_moe": {"rotated in part": attention(rope=ROPE), "biases": attention(qkv_bias=False)},
    "mistral4": {
        "temperature": attention(temper=None),
        "softmax": feed_forward(scores="sigmoid"),
        "groups": feed_forward(topk_groups=4),
        "best of a group": feed_forward(group_best=1),
    },
    "phimoe": {
        "weights among near equals": feed_forward(scores="softmax"),
        "mean": common(centred=False, norm_bias=False),
        "logits": common(head_bias=False),
        "bias of o": attention(output_bias=False),
    },
    "ernie4_5_moe": {
        "neighbours": attention(adjacent=False),
        "correction": feed_forward(corrected=False),
        "softmax": feed_forward(scores="sigmoid"),
        "normalised": feed_forward(normalised=False),
        "shared": feed_forward(shared_width=0),
    },
    "gemma4_moe": {
        "normalised": feed_forward(normalised=False),
        "experts": every(feed_forward=FeedForwardSpec(96, "gelu_tanh")),
        "feed-forward beside them": every(feed_forward=EXPERTS_ALONE),
    },
    "hunyuan_moe": {
        "norms behind": attention(norms_behind=False),
        "normalised": feed_forward(normalised=False),
        "shared": feed_forward(shared_width=0),
    },
    "llama4": {
        "chunks": attention(chunk=0),
        "norms of heads": attention(bare_norms=False),
        "neighbours": attention(adjacent=False),
        "temperature": attention(temper=None),
        "layers that do not rotate": attention(rope=RopeConfig(500_000.0)),
        "weights of inputs": feed_forward(weighs_input=False),
        "sigmoid": feed_forward(scores="softmax"),
        "shared": feed_forward(shared_width=0),
    },
    "qwen2_moe": {
        "biases": attention(qkv_bias=False),
        "share": feed_forward(shared_share=False),
        "shared": feed_forward(shared_width=0),
        "normalised": feed_forward(normalised=True),
    },
    "qwen2_moe_windows": {"windows": attention(window=0)},
    "qwen3_vl_moe": {"normalised": feed_forward(normalised=False), "norms": attention(head_norms=False)},
    "glm4_moe_biases": {"biases of q, k and v": attention(qkv_bias=False)},
    "granite_moe": {
        "residual": every(residual_scale=1.0),
        "scores": attention(scale=0.25),
        "softmax over the chosen": feed_forward(normalised=False),
    },
    "granite_moe_shared": {"shared": feed_forward(shared_width=0)},
    "minimax_m2": {
        "norms of rows": attention(row_norms=False),
        "rotated in part": attention(rope=ROPE),
        "sigmoid": feed_forward(scores="softmax"),
        "correction": feed_forward(corrected=False),
        "normalised": feed_forward(normalised=False),
    },
    "olmoe": {
        "norms of rows": attention(row_norms=False),
        "shares": feed_forward(normalised=True),
    },
    "gpt_oss": {
        "sinks": attention(sinks=False),
        "windows": attention(window=0),
        "biases of q, k and v": attention(qkv_bias=False),
        "bias of o": attention(output_bias=False),
        "rope": attention(rope=ROPE),
        "activation": feed_forward(activation="silu"),
        "biases of experts": feed_forward(bias=False),
        "bias of the router": feed_forward(router_bias=False),
        "softmax over the chosen": feed_forward(normalised=False),
    },
}


QUICK = ("glm4_moe", "mistral4", "phimoe", "gemma4_moe", "llama4", "qwen2_moe", "gpt_oss")
"""Every kind of special by one family that has it."""


@pytest.mark.parametrize("name", crossed(SPECIALS, quick=lambda name: name in QUICK))
def test_each_special_counts(tmp_path: Path, name: str) -> None:
    model, tokens = write_family(tmp_path, name), prompt()
    assert unnoticed(tmp_path, SPECIALS[name], wanted(model, tokens), tokens) == []


@pytest.mark.parametrize("name", ["per_expert_scale", "router.scale", "norm_1.weight", "layer_scalar"])
def test_stored_numbers_of_a_gemma4_count(tmp_path: Path, name: str) -> None:
    model, tokens, path = write_family(tmp_path, "gemma4_moe"), prompt(), tmp_path / "model.safetensors"
    stored = load_file(path)
    for each in [each for each in stored if each.endswith(name)]:
        stored[each] = torch.ones_like(stored[each])
    save_file(stored, path)
    assert (whole(Rig(tmp_path), tokens) - wanted(model, tokens)).abs().max() > 100 * CLOSE


@pytest.mark.parametrize("name", ["glm_moe_dsa", "deepseek_v32"])
def test_no_more_tokens_are_served_than_an_indexer_chooses(tmp_path: Path, name: str) -> None:
    """Of more it leaves some out, which gives other logits."""
    model, tokens = write_family(tmp_path, name, index_topk=64), prompt()
    config = read_model(tmp_path)
    assert config.context_length == 64
    whole_context = dataclasses.replace(config, context_length=256)
    differs = (whole(Rig(tmp_path, whole_context), tokens) - wanted(model, tokens)).abs().amax(-1)
    assert differs[:64].max() < CLOSE and differs[64:].max() > 100 * CLOSE
    edit(tmp_path, architectures=["DeepseekV3ForCausalLM"])
    with pytest.raises(ConfigError, match="holds a tensor .*indexer.*, which a DeepseekV3ForCausalLM"):
        Rig(tmp_path)


def test_another_jitter_of_a_router_is_refused_by_name(tmp_path: Path) -> None:
    write_family(tmp_path, "phimoe")
    edit(tmp_path, router_jitter_noise=0.02)
    with pytest.raises(ConfigError, match="router_jitter_noise 0.02 with num_experts_per_tok 2 is not"):
        read_model(tmp_path)


def test_the_limits_of_a_clamped_gate() -> None:
    gate, up = torch.randn(2, 300, dtype=torch.float64) * 6
    gated, lifted = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    assert (CLAMP_LIMIT, CLAMP_STEEPNESS) == (7.0, 1.702) and (gate > 7).any() and (up.abs() > 7).any()
    made = clamped_swiglu(gate, up)
    assert torch.allclose(made, gated * torch.sigmoid(1.702 * gated) * (lifted + 1))
    for changed in (clamped_swiglu(gated, up), clamped_swiglu(gate, lifted)):
        assert torch.equal(made, changed)


def test_another_limit_of_gates_is_refused_by_name(tmp_path: Path) -> None:
    write_family(tmp_path, "gpt_oss")
    edit(tmp_path, swiglu_limit=7.0)
    read_model(tmp_path)
    edit(tmp_path, swiglu_limit=5.0)
    with pytest.raises(ConfigError, match=r"swiglu_limit 5 is not supported \(7 is\)"):
        read_model(tmp_path)


def test_a_gpt_oss_in_mxfp4_is_the_one_that_its_numbers_mean(tmp_path: Path) -> None:
    """As it is published: gates, ups and downs of experts in four bits, all else in 16."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for folder in (plain, packed):
        write_family(folder, "gpt_oss", hidden_size=64, num_hidden_layers=2)
    stored = load_file(plain / "model.safetensors")
    fours = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        parts, stored[name] = mx_experts(name, fours.pop(name))
        fours |= parts
    save_file(stored, plain / "model.safetensors")
    save_file(fours, packed / "model.safetensors")
    edit(packed, quantization_config=gpt_oss())
    tokens = prompt(70)
    assert (whole(Rig(packed), tokens) - whole(Rig(plain), tokens)).abs().max() < CLOSE
