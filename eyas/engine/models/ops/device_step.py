"""State that the layers of one forward on a GPU share, whatever their attention and feed-forward are.

It knows rows, ranks, scratch memory and rotary tables; a layer's equations it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import torch

from eyas.engine.batch.rows import ForwardRows
from eyas.engine.checkpoint.config import AttentionSpec, ModelConfig
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.formats.adapted import AdaptedProjection
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_tiles import TILES, Table
from eyas.engine.kernels.products import exact_wide, skinny, updates, vendor
from eyas.engine.kernels.products.blocks import NormedRows, widened
from eyas.engine.kernels.products.blocks import Rows as ProductRows
from eyas.engine.layers.rotary import Angles
from eyas.engine.layers.rotary import tables as rotary_tables
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo


class RowAttention(Protocol):
    """Attention of a forward's rows over one layer of the pool. `tables`: of pages, int32 [slots, pages]."""

    tables: torch.Tensor

    def __call__(
        self, q: torch.Tensor, layer: torch.Tensor, rows: ForwardRows, scores: ScoreScaling
    ) -> torch.Tensor:
        """q [m, heads, dim] over [pages, 2, page_size, kv_heads, dim] -> [m, heads * dim]."""


@dataclass(frozen=True)
class LayerContext:
    """State that a rank's layers share: the other ranks, launches' scratch memory, attention, and the rotary
    tables (cos and sin) of every RoPE that a layer has.

    `group`: those who divide every layer. `sharers`: those who have a share of the experts, whole, and rows
    of their own. One of the two is a group of one.
    """

    group: ProcessGroup
    launch: skinny.ProductLaunch
    attention: RowAttention
    angles: Mapping[tuple[RopeConfig, int], Angles]
    tiles: Table = field(default_factory=dict)  # of experts, and of weights in FP8 blocks
    vendor: bool = False  # whether cuBLAS has products in FP8 here
    uniform_experts: bool = False  # chance chooses experts, for benchmarks
    sharers: ProcessGroup = field(default_factory=partial(ProcessGroup, RankInfo(), "cpu"))

    @cached_property
    def products(self) -> GroupedProducts:
        """The products of experts, and of weights in FP8 blocks."""
        return GroupedProducts(self.launch, self.tiles, self.vendor)

    @classmethod
    def on(
        cls,
        device: str,
        config: ModelConfig,
        group: ProcessGroup,
        launch: skinny.ProductLaunch,
        attention: RowAttention,
    ) -> LayerContext:
        """Computes the rotary tables of every RoPE in `config`, on `device`."""
        angles = {}
        for rotation in dict.fromkeys(layer.attention.rotation for layer in config.layers):
            cos, sin = rotary_tables(*rotation, config.context_length)
            angles[rotation] = cos.to(device), sin.to(device)
        return cls(
            group,
            launch,
            attention,
            angles,
            TILES.measured(device),
            vendor.is_there(device),
        )


