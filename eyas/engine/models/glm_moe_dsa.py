"""GLM-5 and DeepSeek-V3.2: latent attention to the keys that an indexer chooses, over DeepSeek-V3's experts.

Contexts of as many tokens as it chooses are served: of these it chooses all, so that attention is as without.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import glm4_moe_lite, keys

DEFAULTS: dict[str, values.Raw] = {
    "GlmMoeDsaForCausalLM": glm4_moe_lite.DEFAULTS
    | {
        "q_lora_rank": 2048,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    "DeepseekV32ForCausalLM": glm4_moe_lite.DEFAULTS
    | {
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "rms_norm_eps": 1e-6,
    },
}
"""What a configuration may leave out, by its architecture."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`index_topk` is how many keys are chosen. What is stored of indexers is not read."""
    raw = {**DEFAULTS[values.words(raw, "architectures")[0]], **raw, "rope_interleave": True}
    plain = keys.decoder(raw, folder, glm4_moe_lite.layers(raw))
    most = min(plain.context_length, values.whole(raw, "index_topk", 2048, least=1))
    return dataclasses.replace(plain, context_length=most, unread=(".self_attn.indexer.",))
