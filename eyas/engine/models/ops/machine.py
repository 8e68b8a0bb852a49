"""Where a model runs: what its weights become there. `torch_ops` has a CPU's, `device_machine` a GPU's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic

from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import ProjectionLoader, ProjectionT
from eyas.engine.kernels.products.skinny_tiles import Table


class Machine(ABC, Generic[ProjectionT]):
    """What a model's layers and ends are loaded and computed by. `groups_experts`: whether a shared expert as
    wide as the others is one more of them.
    """

    groups_experts: bool

    @abstractmethod
    def loader(self, weights: WeightSource, names: list[str]) -> ProjectionLoader[ProjectionT]:
        """What makes projections of the tensors of products that read the same rows."""

    @abstractmethod
    def router(self, weights: WeightSource, name: str, shape: tuple[int, int]) -> tuple[Any, Table]:
        """A router's rows [at least experts, hidden] and the tiles of their product, as of `RouterPart`."""

    @abstractmethod
    def own_experts(self, weights: WeightSource, experts: int) -> range:
        """The numbers of a layer's `experts` that are here, if ranks share them out."""
