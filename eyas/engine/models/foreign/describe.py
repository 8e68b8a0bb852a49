"""Describes a decoder that transformers computes: by running its code once without weights.

What its layers are made of stays transformers' business; a `ModelConfig` says how each attends, and what a
pool holds of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import (
    AttentionSpec,
    FeedForwardSpec,
    ForeignModel,
    LayerSpec,
    ModelConfig,
)
from eyas.engine.checkpoint.rope import MOST_CONTEXT, NO_ROPE
from eyas.engine.models.foreign.classes import ITSELF, OWN_FILE, model_class, refuse
from eyas.engine.models.foreign.probe import LayerCall, Unserved, judge
from eyas.engine.models.keys import MOST_LAYERS
from eyas.engine.models.refusal import HEAD_DIMS

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_FOLLOWING = ("dynamic", "longrope")
"""Kinds of RoPE that transformers changes with the longest sequence of a batch."""

_NOT_MEANT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The model, as far as Eyas needs to know it. Raises ConfigError for what it cannot serve so."""
    config, found = model_class(raw, folder)
    length = _context_length(config)
    if (layers := getattr(config, "num_hidden_layers", 0)) > MOST_LAYERS:
        raise ConfigError(f"config.json of {folder}: {layers} layers are more than {MOST_LAYERS}")
    if kind := _following_rope(config):
        refuse(
            raw, folder, f"its {kind} RoPE follows the longest sequence of a step in transformers: {OWN_FILE}"
        )
    try:
        judgement = judge(config, found, length)
    except Unserved as why:
        refuse(raw, folder, f"its code in transformers {why}: {ITSELF}, {OWN_FILE}")
        raise AssertionError from why
    except Exception as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"config.json of {folder} describes no model to transformers: {text}") from error
    dim = _served_dim(max(max(call.key_dim, call.value_dim) for call in judgement.calls))
    stated = {name: value for name, value in raw.items() if name not in _NOT_MEANT}
    return ModelConfig(
        folder=folder,
        architecture=found.__name__,
        vocab_size=judgement.vocab_size,
        hidden_size=judgement.hidden_size,
        norm_eps=0.0,
        layers=tuple(LayerSpec(_attention(call, dim), FeedForwardSpec(0)) for call in judgement.calls),
        context_length=length,
        tied_head=bool(getattr(config, "tie_word_embeddings", False)),
        foreign=ForeignModel(
            json.dumps(stated, sort_keys=True),
            judgement.elements,
            tuple(call.module for call in judgement.calls),
        ),
    )


def _attention(call: LayerCall, dim: int) -> AttentionSpec:
    return AttentionSpec(
        num_heads=call.heads,
        num_kv_heads=call.kv_heads,
        head_dim=dim,
        rope=NO_ROPE,
        scale=call.scale,
        window=call.window,
        soft_cap=call.soft_cap,
        sinks=call.sinks,
        chunk=call.chunk,
    )


def _served_dim(elements: int) -> int:
    """The elements of a head in the pool: kernels know a few sizes, and zeros fill the rest."""
    return next((dim for dim in HEAD_DIMS if dim >= elements), elements + elements % 2)


def _context_length(config: Any) -> int:
    stated = (getattr(config, name, None) for name in _LENGTHS)
    length = next((value for value in stated if isinstance(value, int) and value > 0), 2048)
    return min(length, MOST_CONTEXT)


def _following_rope(config: Any) -> str:
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [ropes.get("rope_type")] + [r.get("rope_type") for r in ropes.values() if isinstance(r, dict)]
    return next((kind for kind in kinds if kind in _FOLLOWING), "")
