"""Mistral Small 4: DeepSeek's latent attention, sharper behind the length of the training, over experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig, Temper
from eyas.engine.checkpoint.stacked_tensors import StackedTensor
from eyas.engine.models import deepseek, keys

DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 1_048_576,
}
"""What a configuration may leave out."""

STACKED = (
    StackedTensor("experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
    StackedTensor("experts.down_proj", ("down_proj.weight",)),
)
"""As transformers writes experts."""

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Of a configuration that says nothing of it."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Routing is DeepSeek-V3's by a softmax, without a correction. All of what `qk_rope_head_dim` says is
    rotated, whatever part of a head that is.
    """
    raw = DEFAULTS | dict(raw)
    scaling = dict(keys.rope_scaling(raw) or ROPE)
    scaling.pop("partial_rotary_factor", None)
    raw = raw | {"rope_parameters": scaling, "rope_scaling": None, "partial_rotary_factor": None}
    attention = deepseek.latents(raw)
    if beta := values.number(scaling, "llama_4_scaling_beta", 0.0):
        span = values.whole(scaling, "original_max_position_embeddings", least=1)
        attention = dataclasses.replace(attention, temper=Temper(beta, span))
    experts = dataclasses.replace(deepseek.corrected_experts(raw), scores="softmax", corrected=False)
    plain = keys.decoder(raw, folder, deepseek.layers(raw, attention, experts))
    return dataclasses.replace(plain, fused=STACKED)
