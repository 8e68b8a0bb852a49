"""Samples of the families with experts that have a special of their own."""

from __future__ import annotations

from typing import Any

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

WITH_EXPERTS: dict[str, Sample] = {
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
}
