"""Attention in plain torch where layers differ in their heads: a `TorchAttention` for each kind of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from eyas.engine.attention.base import AttentionBackend, AttentionPlan
from eyas.engine.attention.torch_backend import KeyVisibility, TorchAttention
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import AttentionSpec, ModelConfig
from eyas.engine.ipc.pulse import Beat, no_pulse
from eyas.engine.kv.pool import PoolShape

Heads = tuple[int, int]
"""Key and value heads of a layer, and the elements of each."""


@dataclass(frozen=True)
class _PlanOfKinds(AttentionPlan):
    each: Mapping[Heads, AttentionPlan]


class UnevenAttention(AttentionBackend):
    """Attention of all layers of `config`, whose rows in the pool are as `KvPool.layer` says."""

    def __init__(self, config: ModelConfig, shape: PoolShape, beat: Beat = no_pulse) -> None:
        kinds: dict[Heads, set[KeyVisibility]] = {}
        for layer in config.layers:
            kinds.setdefault(_heads(layer.attention), set()).add(KeyVisibility.of(layer.attention))
        self.device, self.groups = shape.device, max(len(shape.groups), 1)
        self._each = {
            heads: TorchAttention(config.num_heads, _shape_of(shape, heads), sights, beat)
            for heads, sights in kinds.items()
        }

    def plan(self, spans: Sequence[QuerySpan], group: int = 0) -> _PlanOfKinds:
        return _PlanOfKinds({heads: each.plan(spans, group) for heads, each in self._each.items()})

    def run(
        self,
        q: torch.Tensor,
        layer_pool: torch.Tensor,
        plan: AttentionPlan,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, _PlanOfKinds)
        heads = _heads(spec)
        return self._each[heads].run(q, layer_pool, plan.each[heads], spec, sinks)


def torch_attention(config: ModelConfig, shape: PoolShape, beat: Beat = no_pulse) -> AttentionBackend:
    """The attention of all layers of a decoder."""
    if config.uneven_heads:
        return UnevenAttention(config, shape, beat)
    return TorchAttention.of(config, shape, beat)


def _heads(spec: AttentionSpec) -> Heads:
    return spec.num_kv_heads, spec.head_dim


def _shape_of(shape: PoolShape, heads: Heads) -> PoolShape:
    """The pool as one for layers of those heads alone."""
    return replace(shape, format=replace(shape.format, kv_heads=heads[0], head_dim=heads[1]))
