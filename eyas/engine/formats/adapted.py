"""Matrices that adapters update: each is loaded as its format says, and told what it is a matrix of.

An `AdaptedProjection` is its base in all that a format is; who multiplies by it adds the updates
(`Forward.updates`), in the product or behind it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Self

import torch

from eyas.engine.adapters.sites import AdapterSite, SitePart
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.formats.projection import Projection, ProjectionLoader, ProjectionT
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import ExpertWeight, GateActivation
from eyas.engine.kernels.products.blocks import Rows, StoredWeight
from eyas.engine.kernels.products.skinny import SkinnyWeight
from eyas.engine.kernels.products.updates import SiteNumbers

_OF_EXPERTS = (".experts.", ".shared_expert")
"""Parts of the names of matrices that kernels of experts read."""


class Adapted(enum.Enum):
    """The matrices of a model's layers that adapters may update."""

    NOTHING = "none"
    OTHERS = "those of no expert"
    ALL = "all"

    @classmethod
    def of(cls, slots: int, experts: bool) -> Adapted:
        """The matrices that adapters may update in an engine with this number of slots. `experts`: there is
        room for updates of experts.
        """
        return cls.NOTHING if not slots else cls.ALL if experts else cls.OTHERS

    def takes(self, names: list[str]) -> bool:
        """True if adapters may update the product of these tensors."""
        return self.takes_one(of_experts=any(part in name for name in names for part in _OF_EXPERTS))

    def takes_one(self, *, of_experts: bool) -> bool:
        """True if adapters may update a matrix that kernels of experts read, or else one that they do not."""
        return self is Adapted.ALL or (self is Adapted.OTHERS and not of_experts)


@dataclass(frozen=True)
class AdaptedLoader(Generic[ProjectionT]):
    """A `ProjectionLoader` of what `wrap` makes of a matrix of `base` and its place in the model. `of`: what
    stands before the names by which updates of the matrices are known.
    """

    base: ProjectionLoader[ProjectionT]
    placement: WeightPlacement
    wrap: Callable[[ProjectionT, AdapterSite], ProjectionT]
    of: str = ""

    def rows(self, names: list[str], rows: list[int], columns: int) -> ProjectionT:
        """This rank's rows of several matrices, stacked."""
        sizes = zip(names, rows, strict=True)
        parts = [SitePart(self.of + name, (count, columns), 0) for name, count in sizes]
        return self._wrapped(self.base.rows(names, rows, columns), *parts)

    def columns(self, name: str, shape: tuple[int, int]) -> ProjectionT:
        """This rank's columns of a matrix."""
        return self._wrapped(self.base.columns(name, shape), SitePart(self.of + name, shape, 1))

    def whole(self, name: str, shape: tuple[int, int]) -> ProjectionT:
        """A whole matrix."""
        return self._wrapped(self.base.whole(name, shape), SitePart(self.of + name, shape))

    def _wrapped(self, made: ProjectionT, *parts: SitePart) -> ProjectionT:
        return self.wrap(made, AdapterSite(parts, self.placement))


class AdaptedProjection(Projection):
    """A matrix on a device, or one of each expert, and the updates of its slots once they have memory:
    `numbers`. Of experts every one is a site, and `places` of `numbers` has theirs one after the other:
    `apart`, how many places lie between those of two slots.
    """

    numbers: SiteNumbers | None = None
    apart: int = 0

    def __init__(self, base: Projection, *sites: AdapterSite) -> None:
        self.base, self.sites = base, list(sites)

    @property
    def site(self) -> AdapterSite:
        """The site of a projection that has one matrix."""
        (site,) = self.sites
        return site

    def places_of(self, slots: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The place of its expert's update for each choice of rows with these slots int32 [m], experts int32
        [m, n]: int32 [m n]; 0: there is none.
        """
        own = slots[:, None]
        return torch.where((own > 0) & (experts >= 0), own * self.apart + experts, 0).int().view(-1)

    @property
    def weight(self) -> StoredWeight:
        """The base's."""
        return self.base.weight

    @property
    def of_experts(self) -> ExpertWeight:
        """The base's."""
        return self.base.of_experts

    @property
    def shape(self) -> torch.Size:
        """The base's."""
        return self.base.shape

    @property
    def rounding(self) -> RowRounding | None:
        """The base's."""
        return self.base.rounding

    @property
    def reads_plain(self) -> bool:
        """True: what adapters add is of the rows as they are."""
        return True

    @property
    def matrix(self) -> SkinnyWeight | None:
        """The base's."""
        return self.base.matrix

    def folded(self, gain: torch.Tensor) -> torch.Tensor | None:
        """See the base class; a gain that the base takes, lower factors take too."""
        left = self.base.folded(gain)
        if left is None:  # what adapters add reads the same rows
            self.sites = [replace(self.site, gain=gain)]
        return left

    def below(self, lower: Projection) -> Self:
        """Both bases, and the updates of both."""
        assert isinstance(lower, AdaptedProjection)
        return type(self)(self.base.below(lower.base), self.site.below(lower.site))

    def in_order(self, rows: torch.Tensor) -> Self:
        """The base's rows, and those of its updates."""
        return type(self)(self.base.in_order(rows), self.site.in_order(rows))

    def room(self, count: int) -> Self:
        """The base's, and as many sites."""
        return type(self)(self.base.room(count), *self.sites * count)

    def put(self, place: int, part: Any) -> None:
        """Puts the base and the site of an expert in their places."""
        self.base.put(place, part.base)
        self.sites[place] = part.site

    def apply(self, x: Rows, products: GroupedProducts, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The base's product alone."""
        return self.base.apply(x, products, bias)

    def gated(self, x: Rows, products: GroupedProducts, gate: GateActivation) -> Rows:
        """The base's gated product alone."""
        return self.base.gated(x, products, gate)

    def exact_shares(self, x: Rows, products: GroupedProducts, kind: str, span: int) -> torch.Tensor:
        """The base's shares alone."""
        return self.base.exact_shares(x, products, kind, span)
