"""The blocks of a layer, and what they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch

from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import AnyProjection, ProjectionLoader, ProjectionT
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.models.ops.machine import Machine


class Mixer(Protocol):
    """A layer's attention, over the verbs that go with its weights. `norm`: of what it reads, without a gain
    where its weights have that in them; None: it reads rows as they are.
    """

    norm: row_kernels.NormInput | None

    @property
    def projections(self) -> tuple[AnyProjection, ...]:
        """Its weights."""

    def attend(self, read: Any, layer: int, ops: Any) -> torch.Tensor:
        """Keeps the rows, and mixes -> [m, columns of `out`]."""

    def keep(self, read: Any, layer: int, ops: Any) -> Any:
        """Keeps the rows alone."""


class FeedForward(Protocol):
    """A half of a layer that every row passes by itself."""

    @property
    def projections(self) -> tuple[AnyProjection, ...]:
        """Its weights."""

    def __call__(self, residual: Any, ops: Any) -> Any:
        """The residual with what it makes of it added."""


@dataclass(frozen=True)
class Blocks(Generic[ProjectionT]):
    """The material of a decoder's layers: the whole decoder's `config`, its tensors, and where
    it runs.
    """

    config: ModelConfig
    weights: WeightSource
    machine: Machine[ProjectionT]

    def loader(self, names: list[str]) -> ProjectionLoader[ProjectionT]:
        """The loader of the tensors of products that read the same rows."""
        return self.machine.loader(self.weights, names)


Gains = tuple[torch.Tensor | None, torch.Tensor | None]
"""Of the norms before and behind a half of a layer; None: there is none."""


def norm_before(config: ModelConfig, gain: torch.Tensor, weight: AnyProjection) -> row_kernels.NormInput:
    """The norm of what `weight` multiplies, which takes the gain into itself if its format can."""
    return row_kernels.NormInput(config.norm_eps, weight.folded(gain), weight.rounding)
