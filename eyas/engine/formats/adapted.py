"""Loaders of matrices that adapters update: each is loaded as it is, and told what it is a matrix of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from eyas.engine.adapters.sites import AdapterSite, SitePart
from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.formats.projection import ProjectionLoader, ProjectionT

_NOT_UPDATED = (".experts.", ".shared_expert")
"""Parts of the names of matrices that kernels of experts read."""


def is_updated(names: list[str]) -> bool:
    """True if adapters may update the product of these tensors."""
    return not any(part in name for name in names for part in _NOT_UPDATED)


@dataclass(frozen=True)
class AdaptedLoader(Generic[ProjectionT]):
    """A `ProjectionLoader` of what `wrap` makes of a matrix of `base` and its place in the model."""

    base: ProjectionLoader[ProjectionT]
    placement: WeightPlacement
    wrap: Callable[[ProjectionT, AdapterSite], ProjectionT]

    def rows(self, names: list[str], rows: list[int], columns: int) -> ProjectionT:
        """This rank's rows of several matrices, stacked."""
        parts = [SitePart(name, (count, columns), 0) for name, count in zip(names, rows, strict=True)]
        return self._wrapped(self.base.rows(names, rows, columns), *parts)

    def columns(self, name: str, shape: tuple[int, int]) -> ProjectionT:
        """This rank's columns of a matrix."""
        return self._wrapped(self.base.columns(name, shape), SitePart(name, shape, 1))

    def whole(self, name: str, shape: tuple[int, int]) -> ProjectionT:
        """A whole matrix."""
        return self._wrapped(self.base.whole(name, shape), SitePart(name, shape))

    def _wrapped(self, made: ProjectionT, *parts: SitePart) -> ProjectionT:
        return self.wrap(made, AdapterSite(parts, self.placement))
