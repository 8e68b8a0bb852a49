"""GLM-4.1V, 4.5V and 4.6V: of a checkpoint that also reads images the language model, GLM-4 or GLM-4.5."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import glm4, glm4_moe, keys, qwen2_vl

DENSE = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 1.0,
}
WITH_EXPERTS = {
    "vocab_size": 151_424,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "first_k_dense_replace": 1,
    "attention_bias": True,
}
"""What a `text_config` may leave out."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The model that its `text_config` describes, by its `model_type` or by the architecture."""
    raw, kind = keys.tied_in_either(raw), values.section(raw, "text_config").get("model_type")
    experts = kind == "glm4v_moe_text" or raw["architectures"][0] == "Glm4vMoeForConditionalGeneration"
    if experts:
        text: Mapping[str, Any] = dict(qwen2_vl.text(raw, WITH_EXPERTS)) | {"use_qk_norm": False}
        plain = glm4_moe.describe(text, folder)
    else:
        text = qwen2_vl.text(raw, DENSE)
        heads = values.whole(text, "num_attention_heads", least=1)
        plain = glm4.describe({"head_dim": keys.width_of(text, "hidden_size") // heads, **text}, folder)
    return dataclasses.replace(plain, renamed=keys.TEXT_NAMES)
