"""Random-weight models of each family as transformers builds and stores them: small, all specials on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.unit.dense_families import DENSE, EYES
from tests.unit.expert_families import WITH_EXPERTS
from tests.unit.family_sample import SIZES, VOCAB, WINDOW, Sample

__all__ = ["SAMPLES", "SIZES", "VOCAB", "WINDOW", "Sample", "family_config", "write_family"]

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PHI: dict[str, Any] = {"hidden_size": 64, "pad_token_id": None}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.2],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 9.0],
    "original_max_position_embeddings": 64,
}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "pad_token_id": None, "bos_token_id": 1}
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"] * 2


def _llama(**rope: Any) -> Sample:
    return Sample("LlamaForCausalLM", "LlamaConfig", changes={"rope_parameters": rope} if rope else {})


EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
}
GROUPS = {"n_group": 4, "topk_group": 2}


def _deepseek(version: int, **changes: Any) -> Sample:
    """Without `head_dim`, which there means something else."""
    config, model = (f"DeepseekV{version}{what}" for what in ("Config", "ForCausalLM"))
    return Sample(model, config, changes=EXPERTS | LATENT | {"head_dim": 8} | changes)


SAMPLES = {
    "deepseek_v3": _deepseek(3, **GROUPS, routed_scaling_factor=2.5),
    "deepseek_v3_halves": _deepseek(3, **GROUPS, rope_interleave=False, rms_norm_eps=1e-3),
    "deepseek_v3_biases": _deepseek(3, **GROUPS, attention_bias=True),
    "deepseek_v2": _deepseek(2, **GROUPS, topk_method="group_limited_greedy", routed_scaling_factor=16.0),
    "deepseek_v2_lite": _deepseek(2, topk_method="greedy", q_lora_rank=None, routed_scaling_factor=1.0),
    "kimi_k2": _deepseek(3, n_group=1, topk_group=1, routed_scaling_factor=2.827),
    "mixtral": Sample("MixtralForCausalLM", "MixtralConfig", changes={"num_local_experts": 4}),
    "mixtral_window": Sample(
        "MixtralForCausalLM", "MixtralConfig", changes={"num_local_experts": 4, "sliding_window": WINDOW}
    ),
    "qwen3_moe": Sample(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        changes=EXPERTS | {"num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3_moe_shares": Sample(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        changes=EXPERTS | {"num_experts": 8, "norm_topk_prob": False, "decoder_sparse_step": 2},
    ),
    "qwen3_moe_window": Sample(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        changes=EXPERTS | {"num_experts": 8, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "llama": _llama(),
    "llama_biases": Sample("LlamaForCausalLM", "LlamaConfig", changes={"attention_bias": True}),
    "llama_linear": _llama(rope_type="linear", rope_theta=10000.0, factor=4.0),
    "llama_llama3": _llama(**LLAMA3),
    "llama_yarn": _llama(**YARN),
    "llama_yarn_scaled": _llama(**YARN, mscale=1.0, mscale_all_dim=0.7, beta_fast=16.0, truncate=False),
    "ministral": Sample(
        "MinistralForCausalLM",
        "MinistralConfig",
        changes={"sliding_window": WINDOW, "layer_types": LOCAL_AND_GLOBAL},
    ),
    "mistral": Sample("MistralForCausalLM", "MistralConfig", changes={"sliding_window": WINDOW}),
    "mistral_no_window": Sample("MistralForCausalLM", "MistralConfig", changes={"sliding_window": None}),
    "olmo2": Sample("Olmo2ForCausalLM", "Olmo2Config", changes={"attention_bias": True}),
    "phi3": Sample(
        "Phi3ForCausalLM",
        "Phi3Config",
        changes=PHI
        | {"rope_parameters": LONG, "original_max_position_embeddings": 64, "sliding_window": WINDOW},
    ),
    "phi3_short": Sample("Phi3ForCausalLM", "Phi3Config", changes=PHI | {"partial_rotary_factor": 0.5}),
    "qwen2": Sample("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen2_windows": Sample(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        changes={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": Sample("Qwen3ForCausalLM", "Qwen3Config"),
    "gemma2": Sample(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        0.0,
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": Sample(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        0.0,
        GEMMA | {"layer_types": LOCAL_AND_GLOBAL, "final_logit_softcapping": 5.0},
    ),
    "gemma3_with_eyes": Sample("Gemma3ForConditionalGeneration", "Gemma3Config", 0.0, GEMMA),
    "gemma3_linear": Sample(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        0.0,
        GEMMA
        | {
            "num_hidden_layers": 7,  # the pattern of six
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    **DENSE,
    **WITH_EXPERTS,
}


SEEING = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def write_family(folder: Path, name: str, *, std: float = 0.2, **changes: Any) -> Any:
    """Stores the sample, with `changes` to its configuration; gives transformers' model, float32, eager.

    `std`: the standard deviation of all weights.
    """
    sample, config = SAMPLES[name], family_config(name, **changes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, sample.model)(config).eval()
    with torch.no_grad():
        for tensor, weight in model.named_parameters():
            weight.normal_(mean=sample.gain if "norm" in tensor or ".ln_" in tensor else 0.0, std=std)
        for tensor, bias in model.named_buffers():
            if tensor.endswith("e_score_correction_bias"):
                bias.normal_(std=std)
            if tensor.endswith("layer_scalar"):
                bias.uniform_(0.7, 1.4)
    model.save_pretrained(folder)
    return model


def family_config(name: str, **changes: Any) -> Any:
    """transformers' configuration of the sample, with `changes`."""
    sample = SAMPLES[name]
    sizes = copy.deepcopy(SIZES | sample.changes | changes)  # transformers writes into what it reads
    sizes = {name: size for name, size in sizes.items() if name not in sample.without}
    if sample.config == "Gemma3Config":
        return transformers.Gemma3Config(text_config=sizes, vision_config=SEEING, mm_tokens_per_image=4)
    configured = getattr(transformers, sample.config)
    if not sample.model.endswith("ForConditionalGeneration"):
        return configured(**sizes)
    tied = sizes.get("tie_word_embeddings", False)
    return configured(text_config=sizes, vision_config=dict(EYES), tie_word_embeddings=tied)
