"""The blocks of a decoder's layers in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.engine.checkpoint.config import ExpertsSpec, LatentSpec, ModelConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.formats.projection import AnyProjection
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.layers.experts import Experts
from eyas.engine.layers.latent import LatentAttention
from eyas.engine.layers.linear import Linear, LinearLoader
from eyas.engine.models.blocks import Blocks, Gains
from eyas.engine.models.ops.torch_ops import TorchOps
from eyas.engine.parallel.expert_ranks import ExpertRanks


class PlainBlocks(Blocks[Linear]):
    """`ranks`: over which experts are spread; None: they are here. `every_experts`: all that it made."""

    def __init__(self, config: ModelConfig, weights: Weights, ranks: ExpertRanks | None = None) -> None:
        super().__init__(config, weights)
        self._ranks = ranks
        self.every_experts: list[Experts] = []

    def loader(self, names: Sequence[str]) -> LinearLoader:
        return LinearLoader.of(self.weights, list(names))

    def latents(self, spec: LatentSpec, prefix: str, gain: torch.Tensor | None) -> PlainLatents:
        width = self.config.hidden_size if gain is None else gain.shape[0]
        return PlainLatents(self._norm(gain), LatentAttention(spec, self.weights, prefix, width))

    def experts(self, spec: ExpertsSpec, prefix: str, gains: Gains) -> PlainExperts:
        block = Experts(spec, self.weights, prefix, self.config.hidden_size, self._ranks)
        self.every_experts.append(block)
        return PlainExperts(block, self._norm(gains[0]), gains[1])

    def _norm(self, gain: torch.Tensor | None) -> row_kernels.Norm | None:
        return None if gain is None else row_kernels.Norm(self.config.norm_eps, gain)


@dataclass
class PlainLatents:
    """A `Mixer`: attention over latents."""

    norm: row_kernels.Norm | None
    block: LatentAttention
    projections: tuple[AnyProjection, ...] = ()

    def attend(self, read: torch.Tensor, layer: int, ops: TorchOps) -> torch.Tensor:
        """Keeps the rows, and mixes -> [m, heads * value]."""
        return self.block(read, layer, ops.step)

    def keep(self, read: torch.Tensor, layer: int, ops: TorchOps) -> None:
        """Keeps the rows alone."""
        self.block(read, layer, ops.step)


@dataclass
class PlainExperts:
    """A `FeedForward` of experts between two norms. `post`: the gain of the one behind."""

    block: Experts
    norm: row_kernels.Norm | None
    post: torch.Tensor | None
    projections: tuple[AnyProjection, ...] = ()

    def __call__(self, residual: torch.Tensor, ops: TorchOps) -> torch.Tensor:
        """The residual with what it makes of it added."""
        read, residual = ops.norm(residual, self.norm)
        return ops.plus(residual, self.block(read), self.post)
