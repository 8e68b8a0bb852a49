"""A matrix of packed numbers, whatever its format: what products of few rows and their callers know of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch

from eyas.engine.kernels.products.skinny_tiles import PackedStep


class PackedWeight(ABC):
    """A matrix [n, k], or one for each expert, [experts, n, k].

    `words`: [n, steps * unit], a row's numbers; of experts [experts, steps, n, unit], so that what a tile
    reads at a time lies together. `scales`: what multiplies them. `columns`: k. `dtype`: of the rows that it
    multiplies.
    """

    words: torch.Tensor
    scales: torch.Tensor
    columns: int
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """[n, k], or [experts, n, k]."""
        if self.words.dim() == 2:
            return torch.Size((self.words.shape[0], self.columns))
        return torch.Size((self.words.shape[0], self.words.shape[2], self.columns))

    @property
    @abstractmethod
    def step(self) -> PackedStep:
        """The part of a row that a product takes at a time."""

    @property
    @abstractmethod
    def together(self) -> int:
        """Columns of a step that one product of the matrix unit has."""

    @property
    @abstractmethod
    def beside(self) -> torch.Tensor | None:
        """The tensors that kernels read beside words and scales."""

    def is_exact(self, stretches: int) -> bool:
        """True if a product that sums k in that many stretches gives the sums of the widened matrix."""
        return False

    @abstractmethod
    def widened(self) -> torch.Tensor:
        """The matrix [n, k], rounded to `dtype`."""

    @abstractmethod
    def below(self, lower: Self) -> Self:
        """A matrix with another of this width, type and groups below it."""

    @abstractmethod
    def in_order(self, rows: torch.Tensor) -> Self:
        """Its rows, int64 [n], in this order."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it is made of."""
        return [each for each in (self.words, self.scales, self.beside) if each is not None]

    @abstractmethod
    def room(self, count: int) -> Self:
        """Room for as many of these, experts."""

    @abstractmethod
    def put(self, place: int, part: Self) -> None:
        """Puts another one into its place of `room`."""

    def by_steps(self) -> torch.Tensor:
        """The words of a matrix as those of an expert lie, a view [steps, n, unit]."""
        steps: torch.Tensor = self.words.unflatten(1, (-1, self.step.unit))
        return steps.transpose(0, 1)
