"""The formats of weights on a device, a line for each. The first that takes a product's tensors has them."""

from __future__ import annotations

from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.dense import DenseLoader
from eyas.engine.formats.fp4 import DenseFp4Loader, Fp4Loader
from eyas.engine.formats.fp8 import Fp8Loader
from eyas.engine.formats.int4 import ExactInt4Loader, Int4Loader
from eyas.engine.formats.int8 import Int8Loader
from eyas.engine.formats.projection import FormatLoader, Projection

FORMATS: tuple[type[FormatLoader[Projection]], ...] = (
    Fp8Loader,
    Int4Loader,
    Int8Loader,
    Fp4Loader,
    DenseFp4Loader,
    DenseLoader,
)
"""The last takes any tensors."""

EXACT_FORMATS: tuple[type[FormatLoader[Projection]], ...] = (Fp8Loader, ExactInt4Loader, DenseLoader)
"""Those whose products have exact arithmetic."""


def loader_of(
    weights: WeightSource, names: list[str], exact: bool, packed: bool = True
) -> FormatLoader[Projection]:
    """The loader of the tensors of products that read the same rows. `packed`: whether exact products have
    numbers of four bits as they are.
    """
    kinds = [kind for kind in EXACT_FORMATS if packed or kind is not ExactInt4Loader] if exact else FORMATS
    return next(loader for kind in kinds if (loader := kind.of(weights, names)) is not None)
