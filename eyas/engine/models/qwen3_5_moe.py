"""Qwen3.5 with experts, alone or in a checkpoint that reads images too: its layers, with Qwen2's experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.checkpoint.stacked_tensors import StackedTensor
from eyas.engine.models import keys, qwen2_moe, qwen2_vl, qwen3_5, qwen3_next

DEFAULTS = qwen3_5.DEFAULTS | {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
"""What a `text_config` may leave out."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The weights of the chosen are always normalised. Experts are stored one by one, or all as one."""
    text = dict(qwen2_vl.text(keys.tied_in_either(raw), DEFAULTS)) | {"norm_topk_prob": True}
    layer = LayerSpec(qwen3_next.attention(text), qwen2_moe.experts(text))
    plain = qwen3_next.hybrid(text, folder, [layer] * keys.count(text))
    stacked = (
        StackedTensor("experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
        StackedTensor("experts.down_proj", ("down_proj.weight",)),
    )
    renamed = keys.TEXT_NAMES + qwen2_moe.RENAMED
    fused = (*qwen3_5.joined(qwen3_next.delta(text)), *stacked)
    return dataclasses.replace(plain, renamed=renamed, fused=fused)
