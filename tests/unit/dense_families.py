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
TEMPERED: dict[str, Any] = {
    "rope_parameters": STRETCHED["full_attention"] | {"mscale": 1.0, "llama_4_scaling_beta": 0.5},
}
IN_A_PLANE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    "hidden_size": 64,
}
TWO_WIDTHS: dict[str, Any] = {
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
}
EYES: dict[str, Any] = {
    "depth": 1,
    "embed_dim": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "out_hidden_size": 64,
    "patch_size": 4,
    "image_size": 28,
    "deepstack_visual_indexes": [0],
}
"""Of the half that reads images, which is stored and left unread."""

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
    "seed_oss": Sample(
        "SeedOssForCausalLM",
        "SeedOssConfig",
        changes=NO_ENDS | {"attention_out_bias": True, "mlp_bias": True},
    ),
    "exaone4": Sample(
        "Exaone4ForCausalLM",
        "Exaone4Config",
        changes=NO_ENDS | {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    ),
    "exaone4_small": Sample(
        "Exaone4ForCausalLM",
        "Exaone4Config",
        changes=NO_ENDS | {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "ministral3": Sample("Ministral3ForCausalLM", "Ministral3Config", changes=NO_ENDS | TEMPERED),
    "mistral3_with_eyes": Sample(
        "Mistral3ForConditionalGeneration", "Mistral3Config", changes=NO_ENDS | {"tie_word_embeddings": False}
    ),
    "ministral3_with_eyes": Sample(
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        changes=NO_ENDS | TEMPERED | {"model_type": "ministral3", "tie_word_embeddings": False},
    ),
    "glm": Sample("GlmForCausalLM", "GlmConfig", changes=NO_ENDS | {"eos_token_id": [100]}),
    "glm4": Sample("Glm4ForCausalLM", "Glm4Config", changes=NO_ENDS | {"eos_token_id": [100]}),
    "ernie4_5": Sample("Ernie4_5ForCausalLM", "Ernie4_5Config", changes=NO_ENDS | {"use_bias": True}),
    "hunyuan": Sample("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", changes=NO_ENDS),
    "hunyuan_alpha": Sample(
        "HunYuanDenseV1ForCausalLM",
        "HunYuanDenseV1Config",
        changes=NO_ENDS
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}},
    ),
    "gemma": Sample("GemmaForCausalLM", "GemmaConfig", 0.0, NO_ENDS),
    "gemma4": Sample("Gemma4ForCausalLM", "Gemma4TextConfig", 0.5, NO_ENDS | TWO_WIDTHS),
    "gemma4_tokens": Sample(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        0.5,
        NO_ENDS
        | TWO_WIDTHS
        | {"attention_k_eq_v": False, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 140},
    ),
    "gemma4_with_eyes": Sample(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        0.5,
        NO_ENDS | TWO_WIDTHS | {"tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "gpt2": Sample(
        "GPT2LMHeadModel",
        "GPT2Config",
        changes=NO_ENDS
        | {"hidden_size": 64, "n_inner": 96, "n_positions": 512, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gptj": Sample(
        "GPTJForCausalLM", "GPTJConfig", changes=NO_ENDS | {"hidden_size": 64, "rotary_dim": 8, "n_inner": 96}
    ),
    "gpt_neox": Sample("GPTNeoXForCausalLM", "GPTNeoXConfig", changes=NO_ENDS | {"hidden_size": 64}),
    "gpt_neox_one_after_the_other": Sample(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        changes=NO_ENDS | {"hidden_size": 64, "use_parallel_residual": False, "attention_bias": False},
    ),
    "falcon": Sample(
        "FalconForCausalLM",
        "FalconConfig",
        changes=NO_ENDS | {"hidden_size": 64, "ffn_hidden_size": 96},
        without=("head_dim",),
    ),
    "falcon_groups": Sample(
        "FalconForCausalLM",
        "FalconConfig",
        changes=NO_ENDS
        | {"hidden_size": 64, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        without=("head_dim",),
    ),
    "falcon_old": Sample(
        "FalconForCausalLM",
        "FalconConfig",
        changes=NO_ENDS | {"hidden_size": 64, "multi_query": False, "parallel_attn": False},
        without=("head_dim",),
    ),
    "glm4v": Sample(
        "Glm4vForConditionalGeneration", "Glm4vConfig", changes=NO_ENDS | IN_A_PLANE | {"eos_token_id": None}
    ),
    "glm46v": Sample("Glm46VForConditionalGeneration", "Glm46VConfig", changes=NO_ENDS | IN_A_PLANE),
    "helium": Sample("HeliumForCausalLM", "HeliumConfig", changes=NO_ENDS | {"hidden_size": 64}),
    "qwen2_vl": Sample("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", changes=NO_ENDS | IN_A_PLANE),
    "qwen2_5_vl": Sample(
        "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", changes=NO_ENDS | IN_A_PLANE
    ),
    "qwen3_vl": Sample("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", changes=NO_ENDS | IN_A_PLANE),
    "cohere": Sample("CohereForCausalLM", "CohereConfig", changes=NO_ENDS | {"logit_scale": 0.5}),
    "cohere_norms": Sample(
        "CohereForCausalLM",
        "CohereConfig",
        changes=NO_ENDS | {"use_qk_norm": True, "logit_scale": 0.5, "attention_bias": True},
    ),
    "cohere2": Sample(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        changes=NO_ENDS | {"hidden_size": 64, "sliding_window": WINDOW, "layer_types": LOCAL_AND_GLOBAL},
    ),
    "nemotron": Sample("NemotronForCausalLM", "NemotronConfig", 0.0, NO_ENDS | {"mlp_bias": True}),
    "apertus": Sample("ApertusForCausalLM", "ApertusConfig", changes=NO_ENDS),
    "starcoder2": Sample(
        "Starcoder2ForCausalLM", "Starcoder2Config", changes={"hidden_size": 64, "sliding_window": WINDOW}
    ),
    "phi": Sample("PhiForCausalLM", "PhiConfig", changes={"hidden_size": 64}),
    "stablelm": Sample(
        "StableLmForCausalLM", "StableLmConfig", changes={"hidden_size": 64, "use_qkv_bias": True}
    ),
    "stablelm_side_by_side": Sample(
        "StableLmForCausalLM", "StableLmConfig", changes={"hidden_size": 64, "use_parallel_residual": True}
    ),
    "arcee": Sample("ArceeForCausalLM", "ArceeConfig", changes=NO_ENDS | {"mlp_bias": True}),
    "opt": Sample(
        "OPTForCausalLM",
        "OPTConfig",
        changes=NO_ENDS
        | {"hidden_size": 64, "ffn_dim": 96, "num_key_value_heads": 4, "word_embed_proj_dim": 64},
    ),
}
