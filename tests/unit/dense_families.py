"""Samples of the dense families that have a special of their own, with what must count in each."""

from __future__ import annotations

from typing import Any

from tests.unit.family_sample import WINDOW, Sample

LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"] * 2
NO_ENDS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None}
STRETCHED = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

DENSE: dict[str, Sample] = {
    "smollm3": Sample("SmolLM3ForCausalLM", "SmolLM3Config", changes=NO_ENDS | {"no_rope_layer_interval": 2}),
    "smollm3_windows": Sample(
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        changes=NO_ENDS
        | {"use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [1, 0, 0, 1]}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "olmo3": Sample(
        "Olmo3ForCausalLM",
        "Olmo3Config",
        changes=NO_ENDS
        | {"sliding_window": WINDOW, "layer_types": LOCAL_AND_GLOBAL, "rope_parameters": STRETCHED},
    ),
    "granite": Sample(
        "GraniteForCausalLM",
        "GraniteConfig",
        changes={
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
}
