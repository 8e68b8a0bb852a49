"""The blocks of a decoder's layers on a GPU."""

from __future__ import annotations

import torch

from eyas.engine.checkpoint.config import ExpertsSpec, LatentSpec
from eyas.engine.formats.projection import Projection, ProjectionLoader
from eyas.engine.formats.table import loader_of
from eyas.engine.models.blocks import Blocks, Gains
from eyas.engine.models.latent_attention import LatentMixer
from eyas.engine.models.mixture import MixtureFeedForward


class FusedBlocks(Blocks[Projection]):
    """Of weights in any format that there is."""

    def loader(self, names: list[str]) -> ProjectionLoader[Projection]:
        return loader_of(self.weights, names)

    def latents(self, spec: LatentSpec, prefix: str, gain: torch.Tensor | None) -> LatentMixer:
        return LatentMixer(self.config, spec, self.weights, prefix, gain)

    def experts(self, spec: ExpertsSpec, prefix: str, gains: Gains) -> MixtureFeedForward:
        return MixtureFeedForward(self.config, spec, self.weights, prefix, gains)
