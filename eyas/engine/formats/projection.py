"""A weight in some format, and its loader from stored tensors: the interface between layers and weights.

A format on a device is a file beside this one with a `Projection` and its `ProjectionLoader`, and a line in
`table.py`; in plain torch all weights are of one (`eyas.engine.layers.linear`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import ExpertWeight, GateActivation
from eyas.engine.kernels.products.blocks import Rows, StoredWeight
from eyas.engine.kernels.products.skinny import SkinnyWeight


class AnyProjection(ABC):
    """A matrix [n, k]: rows x [m, k] become x . matrix^T [m, n], wherever they are."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """[n, k]."""

    @property
    @abstractmethod
    def rounding(self) -> RowRounding | None:
        """How products round the rows that they read; None: not at all."""

    @property
    @abstractmethod
    def matrix(self) -> SkinnyWeight | None:
        """The matrix that products of few rows read, into which other work is fused; None: there is none."""

    @property
    def reads_plain(self) -> bool:
        """True if anything reads rows as they are, for the product or beside it."""
        return self.rounding is None

    def folded(self, gain: torch.Tensor) -> torch.Tensor | None:
        """Multiplies the columns by a norm's gain [k] if the format can (here it cannot); returns what of it
        is left to the norm.
        """
        return gain

    @abstractmethod
    def below(self, lower: Self) -> Self:
        """A matrix with another of the same format and width below it; in blocks this one has whole
        blocks."""

    @abstractmethod
    def in_order(self, rows: torch.Tensor) -> Self:
        """A matrix of those rows, int64 [n], in this order; in blocks no row leaves its block."""

    @abstractmethod
    def room(self, count: int) -> Self:
        """Room for as many of these, [count, n, k]."""

    @abstractmethod
    def put(self, place: int, part: Any) -> None:
        """Puts another of this format into its place of `room`."""

    @abstractmethod
    def tensors_at(self, place: int) -> list[torch.Tensor]:
        """The tensors of the one in a place of `room`, contiguous; they are not written to."""

    @abstractmethod
    def put_tensors(self, place: int, tensors: list[torch.Tensor]) -> None:
        """Puts what `tensors_at` gave of another place, here or in another process, into a place."""


class Projection(AnyProjection):
    """One on a device. The format chooses the kernel of a product, by the number of rows."""

    @property
    @abstractmethod
    def weight(self) -> StoredWeight:
        """The numbers themselves."""

    @property
    def of_experts(self) -> ExpertWeight:
        """The weights that kernels of experts read, [experts, n, k]."""
        return self.weight

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def rounding(self) -> RowRounding | None:
        return None

    @property
    def stacks(self) -> list[torch.Tensor]:
        """The tensors of `room`, [count, ...]."""
        return [each for each in (self.weight.stored, self.weight.scales) if each is not None]

    def tensors_at(self, place: int) -> list[torch.Tensor]:
        return [each[place : place + 1] for each in self.stacks]

    def put_tensors(self, place: int, tensors: list[torch.Tensor]) -> None:
        for own, other in zip(self.tensors_at(place), tensors, strict=True):
            own.copy_(other)

    @abstractmethod
    def apply(self, x: Rows, products: GroupedProducts, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product of x [m, k], plus a bias [n]: [m, n]. If exact, a row's bits follow from the row."""

    @abstractmethod
    def gated(self, x: Rows, products: GroupedProducts, gate: GateActivation) -> Rows:
        """The gated product of a matrix [gate ; up], act(gate) * up [m, n / 2]; rounded as `gate` says, if
        done at once."""

    @abstractmethod
    def exact_shares(self, x: Rows, products: GroupedProducts, kind: str, span: int) -> torch.Tensor:
        """The product with the bits of fused ones, as `exact_wide.shares` gives it; `kind` and `span` as of
        `skinny_tiles.ProductShape`.
        """


@dataclass(frozen=True)
class StoredProjection(Projection):
    """One whose numbers kernels read as they are stored, or one for each expert: [experts, n, k]."""

    stored: StoredWeight

    @property
    def weight(self) -> StoredWeight:
        return self.stored

    @property
    def rounding(self) -> RowRounding | None:
        return self.stored.rounding


ProjectionT = TypeVar("ProjectionT", bound=AnyProjection)
MadeT = TypeVar("MadeT", bound=AnyProjection, covariant=True)


class ProjectionLoader(Protocol[MadeT]):
    """Makes projections of stored tensors that products read alike. Shapes are those of the whole tensors.

    Every method raises ConfigError, by name, for what a tensor, or a rank's share of it, cannot be.
    """

    def rows(self, names: list[str], rows: list[int], columns: int) -> MadeT:
        """This rank's rows of each matrix, one below the other: [sum(rows) / ranks, columns]."""

    def columns(self, name: str, shape: tuple[int, int]) -> MadeT:
        """This rank's columns of one matrix: [shape[0], shape[1] / ranks]."""

    def whole(self, name: str, shape: tuple[int, int]) -> MadeT:
        """One matrix, the same on every rank."""


class FormatLoader(ProjectionLoader[MadeT], Protocol[MadeT]):
    """The loader of one format."""

    @classmethod
    def of(cls, weights: WeightSource, names: list[str]) -> Self | None:
        """The loader of these tensors together; None: they are not all of this format."""
