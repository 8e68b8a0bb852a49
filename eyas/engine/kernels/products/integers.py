"""Whole numbers with scales and zero points, of any width: what is the same of their matrices."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch

from eyas.engine.kernels.products.packed import PackedWeight


@dataclass(frozen=True)
class IntegerWeight(PackedWeight):
    """A matrix [n, k] of numbers in `words`, or one for each expert: all tensors then have that dimension
    before the others. `scales`: [groups, n]; `zeros`: the same of zero points; None: all have the format's.
    `columns`: k.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    columns: int

    @abstractmethod
    def _points(self) -> torch.Tensor:
        """The zero points, also where none are stored."""

    @property
    def beside(self) -> torch.Tensor | None:
        return self.zeros

    def room(self, count: int) -> Self:
        """Room for as many of these. Either all of them have zero points or none has."""
        zeros = None if self.zeros is None else self.zeros.new_empty(count, *self.zeros.shape)
        words, scales = (each.new_empty(count, *each.shape) for each in (self.by_steps(), self.scales))
        return replace(self, words=words, scales=scales, zeros=zeros)

    def put(self, place: int, part: Self) -> None:
        """Puts another one into its place of `room`."""
        self.words[place].copy_(part.by_steps())
        self.scales[place].copy_(part.scales)
        if self.zeros is not None:
            self.zeros[place].copy_(part._points())
        elif part.zeros is not None:
            raise ValueError("an expert has zero points, where another has none")

    def below(self, lower: Self) -> Self:
        zeros = None
        if self.zeros is not None or lower.zeros is not None:
            zeros = torch.cat((self._points(), lower._points()), 1)
        words, scales = torch.cat((self.words, lower.words)), torch.cat((self.scales, lower.scales), 1)
        return replace(self, words=words, scales=scales, zeros=zeros)

    def in_order(self, rows: torch.Tensor) -> Self:
        zeros = None if self.zeros is None else self.zeros[:, rows]
        return replace(self, words=self.words[rows], scales=self.scales[:, rows], zeros=zeros)
