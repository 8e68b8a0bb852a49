"""Sizes of hybrids that the device path runs, of one rank and of several."""

from __future__ import annotations

from typing import Any

VOCAB = 16  # few ids: what is looked up is often right
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "eos_token_id": None,
}
RANKS = {
    "vocab_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
