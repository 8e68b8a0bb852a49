"""Runs a model of transformers once, without weights, and notes how each of its layers attends.

All tensors are on the device "meta": no number is computed. What Eyas' attention has no words for is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from eyas.engine.models.foreign.seams import JUDGED, TwoParts, attends_by, register

ROWS = 8
"""Of the run: any number would do."""

_SAID_ELSEWHERE = frozenset(
    {
        "attention_mask",
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "target_dtype",
        "use_cache",
    }
)
"""Arguments of attention beside queries, keys and values that change nothing: masks say what a window is."""


class Unserved(ValueError):
    """A part of a model that Eyas' attention cannot do, in words that follow its name."""


@dataclass(frozen=True)
class LayerCall:
    """How the module of that name attends. `window`, `chunk`, `soft_cap`, `sinks`: as of `AttentionSpec`.
    `value_dim`: elements of a value, if they are fewer than a key's.
    """

    module: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    sinks: bool = False


@dataclass(frozen=True)
class Judgement:
    """A model's layers, in the order in which they attend; its sizes, and the elements of its weights."""

    calls: tuple[LayerCall, ...]
    vocab_size: int
    hidden_size: int
    elements: int


@dataclass
class _Notes:
    length: int
    calls: list[LayerCall] = field(default_factory=list)

    def attend(
        self,
        name: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **said: Any,
    ) -> torch.Tensor:
        window, chunk = seen_by(mask, self.length, said.get("sliding_window"))
        _check_said(said)
        heads, kv_heads, rows = query.shape[1], key.shape[1], query.shape[2]
        shapes = (*key.shape[:3], *value.shape[:3])
        if query.shape[0] != 1 or rows != ROWS or shapes != (1, kv_heads, ROWS) * 2:
            raise Unserved("attends with queries, keys and values of other rows than its input's")
        if heads % kv_heads or query.shape[3] != key.shape[3]:
            raise Unserved("attends with heads of queries that do not fit those of keys")
        scale = said.get("scaling")
        call = LayerCall(
            name,
            heads,
            kv_heads,
            key.shape[3],
            value.shape[3],
            key.shape[3] ** -0.5 if scale is None else _number("scaling", scale),
            window,
            chunk,
            _number("softcap", said.get("softcap") or 0.0),
            said.get("s_aux") is not None,
        )
        self.calls.append(call)
        return query.new_empty(1, rows, heads, value.shape[3])


def judge(config: Any, model_class: Any, length: int) -> Judgement:
    """How a model of this configuration attends in a context of `length` tokens.

    Raises `Unserved` for what cannot be done over pages.
    """
    register()
    attends_by(config, JUDGED)
    config._experts_implementation = JUDGED
    with torch.device("meta"):
        model = model_class(config).eval()
    notes, elements = _Notes(length), sum(each.numel() for each in model.parameters())
    for name, module in model.named_modules():
        module.attend_by = partial(notes.attend, name)
    numbers = torch.zeros(ROWS, dtype=torch.int64, device="meta")
    try:
        parts = TwoParts(model)
        with torch.no_grad():
            rows = parts.rows(numbers, numbers, attention_mask=torch.ones_like(numbers)[None])
            logits = parts.logits(rows)
    except Unserved:
        raise
    except NotImplementedError as error:
        raise Unserved("looks at values to decide what it computes") from error
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise Unserved("looks at values to decide what it computes") from error
    _check_calls(notes.calls, int(config.num_hidden_layers))
    if logits.shape[0] != ROWS or rows.shape[0] != ROWS:
        raise Unserved("gives other rows than its input has")
    return Judgement(tuple(notes.calls), logits.shape[1], rows.shape[1], elements)


def seen_by(mask: torch.Tensor | None, length: int, window: int | None) -> tuple[int, int]:
    """The window and the chunk, as of `AttentionSpec`, that a mask of `judged_mask` stands for.

    `window`: the one that attention gets, which counts where there is no mask.
    """
    if mask is None:
        return int(window or 0), 0
    whole = mask if mask._base is None else mask._base
    sees = getattr(whole, "sees", None)
    if sees is None:
        raise Unserved("makes attention masks of its own")
    last, places = length - 1, torch.arange(length)

    def lowest(query: int) -> int:
        try:
            seen = sees(torch.tensor(0), torch.tensor(0), torch.tensor(query), places).expand(length)
        except (RuntimeError, IndexError) as error:
            raise Unserved("makes attention masks that follow their input") from error
        first = int(seen.int().argmax())
        if not bool(seen[first : query + 1].all()) or int(seen.sum()) != query + 1 - first:
            raise Unserved("sees more than the tokens before its own, or not all that follow one another")
        return first

    samples = {query: lowest(query) for query in {last, last // 2 + 1, last * 2 // 3, last // 3, 0}}
    if not any(samples.values()):
        return 0, 0
    size = last - samples[last] + 1
    if all(first == max(0, query - size + 1) for query, first in samples.items()):
        return size, 0
    chunk = next((at for at in range(1, length) if lowest(at) == at), 0)
    if chunk and all(first == query // chunk * chunk for query, first in samples.items()):
        return 0, chunk
    raise Unserved("sees parts of a sequence by a rule that is neither a window nor a chunk")


def _check_said(said: Mapping[str, Any]) -> None:
    """Raises Unserved for an argument of attention that Eyas' attention does not have."""
    if said.get("dropout"):
        raise Unserved("drops a part of its attention by chance (dropout)")
    known = _SAID_ELSEWHERE | {"dropout", "scaling", "softcap", "s_aux"}
    if odd := sorted(name for name, value in said.items() if value is not None and name not in known):
        raise Unserved(f"tells its attention {' and '.join(odd)}, which Eyas' does not know")


def _check_calls(calls: list[LayerCall], layers: int) -> None:
    modules = [call.module for call in calls]
    if len(set(modules)) != len(modules):
        raise Unserved("attends more than once in a layer, or runs layers more than once")
    if len(calls) < layers:
        raise Unserved(
            f"attends in {len(calls)} of its {layers} layers: the others keep a state that pages do not hold"
        )
    if len(calls) > layers:
        raise Unserved(f"attends {len(calls)} times in {layers} layers")
    shapes = {(call.heads, call.kv_heads) for call in calls}
    if len(shapes) > 1:
        raise Unserved("has other numbers of heads in some layers, and a pool has one")


def _number(name: str, value: Any) -> float:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise Unserved(f"tells its attention a {name} that is no number")
