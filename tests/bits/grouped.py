"""Grouped products as a table: experts of any kind, and dense weights, for any choice among `MOST` rows.

A row leaves what its experts make of it, and the row that this is added to. Weights are of 16 bits or in FP8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.checkpoint.fp8 import RowRounding, scales_of
from eyas.engine.kernels.experts import combine, route
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.products import exact_wide, skinny
from eyas.engine.kernels.products.blocks import StoredWeight
from eyas.engine.models.ops.device_step import product_float32
from tests.bits.compare import Composition
from tests.bits.products import EPS, scale_of

MOST = 400
_LARGE = 32.0  # of what is stored in FP8, on average


class Table(Protocol):
    """Rows 0 to MOST - 1."""

    def run(self, rows: Sequence[int], products: GroupedProducts) -> dict[int, torch.Tensor]:
        """What each of these rows leaves."""


@dataclass(frozen=True)
class Where:
    """The device, the type of rows, and how they are rounded for weights in FP8, if these are."""

    device: str
    dtype: torch.dtype
    rounding: RowRounding | None = None

    def rows(self, count: int, k: int) -> torch.Tensor:
        """Numbers of very different sizes [count, k]."""
        random = torch.Generator().manual_seed(k)
        sizes = torch.randint(-4, 5, (count, k), generator=random)
        wide = torch.randn(count, k, generator=random) * torch.exp2(sizes)
        return wide.to(self.device, self.dtype)

    def weight(self, *shape: int) -> StoredWeight:
        """[n, k] or [experts, n, k]."""
        random = torch.Generator(self.device).manual_seed(sum(shape))
        wide, k = torch.randn(shape, generator=random, device=self.device), shape[-1]
        if self.rounding is None:
            return StoredWeight((wide * k**-0.5).to(self.dtype))
        stored = (wide * _LARGE).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        each = scales_of(shape[-2:], "block" if self.rounding.rows == "block" else "channel")
        scales = torch.rand(*shape[:-2], *each, generator=random, device=self.device) + 0.5
        return StoredWeight(stored, scales / (_LARGE * k**0.5), self.rounding)


class ExpertRows:
    """A router, its experts, their sum, and the residual."""

    def __init__(self, spec: ExpertsSpec, hidden: int, where: Where) -> None:
        self._spec, self._x = spec, where.rows(MOST, hidden)
        self._residual = where.rows(MOST, hidden).flip(0).contiguous()
        router = replace(where, rounding=None).weight(spec.experts + -spec.experts % 16, hidden)
        self._router = router.stored
        self._weights = (
            where.weight(spec.experts, 2 * spec.width, hidden),
            where.weight(spec.experts, hidden, spec.width),
        )

    def run(self, rows: Sequence[int], products: GroupedProducts) -> dict[int, torch.Tensor]:
        """Scores, what each expert makes, and the new residual with 1 / rms: float32 [numbers]."""
        index = torch.tensor(rows, device=self._x.device)
        x, residual, m = self._x[index], self._residual[index], len(rows)
        launch, (gate_up, down) = products.launch, self._weights
        logits = torch.empty(m, self._router.shape[0], device=x.device)
        product_float32(x, self._router, logits, launch)
        chosen = route.choose(logits, self._spec)
        order = products.walked(chosen.experts, (gate_up, down))
        inner = products.gate_up(x, gate_up, order, self._spec.per_row, GateActivation())
        made = products.down(inner, down, order)
        if m <= skinny.MAX_ROWS:
            residual, sums = combine.combine_add(made, chosen.weights, None, residual, exact=launch.exact)
            scales = scale_of(sums[:, :m], residual.shape[1])[:, 0]
        else:
            added = combine.combine(made, chosen.weights, exact=launch.exact)
            scales = exact_wide.settle(residual, EPS, added)
        left = torch.cat((logits, made.view(m, -1).float(), residual.float(), scales[:, None]), 1)
        return dict(zip(rows, left, strict=True))


class DenseRows:
    """One weight [n, k]."""

    def __init__(self, n: int, k: int, where: Where, gate: GateActivation | None = None) -> None:
        self._x, self._weight, self._gate = where.rows(MOST, k), where.weight(n, k), gate

    def run(self, rows: Sequence[int], products: GroupedProducts) -> dict[int, torch.Tensor]:
        """The product."""
        x = self._x[torch.tensor(rows, device=self._x.device)]
        if self._gate is None:
            made = products.dense(x, self._weight)
        else:
            made = products.dense_gated(x, self._weight, self._gate)
        return dict(zip(rows, made, strict=True))


def compositions(table: Table, products: GroupedProducts, counts: Sequence[int]) -> Iterator[Composition]:
    """Rows at once, about row 0, each time some rows further on."""
    for turn, count in enumerate(counts):
        first = turn * 3 - count // 2
        taken = [(first + i) % MOST for i in range(count)]
        yield Composition(f"{count} rows from {taken[0]} on", partial(table.run, taken, products))
