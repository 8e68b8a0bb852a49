"""The blocks of a decoder's layers in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import AnyProjection
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.layers.experts import Experts
from eyas.engine.layers.linear import Linear, LinearLoader
from eyas.engine.models.blocks import Blocks, Gains
from eyas.engine.models.ops.torch_ops import TorchOps
from eyas.engine.parallel.expert_ranks import ExpertRanks


class PlainBlocks(Blocks[Linear]):
    """`ranks`: over which experts are spread; None: they are here. `every_experts`: all that it made."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ranks: ExpertRanks | None = None) -> None:
        super().__init__(config, weights)
        self._ranks = ranks
        self.every_experts: list[Experts] = []

    def loader(self, names: Sequence[str]) -> LinearLoader:
        return LinearLoader.of(self.weights, list(names))

    def experts(self, spec: ExpertsSpec, prefix: str, gains: Gains) -> PlainExperts:
        block = Experts(spec, self.weights, prefix, self.config.hidden_size, self._ranks)
        self.every_experts.append(block)
        before, after = gains
        norm = None if before is None else row_kernels.NormInput(self.config.norm_eps, before)
        return PlainExperts(block, norm, after)


@dataclass
class PlainExperts:
    """A `FeedForward` of experts between two norms. `post`: the gain of the one behind."""

    block: Experts
    norm: row_kernels.NormInput | None
    post: torch.Tensor | None
    projections: tuple[AnyProjection, ...] = ()

    def __call__(self, residual: torch.Tensor, ops: TorchOps) -> torch.Tensor:
        """The residual with what it makes of it added."""
        read, residual = ops.norm(residual, self.norm)
        return ops.plus(residual, self.block(read), self.post)
