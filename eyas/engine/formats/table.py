"""The formats of weights on a device, a line for each. The first that takes a product's tensors has them."""

from __future__ import annotations

from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.dense import DenseLoader
from eyas.engine.formats.fp8 import Fp8Loader
from eyas.engine.formats.projection import Projection, ProjectionLoader

FORMATS: tuple[type[ProjectionLoader[Projection]], ...] = (Fp8Loader, DenseLoader)
"""The last takes any tensors."""


def loader_of(weights: WeightSource, names: list[str]) -> ProjectionLoader[Projection]:
    """The loader of the tensors of products that read the same rows."""
    return next(loader for kind in FORMATS if (loader := kind.of(weights, names)) is not None)
