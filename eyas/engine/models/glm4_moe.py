"""GLM-4.5, 4.6 and 4.7 with experts: plain heads, rotated in part, over DeepSeek-V3's experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.models import deepseek, keys

DEFAULTS = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "norm_topk_prob": True}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`attention_bias` stands for biases of q, k and v; of `use_qk_norm` heads of q and k are normalised."""
    raw = DEFAULTS | dict(raw)
    attention = dataclasses.replace(
        keys.attention(raw),
        qkv_bias=values.switch(raw, "attention_bias", False),
        head_norms=values.switch(raw, "use_qk_norm", False),
    )
    return keys.decoder(raw, folder, deepseek.layers(raw, attention, deepseek.corrected_experts(raw)))