@dataclass(frozen=True)
class Forward:
    """State that every layer of one forward shares. `everyones`: the `kv_rows` of all sharers, rank after
    rank. `adapters`: those of the rows, in fast arithmetic.
    """

    rows: ForwardRows
    context: LayerContext
    everyones: torch.Tensor | None = None
    adapters: skinny.AdapterRows | None = None

    @classmethod
    def of(cls, rows: ForwardRows, context: LayerContext, *, whole: bool = True) -> Forward:
        """A forward of these rows; of several sharers each has as many, unless it is not `whole`."""
        adapters = None
        if rows.adapters is not None and not context.launch.exact:
            adapters = skinny.adapters_of(rows.adapters)
        if context.sharers.ranks == 1 or not whole:
            return cls(rows, context, adapters=adapters)
        padding = ProcessGroup.exchanged(rows.count) - rows.count
        padded = torch.nn.functional.pad(rows.kv_rows, (0, padding), value=-1).contiguous()
        every = context.sharers.gather(padded)[:, : rows.count]
        return cls(rows, context, every.contiguous().view(-1))

    def rotation(self, spec: AttentionSpec) -> skinny.RotaryInput:
        """How the forward's rows are rotated in a layer that attends as `spec` says."""
        return skinny.RotaryInput(*self.context.angles[spec.rotation], self.rows.positions)

    def product(
        self, x: ProductRows | NormedRows, weight: Projection, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [m, k] . weight [n, k]^T + bias -> [m, n], for any number of rows."""
        read = x.read_by(weight.rounding) if isinstance(x, NormedRows) else x
        added = self.updates(x, weight)
        if added is None:
            return weight.apply(read, self.context.products, bias)
        made = weight.apply(read, self.context.products)
        added.add_to(made, self.context.launch.pdl)
        return made if bias is None else made.add_(bias)

    def updates_any(self, weight: Projection) -> bool:
        """True if rows of the step may have adapters that update a weight."""
        return self.rows.adapters is not None and isinstance(weight, AdaptedProjection)

    def ends_apart(self, weight: Projection) -> bool:
        """True if what comes behind a product is no part of its kernel, since adapters update it. In exact
        arithmetic also where they may in other steps: a row has one way through all.
        """
        exact = self.context.launch.exact and isinstance(weight, AdaptedProjection)
        return exact or self.updates_any(weight)

    def updates(self, x: ProductRows | NormedRows, weight: Projection) -> skinny.Updates | None:
        """What adapters add to the product of rows x [m, k]; None: no row of the step has one."""
        if self.rows.adapters is None or not isinstance(weight, AdaptedProjection):
            return None
        assert weight.numbers is not None
        assert self.rows.leaving is None  # adapters are those of all rows
        launch, read = self.context.launch, x.plain if isinstance(x, NormedRows) else widened(x)
        if self.adapters is not None:
            return self.adapters.updates(read, weight.numbers)
        return updates.shrunk(read, self.rows.adapters, weight.numbers, launch.pdl, launch.exact)

    def updated_choices(
        self, made: torch.Tensor, x: torch.Tensor, weight: Projection, experts: torch.Tensor
    ) -> torch.Tensor:
        """made [choices, n], the products of rows x with the weights of their experts int32 [m, per row],
        with what adapters add, in its place. x [choices, k], or [m, k]: then a row is several choices'.
        """
        if self.rows.adapters is None or not isinstance(weight, AdaptedProjection):
            return made
        assert weight.numbers is not None
        exact, (choices, k) = self.context.launch.exact, (made.shape[0], x.shape[1])
        every = x[:, None].expand(-1, choices // x.shape[0], -1).reshape(choices, k).contiguous()
        # Their updates are read as those of rows of so many adapters. Nothing is launched early: their places
        # are no kernel's of ours.
        places = weight.places_of(self.rows.adapters, experts)
        updates.shrunk(every, places, weight.numbers, exact=exact).add_to(made, False)
        return made

    def updated_scores(self, made: torch.Tensor, x: torch.Tensor, weight: AdaptedProjection) -> torch.Tensor:
        """made float32 [m, at least n], the product of rows x with a weight [n, k] that may have others' rows
        below it, with what adapters add, in its place.
        """
        if self.rows.adapters is None:
            return made
        assert weight.numbers is not None
        exact, n = self.context.launch.exact, weight.site.shape[0]
        own = made[:, :n].contiguous()
        updates.shrunk(x, self.rows.adapters, weight.numbers, exact=exact).add_to(own, False)
        made[:, :n] = own
        return made

    def exact_product(
        self, x: torch.Tensor, weight: Projection, kind: str = "linear", span: int = 0
    ) -> torch.Tensor:
        """x [m, k] . weight [n, k]^T -> [m, n], for any number of rows, by the bits of narrow steps.

        `kind` and `span` as of `skinny_tiles.ProductShape`.
        """
        return exact_wide.total(self.exact_shares(x, weight, kind, span), x.dtype)

    def exact_shares(
        self, x: ProductRows, weight: Projection, kind: str = "linear", span: int = 0
    ) -> torch.Tensor:
        """The same, as `exact_wide.shares` gives it: for those who add up stretches."""
        made, added = weight.exact_shares(x, self.context.products, kind, span), self.updates(x, weight)
        if added is None:
            return made
        made = exact_wide.total(made, added.site.numbers.dtype)
        added.add_to(made, self.context.launch.pdl)
        return made


def product_float32(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, launch: skinny.ProductLaunch
) -> None:
    """out float32 [m, n] = x [m, k] . weight [n, k]^T, for any number of rows."""
    if x.shape[0] <= skinny.MAX_ROWS:
        skinny.linear(skinny.SkinnyInput(x), weight, out, launch)
    elif launch.exact:
        out.copy_(exact_wide.product(x, weight, launch, dtype=torch.float32))
    elif x.is_cuda:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.mm(x, weight.t()))
