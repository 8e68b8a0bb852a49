"""The keys of a config.json that families share, read into specifications.

A family's file puts these together and adds what is its own. It knows spellings and defaults as transformers
has them. A missing key is a KeyError and a value of the wrong kind a ValueError, as
`eyas.engine.checkpoint.values` raises them; `reading` makes one sentence of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.fused_tensors import FusedTensor
from eyas.engine.checkpoint.methods import read_quantized
from eyas.engine.checkpoint.quantized import QUANTIZED
from eyas.engine.checkpoint.rope import DEFAULT_ROPE_THETA, MOST_CONTEXT, RopeConfig
from eyas.engine.checkpoint.transposed_tensors import GroupsTensor
from eyas.engine.checkpoint.values import MOST, Raw, number, numbers, said, section, switch, whole, words

MOST_LAYERS, MOST_HEADS, MOST_COLUMNS = 4096, 65536, 2**24
"""Of a model: far above any that there is, so that a slip of the pen is no attempt to make it."""

_ACTIVATIONS: dict[str, str] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


_UNGATED: dict[str, str] = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "xielu": "xielu",
}


class Fit:
    """The complaints of a draft head that does not fit its target, raised all at once."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the head's."""
        self._folder = folder
        self._complaints: list[str] = []

    def wants(self, holds: bool, complaint: str) -> None:
        """Notes the complaint, unless it holds."""
        if not holds:
            self._complaints.append(complaint)

    def settle(self) -> None:
        """Raises one ConfigError with all complaints, if there are any."""
        if self._complaints:
            raise ConfigError(f"draft head {self._folder}: {'; '.join(self._complaints)}")


@contextlib.contextmanager
def reading(folder: Path | str, raw: Raw | None = None) -> Iterator[None]:
    """Around what reads a config.json: a key that is missing or unusable is a ConfigError. So is a slip in
    the family's own file: the exception that tells of it is the cause. `raw`: what the file says, where a
    family may read it under other names.
    """
    try:
        yield
    except ConfigError as refused:
        if refused.param is not None or str(folder) in refused.message:
            raise
        raise ConfigError(f"config.json of {folder}: {refused.message}") from refused
    except KeyError as missing:
        raise ConfigError(f"config.json of {folder} has no {missing.args[0]}") from missing
    except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        text = (
            f"config.json of {folder} holds a value of the wrong kind: {error}{_as_stated(raw or {}, error)}"
        )
        raise ConfigError(text) from error


def _as_stated(raw: Raw, error: Exception) -> str:
    """How config.json calls a field that an error names as other families do; "": just so, or unknown."""
    text, stated = str(error), raw
    if isinstance(raw.get("text_config"), Mapping):
        stated = {**raw, **raw["text_config"]}
    name = text.partition(" ")[0]
    matching = [key for key, value in stated.items() if text.startswith(f"{name} {said(value)} must")]
    return f" ({' or '.join(matching)} there)" if matching and name not in matching else ""


def attention(raw: Raw, rope: RopeConfig | None = None) -> AttentionSpec:
    """Plain grouped-query attention with the configured heads; `rope`: instead of the configured one."""
    heads = whole(raw, "num_attention_heads", least=1, most=MOST_HEADS)
    dim = whole(raw, "head_dim", whole(raw, "hidden_size", least=1) // heads, least=1, most=MOST_HEADS)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=whole(raw, "num_key_value_heads", heads, least=1, most=MOST_HEADS),
        head_dim=dim,
        rope=rope or read_rope(raw, rope_scaling(raw)),
        scale=dim**-0.5,
    )


def feed_forward(raw: Raw, activation: str | None = None) -> FeedForwardSpec:
    """A gated one; `activation`: its name, if "hidden_act" does not hold it. ConfigError if it is unknown."""
    name = raw.get("hidden_act", "silu") if activation is None else activation
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        field = next(
            (key for key in ("hidden_act", "hidden_activation") if raw.get(key) == name), "hidden_act"
        )
        raise ConfigError(f"{field} {said(name)} is not supported ({' and '.join(_ACTIVATIONS)} are)")
    return FeedForwardSpec(width_of(raw, "intermediate_size"), _ACTIVATIONS[name])


def local_experts(raw: Raw, scores: str) -> ExpertsSpec:
    """Experts under Mixtral's keys, as wide as `feed_forward`; the weights of the chosen are normalised."""
    dense = feed_forward(raw)
    return ExpertsSpec(
        width=dense.width,
        activation=dense.activation,
        experts=whole(raw, "num_local_experts", most=MOST_HEADS),
        per_row=whole(raw, "num_experts_per_tok"),
        scores=scores,
        normalised=True,
    )


