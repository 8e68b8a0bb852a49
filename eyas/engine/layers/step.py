"""What every layer of one forward in plain torch shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from eyas.engine.attention.base import AttentionBackend, AttentionPlan
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.linear import pad_rows
from eyas.engine.layers.rotary import Angles, Rotary


@dataclass(frozen=True)
class Step:
    """`tokens` [R'], padded to whole blocks. `slots` [R]: `KvPool.slots` of the rows being written.

    `angles`: of each RoPE that a layer has.
    """

    pool: KvPool
    tokens: torch.Tensor
    slots: torch.Tensor
    plan: AttentionPlan
    angles: Mapping[RopeConfig, Angles]
    backend: AttentionBackend

    @classmethod
    def of(
        cls,
        rows: ForwardBatch,
        pool: KvPool,
        rotaries: Mapping[RopeConfig, Rotary],
        backend: AttentionBackend,
    ) -> Step:
        """A forward of `rows`."""
        positions = pad_rows(rows.positions)
        angles = {rope: rotary.angles(positions) for rope, rotary in rotaries.items()}
        return cls(pool, pad_rows(rows.tokens), pool.slots(rows.kv_rows), rows.plan, angles, backend)
