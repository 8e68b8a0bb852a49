"""LFM2 with experts, all but its first layers: chosen by scores with a stored correction."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.stacked_tensors import StackedTensor
from eyas.engine.models import deepseek, keys, lfm2

DEFAULTS = lfm2.DEFAULTS | {"norm_topk_prob": True, "num_dense_layers": 2}
"""What a config.json may leave out."""

RENAMED = (*lfm2.RENAMED, (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"))
STACKED = (
    StackedTensor("experts.gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
    StackedTensor("experts.down_proj", ("down_proj.weight",)),
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Experts are stored one by one, or all as one."""
    raw = DEFAULTS | dict(raw)
    experts = deepseek.corrected_experts(
        raw | {"hidden_act": "silu", "n_routed_experts": raw["num_experts"], "n_shared_experts": 0}
    )
    experts = dataclasses.replace(experts, corrected=values.switch(raw, "use_expert_bias", True))
    first, dense = values.whole(raw, "num_dense_layers"), keys.feed_forward(raw, "silu")
    parts = [experts if layer >= first else dense for layer in range(keys.count(raw))]
    plain = lfm2.decoder(raw, folder, parts)
    return dataclasses.replace(plain, renamed=RENAMED, fused=STACKED)
