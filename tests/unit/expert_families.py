"""Samples of the families with experts that have a special of their own."""

from __future__ import annotations

from typing import Any

from tests.unit.dense_families import IN_A_PLANE, TWO_WIDTHS
from tests.unit.family_sample import WINDOW, Sample

SMALL_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
NO_ENDS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None}
SLOW_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}

LATENTS: dict[str, Any] = {
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
HALF_IN_A_PLANE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
    "hidden_size": 64,
}
INDEXED: dict[str, Any] = {"index_topk": 256, "index_head_dim": 16, "index_n_heads": 2}
WIDENED: dict[str, Any] = SLOW_YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.5}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
}
MULTIPLIED: dict[str, Any] = {
    "num_experts_per_tok": 3,
    "num_local_experts": 6,
    "intermediate_size": 32,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.3,
    "embedding_multiplier": 6.0,
    "logits_scaling": 2.0,
}
CHUNKED: dict[str, Any] = {
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 56,
    "floor_scale": 20,
    "attn_scale": 0.5,
    "for_llm_compressor": False,
}

WITH_EXPERTS: dict[str, Sample] = {
    "dots1": Sample(
        "Dots1ForCausalLM",
        "Dots1Config",
        changes=SMALL_EXPERTS | GROUPED | {"sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "ernie4_5_moe": Sample(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        changes=SMALL_EXPERTS
        | NO_ENDS
        | {"moe_k": 3, "moe_num_experts": 8, "moe_layer_interval": 2, "hidden_size": 64},
    ),
    "gemma4_moe": Sample(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        0.5,
        NO_ENDS
        | TWO_WIDTHS
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32},
    ),
    "glm4_moe": Sample(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        changes=SMALL_EXPERTS | GROUPED | {"use_qk_norm": True, "num_nextn_predict_layers": 0},
    ),
    "glm4_moe_biases": Sample(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        changes=SMALL_EXPERTS
        | GROUPED
        | {"attention_bias": True, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    ),
    "glm4_moe_lite": Sample(
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        changes=SMALL_EXPERTS | GROUPED | LATENTS | {"mlp_layer_types": ["dense", "sparse"] * 2},
    ),
    "glm_moe_dsa": Sample(
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        changes=SMALL_EXPERTS | GROUPED | LATENTS | INDEXED,
    ),
    "deepseek_v32": Sample(
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        changes=SMALL_EXPERTS | GROUPED | LATENTS | INDEXED,
    ),
    "glm4v_moe": Sample(
        "Glm4vMoeForConditionalGeneration",
        "Glm4vMoeConfig",
        changes=SMALL_EXPERTS | NO_ENDS | GROUPED | HALF_IN_A_PLANE,
    ),
    "mistral4": Sample(
        "Mistral4ForCausalLM",
        "Mistral4Config",
        changes=SMALL_EXPERTS | NO_ENDS | GROUPED | LATENTS | {"rope_parameters": WIDENED, "head_dim": 20},
    ),
    "phimoe": Sample(
        "PhimoeForCausalLM",
        "PhimoeConfig",
        changes=NO_ENDS
        | {"intermediate_size": 32, "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True},
    ),
    "gpt_oss": Sample(
        "GptOssForCausalLM",
        "GptOssConfig",
        changes={
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "num_local_experts": 6,
            "sliding_window": WINDOW,
            "rope_parameters": SLOW_YARN,
        },
    ),
    "granite_moe": Sample("GraniteMoeForCausalLM", "GraniteMoeConfig", changes=NO_ENDS | MULTIPLIED),
    "granite_moe_shared": Sample(
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        changes=NO_ENDS | MULTIPLIED | {"shared_intermediate_size": 48},
    ),
    "hunyuan_moe": Sample(
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1Config",
        changes=NO_ENDS | {"eod_token_id": None, "moe_topk": 3, "num_experts": 6, "intermediate_size": 32},
    ),
    "qwen2_moe": Sample(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        changes=SMALL_EXPERTS
        | {
            "hidden_size": 64,
            "num_experts": 8,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe_windows": Sample(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        changes=SMALL_EXPERTS
        | {"hidden_size": 64, "num_experts": 8, "shared_expert_intermediate_size": 32}
        | {"use_sliding_window": True, "sliding_window": WINDOW, "qkv_bias": False},
    ),
    "qwen3_vl_moe": Sample(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        changes=SMALL_EXPERTS | NO_ENDS | IN_A_PLANE | {"num_experts": 8, "moe_intermediate_size": 48},
    ),
    "llama4": Sample("Llama4ForCausalLM", "Llama4TextConfig", changes=NO_ENDS | CHUNKED),
    "llama4_with_eyes": Sample(
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        changes=NO_ENDS | CHUNKED | {"use_qk_norm": False, "attn_temperature_tuning": False},
    ),
    "minimax_m2": Sample(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        changes=NO_ENDS
        | {
            "num_experts_per_tok": 3,
            "num_local_experts": 8,
            "intermediate_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "olmoe": Sample(
        "OlmoeForCausalLM",
        "OlmoeConfig",
        changes=NO_ENDS
        | {"hidden_size": 64, "num_experts_per_tok": 3, "num_experts": 8, "intermediate_size": 32},
    ),
}
