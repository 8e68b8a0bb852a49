"""StarCoder2: norms that take off the mean, biases everywhere, no gates."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import LayerSpec, ModelConfig
from eyas.engine.models import keys

RENAMED = ((".mlp.c_fc.", ".mlp.up_proj."), (".mlp.c_proj.", ".mlp.down_proj."))
DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True}


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """A `sliding_window` is every layer's. Where keys are left out they are `DEFAULTS`."""
    raw = DEFAULTS | dict(raw)
    raw = raw | {"rms_norm_eps": raw["norm_epsilon"]}
    attention = keys.biased(raw, "use_bias", keys.attention(raw))
    if raw.get("sliding_window") is not None:
        attention = dataclasses.replace(attention, window=keys.window_of(raw))
    layer = LayerSpec(attention, keys.plain_feed_forward(raw, bias=attention.qkv_bias))
    plain = keys.decoder(raw, folder, [layer] * keys.count(raw), tied=True)
    return dataclasses.replace(plain, centred=True, norm_bias=True, renamed=RENAMED)
