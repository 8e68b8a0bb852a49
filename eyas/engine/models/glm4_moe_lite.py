"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts."""

from __future__ import annotations

from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import deepseek, keys

DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
}
"""What a configuration may leave out."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`mlp_layer_types` say which layers have experts; without them all but the first."""
    raw = DEFAULTS | dict(raw)
    return keys.decoder(raw, folder, layers(raw))


def layers(raw: values.Raw) -> list[LayerSpec]:
    """All of them: dense or sparse by `mlp_layer_types`, or behind `first_k_dense_replace`."""
    attention, experts = deepseek.latents(raw), deepseek.corrected_experts(raw)
    kinds = values.words(raw, "mlp_layer_types")
    if not kinds:
        return deepseek.layers(raw, attention, experts)
    if len(kinds) != keys.count(raw) or set(kinds) - {"dense", "sparse"}:
        raise ValueError(f"mlp_layer_types {values.said(list(kinds))} are not dense or sparse for each layer")
    dense = keys.feed_forward(raw)
    return [LayerSpec(attention, experts if kind == "sparse" else dense) for kind in kinds]
