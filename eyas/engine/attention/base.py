"""The seam of attention: `plan` on the host once a forward, `run` on the device once a layer.

It knows sequences as page tables and logical rows; it knows nothing of requests, tokens or layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Span:
    """Consecutive query rows of one sequence, in a step's flattened row order.

    `pages` is the sequence's page table and covers every logical row named here; rows below `start` are
    visible to all queries. `paths` None means causal: query i stands at row start + i and sees all rows up
    to its own. Otherwise the queries are tree nodes: query i sees, after the rows below `start`, the rows
    paths[i], of which the last is its own. `offset` is the RoPE position of logical row 0: not 0 for a
    drafter's window that starts in the middle of a sequence.
    """

    pages: Sequence[int]
    start: int
    count: int
    paths: tuple[tuple[int, ...], ...] | None = None
    offset: int = 0


class Plan(ABC):  # noqa: B024 (a backend's own record: only its backend looks inside)
    """What a backend prepared for one forward."""


class AttentionBackend(ABC):
    """Scaled dot-product attention of query rows over the paged pool, which lies on `device`."""

    device: str

    @abstractmethod
    def plan(self, spans: Sequence[Span]) -> Plan:
        """Host work of a forward whose rows are those of `spans`, in order."""

    @abstractmethod
    def run(self, q: torch.Tensor, layer_pool: torch.Tensor, plan: Plan) -> torch.Tensor:
        """q [R, heads, dim] over layer_pool [pages, 2, page_size, kv_heads, dim] -> [R, heads, dim].

        The rows' own keys and values are already in the pool. R may exceed the plan's rows by padding up to
        a multiple of 8; results there are finite and mean nothing.
        """
