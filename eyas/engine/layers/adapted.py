"""Matrices that adapters update, in plain torch: the specification of what a GPU computes.

A row x becomes base(x) + B (A x), with A and B of its own adapter. Both products are `Linear`s in blocks of
rows, so the row's bits follow from the row, its adapter and the weight, whatever shares the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from eyas.engine.adapters.reader import AdapterReader
from eyas.engine.adapters.sites import AdapterSite, AdapterSites, PackedAdapter
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.layers.linear import Linear, LinearExperts

RowsOfSlots = Sequence[tuple[int, torch.Tensor]]
"""Of each slot that rows of a forward have: their numbers, int64 [n]."""


@dataclass(frozen=True)
class PartUpdate:
    """Both factors of one part of a matrix, and the rows of that which it updates, int64."""

    down: Linear
    up: Linear
    rows: torch.Tensor


class AdaptedLinear(Linear):
    """A `Linear` with the updates of each slot."""

    def __init__(self, base: Linear, site: AdapterSite) -> None:
        self.base, self.site = base, site
        self._slots: dict[int, list[PartUpdate]] = {}

    @property
    def shape(self) -> torch.Size:
        """The base's."""
        return self.base.shape

    @property
    def rounding(self) -> RowRounding | None:
        """The base's."""
        return self.base.rounding

    def below(self, lower: Linear) -> Self:
        """Both bases, and the updates of both."""
        assert isinstance(lower, AdaptedLinear)
        return type(self)(self.base.below(lower.base), self.site.below(lower.site))

    def in_order(self, rows: torch.Tensor) -> Self:
        """The base's rows, and those of its updates."""
        return type(self)(self.base.in_order(rows), self.site.in_order(rows))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product without an adapter."""
        return self.base(x, bias)

    def put_update(self, slot: int, numbers: torch.Tensor, rank: int) -> None:
        """Sets what a slot adds: both factors as `AdapterSite.write` has them; rank 0: nothing."""
        (n, k), parts = self.site.shape, len(self.site.parts)
        self._slots.pop(slot, None)
        if rank:
            downs = numbers[: parts * rank * k].view(parts, rank, k)
            ups = numbers[downs.numel() :].view(rank, n).t()
            rows = [(self.site.part_of_rows == part).nonzero()[:, 0] for part in range(parts)]
            self._slots[slot] = [
                PartUpdate(Linear(down.contiguous()), Linear(ups[own].contiguous()), own)
                for down, own in zip(downs, rows, strict=True)
            ]

    def updated(self, made: torch.Tensor, x: torch.Tensor, groups: RowsOfSlots) -> torch.Tensor:
        """made [m, n], the product of rows x [m, k], plus what the slots of `groups` add; in its place."""
        for slot, rows in groups:
            read = x[rows]
            for part in self._slots.get(slot, ()):
                made[rows[:, None], part.rows] += part.up(part.down(read))
        return made


def product(
    x: torch.Tensor, matrix: Linear, bias: torch.Tensor | None = None, groups: RowsOfSlots = ()
) -> torch.Tensor:
    """x [m, k] times a matrix [n, k] plus bias [n], and plus what the slots of `groups` add: [m, n]."""
    made = matrix(x, bias)
    return matrix.updated(made, x, groups) if groups and isinstance(matrix, AdaptedLinear) else made


def among(rows: torch.Tensor, groups: RowsOfSlots) -> RowsOfSlots:
    """The groups of some of the rows, int64 [n], by their places among these."""
    parts = [(slot, torch.isin(rows, own).nonzero()[:, 0]) for slot, own in groups]
    return [(slot, places) for slot, places in parts if len(places)]


class PlainAdapters:
    """An `AdapterMemory`: the slots of a model's matrices."""

    def __init__(self, reader: AdapterReader, products: Sequence[Any], slots: int) -> None:
        """`products`: of the model, and of its draft head where adapters may update that."""
        self.slots = slots
        self._reader = reader
        each = [part for one in products for part in (one.each if isinstance(one, LinearExperts) else (one,))]
        self._matrices = [matrix for matrix in each if isinstance(matrix, AdaptedLinear)]
        self._sites = AdapterSites([matrix.site for matrix in self._matrices])

    def renew(self, adapter: PackedAdapter) -> None:
        """Does nothing: no factor has a number of the weights in it."""

    def forget(self, adapter: PackedAdapter) -> None:
        """Does nothing: its memory goes with its last reference."""

    def read(self, folder: Path) -> PackedAdapter:
        """The adapter in a folder."""
        return self._sites.packed(self._reader.read(folder, self._sites.check), folder)

    def fill(self, slot: int, adapter: PackedAdapter) -> Callable[[], bool]:
        """Fills a slot at once: no step is in flight."""
        places = adapter.places.tolist()
        for matrix, (first, rank) in zip(self._matrices, places, strict=True):
            numbers = adapter.numbers[first : first + matrix.site.words(rank)]
            matrix.put_update(slot, numbers, rank)
        return lambda: True