def plain_feed_forward(raw: Raw, *, bias: bool = False) -> FeedForwardSpec:
    """One without a gate; `bias`: of up and down. ConfigError for an activation that is unknown."""
    name = raw["hidden_act"]
    if not isinstance(name, str) or name not in _UNGATED:
        raise ConfigError(f"hidden_act {said(name)} is not supported ({' and '.join(_UNGATED)} are)")
    return FeedForwardSpec(width_of(raw, "intermediate_size"), _UNGATED[name], bias, gated=False)


def gate_up(spec: FeedForwardSpec) -> FusedTensor:
    """The tensor of a feed-forward's gate and up, stored as one."""
    return FusedTensor("gate_up_proj", (("gate_proj", spec.width), ("up_proj", spec.width)))


def qkv_by_heads(name: str, spec: AttentionSpec) -> GroupsTensor:
    """The tensor of q, k and v, stored by key heads: the query heads of each, then itself and its value's."""
    queries, dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    return GroupsTensor(
        name, spec.num_kv_heads, (("q_proj", queries * dim), ("k_proj", dim), ("v_proj", dim))
    )


def width_of(raw: Raw, name: str) -> int:
    """How many columns or rows of a matrix the field says."""
    return whole(raw, name, least=1, most=MOST_COLUMNS)


def decoder(raw: Raw, folder: Path, layers: Sequence[LayerSpec], *, tied: bool = False) -> ModelConfig:
    """The common part. `tied`: the meaning of a config.json without that key.

    Raises ConfigError, by name, for what no code here computes.
    """
    if switch(raw, "mlp_bias", False) and not all(layer.feed_forward.bias for layer in layers):
        raise ConfigError(f"config.json of {folder}: mlp_bias is not supported")
    return ModelConfig(
        folder=folder,
        architecture=next(iter(words(raw, "architectures")), ""),
        vocab_size=width_of(raw, "vocab_size"),
        hidden_size=width_of(raw, "hidden_size"),
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        layers=tuple(layers),
        context_length=_context_length(raw, layers),
        tied_head=switch(raw, "tie_word_embeddings", tied),
        quantized=read_quantized(raw),
    )


def count(raw: Raw) -> int:
    """How many layers there are."""
    return whole(raw, "num_hidden_layers", least=1, most=MOST_LAYERS)


def layer_windows(raw: Raw, default: Sequence[bool]) -> list[int]:
    """Each layer's window, 0 where it sees everything: as `layer_types` says, or `default` without it."""
    kinds = words(raw, "layer_types")
    windowed = [kind == "sliding_attention" for kind in kinds] if kinds else list(default)
    if len(windowed) != count(raw) or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ConfigError(
            f"layer_types {said(kinds)} are not sliding_attention or full_attention for each layer"
        )
    return [window_of(raw) if within else 0 for within in windowed]


def window_of(raw: Raw) -> int:
    """The tokens of `sliding_window`; a layer complains of one below 0."""
    return whole(raw, "sliding_window", least=-MOST)


TEXT_NAMES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""The names of a language model's tensors in a checkpoint that reads images too, and here."""


def text_of(raw: Raw) -> Raw:
    """The keys of the language model of such a checkpoint: of its `text_config`, if it has one."""
    if "text_config" not in raw:
        return raw
    names = ("architectures", "tie_word_embeddings", *QUANTIZED)
    return dict(section(raw, "text_config")) | {
        name: raw[name] for name in names if raw.get(name) is not None
    }


def tied_in_either(raw: Raw) -> Raw:
    """The keys of such a checkpoint, whose head is the embedding if it says so, or its `text_config` does."""
    inner = switch(section(raw, "text_config"), "tie_word_embeddings", False)
    return dict(raw) | {"tie_word_embeddings": True} if inner else raw


def biased(raw: Raw, name: str, plain: AttentionSpec) -> AttentionSpec:
    """The attention with biases of q, k, v and o, if the key of that name says so."""
    bias = switch(raw, name, False)
    return dataclasses.replace(plain, qkv_bias=bias, output_bias=bias)


def rope_scaling(raw: Raw) -> Raw:
    """`rope_parameters` (transformers 5) or `rope_scaling` (older); {} where there is neither.

    ConfigError for what is apart for each kind of layer, and as `one_of_both`.
    """
    scaling = one_of_both(raw.get("rope_parameters"), raw.get("rope_scaling"))
    if kinds := [key for key, value in scaling.items() if isinstance(value, Mapping)]:
        raise ConfigError(f"rope_parameters of {' and '.join(kinds)} apart are not supported here")
    return scaling


