"""The interface of attention backends: `plan` on the host once a forward, `run` on the device once a
layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import AttentionSpec


class AttentionPlan(ABC):  # noqa: B024 (a backend's own record: only its backend looks inside)
    """The work that a backend has prepared for one forward."""


class AttentionBackend(ABC):
    """Scaled dot-product attention of query rows over the paged pool, which lies on `device`."""

    device: str
    groups = 1
    """Groups of layers that have pages of their own."""

    @abstractmethod
    def plan(self, spans: Sequence[QuerySpan], group: int = 0) -> AttentionPlan:
        """Does the host work of a forward with the rows of `spans`, in order, for one group of layers."""

    @abstractmethod
    def run(
        self,
        q: torch.Tensor,
        layer_pool: torch.Tensor,
        plan: AttentionPlan,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [R, heads, dim] over layer_pool [pages, fields, page_size, kv_heads, dim]: [R, heads, value dim].

        `spec`: the layer's scale, window and soft cap; a row at place p of its path sees the places from
        p - window + 1 on. `sinks` float32 [heads]: a score of each head's that no key has. The rows' own keys
        and values are already in the pool. R may exceed the plan's rows by padding up to a multiple of 8;
        results there are finite and mean nothing.
        """
