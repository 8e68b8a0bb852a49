"""Families that have no file here and that transformers computes: tiny random ones, by name."""

from __future__ import annotations

from tests.unit.family_sample import VOCAB, Sample

NARROW = {"vocab_size": VOCAB, "eos_token_id": None, "bos_token_id": None}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 512, "tie_word_embeddings": False}

FOREIGN = {
    "olmo": Sample("OlmoForCausalLM", "OlmoConfig", changes={"clip_qkv": 0.3, "pad_token_id": None}),
    "gpt_bigcode": Sample("GPTBigCodeForCausalLM", "GPTBigCodeConfig", changes=NARROW | GPT2),
    "minicpm3": Sample(
        "MiniCPM3ForCausalLM",
        "MiniCPM3Config",
        changes={
            "num_key_value_heads": 4,
            "head_dim": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
        },
    ),
    "exaone_moe": Sample(
        "ExaoneMoeForCausalLM",
        "ExaoneMoeConfig",
        changes={
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "cwm": Sample(
        "CwmForCausalLM",
        "CwmConfig",
        changes={
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "eos_token_id": 0,
            "bos_token_id": 0,
        },
    ),
    "nanochat": Sample("NanoChatForCausalLM", "NanoChatConfig"),
}