def ropes_of_kinds(raw: Raw, theta: float, local_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """The RoPE of layers that see everything and of those with a window: each its own `rope_parameters`, or
    in the older spelling `rope_scaling`, of the first kind alone. `theta`, `local_theta`: where none is said.
    """
    named, older = section(raw, "rope_parameters"), raw.get("rope_scaling")
    if raw.get("rope_parameters") is None:
        return read_rope(raw, one_of_both(None, older), theta), RopeConfig(theta=local_theta)
    if strange := sorted(set(named) - {"full_attention", "sliding_attention"}):
        raise ConfigError(
            f"rope_parameters has {', '.join(strange)} outside full_attention and sliding_attention"
        )
    everywhere = read_rope(raw, one_of_both(named.get("full_attention"), older), theta)
    return everywhere, read_rope({}, one_of_both(named.get("sliding_attention"), None), local_theta)


def one_of_both(parameters: Any, scaling: Any) -> Raw:
    """The scaling of `rope_parameters`, or without it of `rope_scaling`.

    Raises ConfigError if they differ in more than a theta that the second leaves out: readers of config.json
    disagree on which of them counts.
    """
    newer, older = _spelt("rope_parameters", parameters), _spelt("rope_scaling", scaling)
    if newer and older:
        keys = dict.fromkeys((*older, *(key for key in newer if key != "rope_theta")))
        if odd := [key for key in keys if newer.get(key) != older.get(key)]:
            raise ConfigError(
                f"rope_scaling and rope_parameters differ in {', '.join(odd)}: keep one of them"
            )
    return newer or older


def _spelt(name: str, value: Any) -> Raw:
    """The scaling of that field with the kind under its newer name alone."""
    scaling = section({name: value}, name)
    kinds = [scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None]
    others = {key: value for key, value in scaling.items() if key not in ("rope_type", "type")}
    return others | ({"rope_type": kinds[0]} if kinds else {})


def read_rope(raw: Raw, scaling: Mapping[str, Any], theta: float = DEFAULT_ROPE_THETA) -> RopeConfig:
    """`scaling`: `rope_parameters` (transformers 5), or `rope_scaling` beside `rope_theta` (older).

    `theta`: where neither says. Raises ConfigError for a kind that is not listed at `RopeConfig`.
    """
    read = partial(number, scaling, within="rope_scaling")
    theta = read("rope_theta", number(raw, "rope_theta", theta))
    share = read("partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0))
    return dataclasses.replace(_rope_of_kind(raw, scaling, theta), share=share)


def _rope_of_kind(raw: Raw, scaling: Mapping[str, Any], theta: float) -> RopeConfig:
    read = partial(number, scaling, within="rope_scaling")
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=read("factor"))
    if kind == "proportional":
        return RopeConfig(theta=theta, kind="proportional", factor=read("factor", 1.0))
    context = _trained(raw)
    if kind == "dynamic":
        return RopeConfig(theta=theta, kind="dynamic", factor=read("factor"), original_context=context)
    trained = whole(raw, "original_max_position_embeddings", context, least=1, most=MOST_CONTEXT)
    original = whole(scaling, "original_max_position_embeddings", trained, least=1, most=MOST_CONTEXT)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=read("factor"),
            low_freq_factor=read("low_freq_factor"),
            high_freq_factor=read("high_freq_factor"),
            original_context=original,
        )
    if kind == "yarn":
        factor = read("factor", context / original)
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_context=original,
            beta_fast=read("beta_fast", 32.0),
            beta_slow=read("beta_slow", 1.0),
            attention_factor=_yarn_attention_factor(scaling, factor),
            truncate=switch(scaling, "truncate", True),
        )
    if kind == "longrope":
        stretch = read("factor", context / original)
        usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1.0 else 1.0
        return RopeConfig(
            theta=theta,
            kind="longrope",
            original_context=original,
            attention_factor=read("attention_factor", usual),
            short_factors=numbers(scaling, "short_factor"),
            long_factors=numbers(scaling, "long_factor"),
        )
    known = "default, linear, dynamic, yarn, llama3, longrope and proportional are"
    raise ConfigError(f"rope_type {said(kind)} is not supported ({known})")


def _yarn_attention_factor(scaling: Raw, factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return number(scaling, "attention_factor", within="rope_scaling")
    scale, scale_all = (number(scaling, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    if scale and scale_all:
        return yarn_scale(factor, scale) / yarn_scale(factor, scale_all)
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, weight: float) -> float:
    """The factor of scores by which yarn widens positions that are stretched `factor` times (arXiv
    2309.00071, section 3.4).
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _context_length(raw: Raw, layers: Sequence[LayerSpec]) -> int:
    """The context in tokens. Dynamic and yarn stretch what max_position_embeddings may still say of the
    training."""
    ropes = {layer.attention.rope for layer in layers}
    stretched = (int(r.original_context * r.factor) for r in ropes if r.kind in ("dynamic", "yarn"))
    return max([_trained(raw), *stretched])


def _trained(raw: Raw) -> int:
    """The tokens of a context in training."""
    return whole(raw, "max_position_embeddings", 2048, least=1, most=MOST_CONTEXT)
