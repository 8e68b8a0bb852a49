"""Each special of a hybrid counts: a decoder that leaves it out gives other logits."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.fused_tensors import FusedTensor
from eyas.engine.checkpoint.multiplied_tensors import MultipliedTensor
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.models.refusal import refusal
from eyas.engine.states.shape import SelectiveShape
from tests.unit.family_changes import CLOSE, ROPE, Change, attention, every, feed_forward, layers, prompt
from tests.unit.hybrid_rig import HybridRig, described, write_hybrid


def states(**fields: Any) -> Change:
    """Of all layers with a state."""

    def changed(config: ModelConfig) -> ModelConfig:
        layers = [
            dataclasses.replace(layer, delta=layer.delta and dataclasses.replace(layer.delta, **fields))
            for layer in config.layers
        ]
        return dataclasses.replace(config, layers=tuple(layers))

    return changed


def unmultiplied(name: str) -> Change:
    """Without the numbers of a stored tensor."""

    def changed(config: ModelConfig) -> ModelConfig:
        fused = [
            FusedTensor(each.name, tuple((part, count) for part, count, _ in each.parts))
            if isinstance(each, MultipliedTensor) and each.name == name
            else each
            for each in config.fused
        ]
        return dataclasses.replace(config, fused=tuple(fused))

    return changed


MULTIPLIED = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "gate_proj", "down_proj")
WITHOUT_LIMITS = states(limits=(0.0, math.inf))
SPECIALS: dict[str, dict[str, Change]] = {
    "bamba": {"a part rotates": attention(rope=ROPE)},
    "granite_hybrid": {"rotates nothing": attention(rope=ROPE), "residual": every(residual_scale=1.0)},
    "granite_hybrid_dense": {"limits of steps": WITHOUT_LIMITS, "rotates": attention(rope=NO_ROPE)},
    "nemotron_h": {"limits of steps": WITHOUT_LIMITS, "groups of the norm": states(norm_groups=1)},
    "nemotron_h_latent": {"limits of steps": WITHOUT_LIMITS},
    "lfm2_with_eyes": {"norms of heads": attention(head_norms=False)},
    "qwen3_next": {"a part rotates": attention(rope=ROPE), "norms of heads": attention(head_norms=False)},
    "qwen3_5": {"a part rotates": attention(rope=ROPE)},
    "qwen3_5_moe": {"a part rotates": attention(rope=ROPE)},
    "falcon_h1": {name: unmultiplied(name) for name in MULTIPLIED}
    | {"attention beside the state": layers(lambda i, each: dataclasses.replace(each, both=i > 0))},
    "falcon_h1_norm": {"before the gate": states(norm_first=False), "groups": states(norm_groups=1)},
    "jamba": {
        "norms of steps, keys and queries": states(norms="bare"),
        "rotates nothing": attention(rope=ROPE),
        "weights as they are": feed_forward(normalised=True),
    },
    "falcon_mamba": {"norms of steps, keys and queries": states(norms="")},
    "mamba2": {"limits of steps": WITHOUT_LIMITS},
    "kimi_linear": {"rotates nothing": attention(rope=ROPE), "groups": feed_forward(topk_groups=4)},
    "olmo_hybrid": {"reach": states(reach=1.0), "rotates nothing": attention(rope=ROPE)},
    "olmo_hybrid_rotated": {"reach": states(reach=2.0), "rotates": attention(rope=NO_ROPE)},
    "lfm2": {"norms of heads": attention(head_norms=False)},
    "lfm2_moe": {"correction": feed_forward(corrected=False), "scale": feed_forward(scale=1.0)},
}


@pytest.mark.parametrize("name", SPECIALS)
def test_without_its_special_a_hybrid_is_another_model(name: str, tmp_path: Path) -> None:
    """Of a state that no kernel computes, the refusal names the kind."""
    write_hybrid(tmp_path, name)
    config, tokens = described(tmp_path, name), prompt(70)

    def logits(config: ModelConfig) -> torch.Tensor:
        rig = HybridRig(tmp_path, dataclasses.replace(config, unread=("",)))
        made: torch.Tensor = rig.step([(rig.text(), tokens, None)])[0]
        return made

    assert config.delta is not None
    if isinstance(config.delta, SelectiveShape):
        assert config.delta.kind in refusal(config, 16)
    whole = logits(config)
    for special, change in SPECIALS[name].items():
        assert (logits(change(config)) - whole).abs().max() > 10 * CLOSE, special


PUBLISHED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "kimi_linear": (
        ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"),
        {
            "linear_attn_config": {
                "full_attn_layers": [3],
                "kda_layers": [1, 2, 4],
                "head_dim": 16,
                "num_heads": 3,
                "short_conv_kernel_size": 4,
            },
            "first_k_dense_replace": 1,
            "mla_use_nope": True,
        },
    ),
    "falcon_mamba": ((), {"expand": 16}),
    "lfm2": (
        ("layer_types", "intermediate_size"),
        {"full_attn_idxs": [2], "block_ff_dim": 90, "intermediate_size": 8192},
    ),
}
"""The keys by which a published config.json says what transformers writes by others."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_says_the_same(name: str, tmp_path: Path) -> None:
    write_hybrid(tmp_path, name)
    expected, path = described(tmp_path, name), tmp_path / "config.json"
    without, keys = PUBLISHED[name]
    stated = {key: value for key, value in json.loads(path.read_text()).items() if key not in without}
    path.write_text(json.dumps(stated | keys))
    assert described(tmp_path, name) == expected
