"""A folder's tensors beside what a model wants of them: all that does not fit, instead of the first of it.

A model that is built from an `CheckpointInspection` is no model: it only says by what it takes which tensors
it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from eyas.engine.checkpoint.quantized import QuantizedConfig
from eyas.engine.checkpoint.weights import FolderWeights, Part, Shape


class CheckpointInspection(FolderWeights):
    """Notes in `complaints`, a sentence each, which tensors are missing, of another shape, or not finite.

    `blank`: whole numbers are given as zeros, for who has seen already that they cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        spelling: Callable[[str], str],
        quantized: QuantizedConfig | None,
        *,
        blank: bool,
    ) -> None:
        super().__init__(folder, spelling, quantized=quantized)
        self._blank = blank
        self._shapes = {name: self._shape(name) for name in self._home}
        self._taken: set[str] = set()
        self.complaints: list[str] = []

    @property
    def unread(self) -> list[str]:
        """The tensors that were not taken, in the model's spelling."""
        return sorted(self._shapes.keys() - self._taken)

    @property
    def parameters(self) -> int:
        """Elements of the tensors that were taken."""
        return sum(torch.Size(self._shapes[name]).numel() for name in self._taken)

    def _load(self, name: str, shape: Shape, part: Part, dtype: torch.dtype) -> torch.Tensor:
        if name not in self:
            self.complaints.append(f"tensor {name} is missing")
            return torch.zeros(shape, dtype=dtype)
        self._taken.add(name)
        if self._shapes[name] != shape:
            self.complaints.append(f"tensor {name} is {_said(self._shapes[name])}, not {_said(shape)}")
            return torch.zeros(shape, dtype=dtype)
        if self._blank and not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype)
        return super()._load(name, shape, part, dtype)

    def _complain(self, broken: list[str]) -> None:
        self.complaints += [f"tensor {name} holds NaN or infinity" for name in broken]


def _said(shape: Shape) -> str:
    return " x ".join(map(str, shape))
