"""Qwen3-VL with experts: of a checkpoint that also reads images the language model, a Qwen3 with experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.stacked_tensors import StackedTensor
from eyas.engine.models import keys, qwen2_vl, qwen3_moe, qwen3_vl

DEFAULTS = qwen3_vl.DEFAULTS | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
}
"""What a `text_config` may leave out."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The weights of the chosen are always normalised. Matrices of experts were published transposed, and are
    written as they are.
    """
    text = dict(qwen2_vl.text(raw, DEFAULTS)) | {"norm_topk_prob": True}
    plain = qwen3_moe.describe(text, folder)
    pair, width = ("gate_proj.weight", "up_proj.weight"), keys.width_of(text, "moe_intermediate_size")
    stacked = (
        StackedTensor("experts.gate_up_proj", pair, columns=plain.hidden_size),
        StackedTensor("experts.down_proj", ("down_proj.weight",), columns=width),
    )
    return dataclasses.replace(plain, renamed=keys.TEXT_NAMES, fused=stacked)
