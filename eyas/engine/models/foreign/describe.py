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
from eyas.engine.models.foreign.classes import model_class, refuse
from eyas.engine.models.foreign.probe import LayerCall, Unserved, judge
from eyas.engine.models.keys import MOST_COLUMNS, MOST_HEADS, MOST_LAYERS
from eyas.engine.models.refusal import HEAD_DIMS
from eyas.engine.models.unserved import ITSELF, OWN_FILE

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_FOLLOWING = ("dynamic", "longrope")
"""Kinds of RoPE that transformers changes with the longest sequence of a batch."""

_SIZES = {
    "num_hidden_layers": MOST_LAYERS,
    "num_attention_heads": MOST_HEADS,
    "num_key_value_heads": MOST_HEADS,
    "head_dim": MOST_HEADS,
    "hidden_size": MOST_COLUMNS,
    "vocab_size": MOST_COLUMNS,
    **dict.fromkeys(_LENGTHS, values.MOST),
}
"""By transformers' names: the largest that is no slip of the pen. None is below 1."""

_NOT_MEANT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """The model, as far as Eyas needs to know it. Raises ConfigError for what it cannot serve so."""
    config, model = model_class(raw, folder)
    _check_sizes(config)
    length = _context_length(config)
    if kind := _following_rope(config):
        refuse(
            raw, folder, f"its {kind} RoPE follows the longest sequence of a step in transformers: {OWN_FILE}"
        )
    try:
        judgement = judge(config, model, length)
    except Unserved as why:
        refuse(raw, folder, f"its code in transformers {why}: {ITSELF}, {OWN_FILE}")
        raise AssertionError from why
    except Exception as error:
        text = _unknown_word(raw, error) or f"{' '.join(str(error).split())} (with {_sizes_of(config)})"
        raise ConfigError(f"config.json of {folder} describes no model to transformers: {text}") from error
    dim = _served_dim(max(max(call.key_dim, call.value_dim) for call in judgement.calls))
    stated = {name: value for name, value in raw.items() if name not in _NOT_MEANT}
    return ModelConfig(
        folder=folder,
        architecture=model.__name__,
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


def _check_sizes(config: Any) -> None:
    """Raises ValueError, by the name that config.json has for it, for a size that no model has."""
    for name, most in _SIZES.items():
        value = getattr(config, name, None)
        if value is not None and not isinstance(value, list):  # some have one for each layer
            values.whole_number(config.attribute_map.get(name, name), value, 1, most)


def _sizes_of(config: Any) -> str:
    """The sizes that config.json states or leaves to transformers: one of them does not fit the others."""
    sizes = {config.attribute_map.get(name, name): getattr(config, name, None) for name in _SIZES}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)


def _unknown_word(raw: values.Raw, error: Exception) -> str:
    """Which field holds the word that transformers looked up in vain; "": the error is another one."""
    if not isinstance(error, KeyError) or not error.args:
        return ""
    fields = [name for name, value in raw.items() if value == error.args[0]]
    return f"{' and '.join(fields)} {values.said(error.args[0])} is nothing that it knows" if fields else ""


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
