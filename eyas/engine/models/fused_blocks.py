"""The blocks of a decoder's layers on a GPU."""

from __future__ import annotations

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.formats.projection import Projection, ProjectionLoader
from eyas.engine.formats.table import loader_of
from eyas.engine.models.blocks import Blocks, Gains
from eyas.engine.models.mixture import MixtureFeedForward


class FusedBlocks(Blocks[Projection]):
    """Of weights in any format that there is."""

    def loader(self, names: list[str]) -> ProjectionLoader[Projection]:
        return loader_of(self.weights, names)

    def experts(self, spec: ExpertsSpec, prefix: str, gains: Gains) -> MixtureFeedForward:
        return MixtureFeedForward(self.config, spec, self.weights, prefix, gains)
