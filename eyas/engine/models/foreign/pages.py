"""Eyas' pages as the attention of one layer of a model that transformers computes.

Keys and values come as the model has made them, rotated or not; heads of a size that the pool does not have
are filled up with zeros, which change no score and no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from eyas.engine.attention.base import AttentionBackend, AttentionPlan
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.batch.rows import ForwardRows
from eyas.engine.checkpoint.config import AttentionSpec
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import skinny
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.rotary import BEYOND
from eyas.engine.models.ops.device_step import RowAttention


class StepPages(Protocol):
    """The pages of one forward's rows."""

    def attend(
        self, layer: int, spec: AttentionSpec, heads: Heads, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Writes keys and values of the rows to that layer -> what queries attend to, [m, heads, dim]."""


@dataclass(frozen=True)
class Heads:
    """Rows of queries [m, heads, dim], keys and values [m, kv heads, dim], as wide as the pool's."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: KvPool) -> Heads:
        """Heads from those of transformers, [1, heads, m, dim] each, in the layer's dtype."""
        return cls(*(_widened(part, pool.shape.head_dim) for part in (q, k, v)))


def _widened(part: torch.Tensor, dim: int) -> torch.Tensor:
    rows = part[0].transpose(0, 1)
    return F.pad(rows, (0, dim - rows.shape[-1])) if rows.shape[-1] < dim else rows


class PagesMachine(Protocol):
    """The pages that a foreign model attends to, on a CPU or a GPU."""

    def step(self, rows: Any, pool: KvPool) -> StepPages:
        """The pages of one forward."""


class PlainPages:
    """Pages in plain torch, over any backend: the specification of what a GPU computes."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def step(self, rows: ForwardBatch, pool: KvPool) -> StepPages:
        """The pages of one forward."""
        groups = [(pool.slots(group.kv_rows), group.plan) for group in rows.groups]
        return _PlainStep(self._backend, pool, groups)


@dataclass(frozen=True)
class _PlainStep:
    backend: AttentionBackend
    pool: KvPool
    groups: Sequence[tuple[torch.Tensor, AttentionPlan]]

    def attend(
        self, layer: int, spec: AttentionSpec, heads: Heads, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """See `StepPages.attend`."""
        slots, plan = self.groups[self.pool.group_of(layer)]
        self.pool.write(layer, slots, heads.k.contiguous(), heads.v.contiguous())
        return self.backend.run(heads.q, self.pool.layer(layer), plan, spec, sinks)


class DevicePages:
    """Pages on a GPU: one kernel writes keys and values, and rotates nothing; the attention is every other
    model's.
    """

    def __init__(self, attention: RowAttention, length: int, head_dim: int, device: str, pdl: bool) -> None:
        """`length`: of the context."""
        self._attention, self._pdl = attention, pdl
        shape = (length + BEYOND, head_dim // 2)
        self._still = torch.ones(shape, device=device), torch.zeros(shape, device=device)

    def step(self, rows: ForwardRows, pool: KvPool) -> StepPages:
        """The pages of one forward."""
        rotation = skinny.RotaryInput(*self._still, rows.positions)
        return _DeviceStep(self._attention, rows, pool, rotation, self._pdl)


@dataclass(frozen=True)
class _DeviceStep:
    attention: RowAttention
    rows: ForwardRows
    pool: KvPool
    rotation: skinny.RotaryInput
    pdl: bool

    def attend(
        self, layer: int, spec: AttentionSpec, heads: Heads, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """See `StepPages.attend`."""
        made = torch.cat((heads.q, heads.k, heads.v), 1)
        layout = row_kernels.HeadLayout(heads.q.shape[1], heads.k.shape[1], made.shape[2])
        q = made.new_empty(heads.q.shape)
        rows = self.rows.in_group(self.pool.group_of(layer))
        kv = skinny.KvRows(self.pool.layer(layer), rows.kv_rows)
        row_kernels.rope_write(made.flatten(1), layout, q, self.rotation, kv, self.pdl)
        mixed = self.attention(q, self.pool.layer(layer), rows, ScoreScaling.of(spec, sinks))
        return mixed.view_as(heads.q)
