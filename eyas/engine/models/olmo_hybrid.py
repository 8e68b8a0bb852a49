"""OLMo-Hybrid: three of four layers with a state of the gated delta rule, whose corrections reach 2; the
others are OLMo 3's, without windows, and in published models rotate nothing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig, NormNames
from eyas.engine.checkpoint.rope import NO_ROPE
from eyas.engine.models import keys, kimi_linear, olmo2, qwen3_next
from eyas.engine.states.shape import DeltaShape

STATE_EPS = 1e-5
"""Of the norm behind a state, whatever the model's own is."""

NAMES = (
    ("attention_layer_norm.", "input_layernorm."),
    ("feedforward_layer_norm.", "post_attention_layernorm."),
    *kimi_linear.STATE_NAMES,
)


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """Norms stand before the halves of a layer with a state, behind those of the others. A `rope_theta` that
    is null rotates nothing.
    """
    raw = {"max_position_embeddings": 65536} | dict(raw)
    bare = raw.get("rope_parameters") and values.section(raw, "rope_parameters").get("rope_theta", 0) is None
    attends = LayerSpec(olmo2.attention(raw, NO_ROPE if bare else None), keys.feed_forward(raw), olmo2.NORMS)
    recurs = dataclasses.replace(attends, norms=NormNames(), delta=_states(raw))
    layers = [recurs if each else attends for each in qwen3_next.recurring(raw)]
    return dataclasses.replace(keys.decoder(raw, folder, layers), renamed=NAMES)


def _states(raw: values.Raw) -> DeltaShape:
    """The shape of the states: by default as many heads as attend, with keys of 3/4 of their columns."""
    heads = values.whole(raw, "num_attention_heads", least=1, most=keys.MOST_HEADS)
    own = values.whole(raw, "linear_num_key_heads", heads, least=1, most=keys.MOST_HEADS)
    size = values.whole(
        raw,
        "linear_key_head_dim",
        3 * keys.width_of(raw, "hidden_size") // (4 * own),
        least=1,
        most=keys.MOST_HEADS,
    )
    stated = {name: value for name, value in raw.items() if value is not None}
    usual = {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": 2 * size,
        "linear_conv_kernel_dim": 4,
    }
    reach = 2.0 if values.switch(raw, "linear_allow_neg_eigval", True) else 1.0
    return dataclasses.replace(qwen3_next.delta(usual | stated), reach=reach, norm_eps=STATE_EPS)
