"""A GPU, or a rank's share of one model on several: what stands beside a model's layers, by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eyas.engine.adapters.sites import AdapterSite
from eyas.engine.batch.rows import ForwardRows
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.adapted import Adapted, AdaptedLoader, AdaptedProjection
from eyas.engine.formats.dense import DenseProjection
from eyas.engine.formats.packed import PackedLoader
from eyas.engine.formats.projection import Projection, ProjectionLoader
from eyas.engine.formats.table import loader_of
from eyas.engine.kernels.drafts import mtp_states
from eyas.engine.kernels.drafts.head_input import join
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import skinny, updates
from eyas.engine.kernels.products.blocks import StoredWeight
from eyas.engine.kernels.products.skinny_tiles import ProductTile, Table
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.layer import DecoderLayer
from eyas.engine.models.ops.device import DeviceOps
from eyas.engine.models.ops.device_step import Forward, LayerContext, product_float32
from eyas.engine.models.ops.exact_rows import ExactManyRows, ExactRows
from eyas.engine.models.ops.few_rows import FewRows, most_rows
from eyas.engine.models.ops.machine import Machine
from eyas.engine.models.ops.many_rows import ManyRows
from eyas.engine.models.ops.parts import JoinPart
from eyas.engine.parallel.expert_places import SpreadExperts

SIDE = 16
"""Rows of a router are filled up to a multiple of it, as products need."""


@dataclass(frozen=True)
class DeviceMachine(Machine[Projection]):
    """Weights in any format that there is. A router's are of the model's type, its sums float32.

    `context`: of the layers that run here. Draft heads' are never exact. `copies`: whether packed matrices
    that are no experts' have a widened copy, for products of many rows. `adapted`: what adapters may update,
    by names that begin with `adapted_of`.
    """

    context: LayerContext
    copies: bool = False
    adapted: Adapted = Adapted.NOTHING
    adapted_of: str = ""
    spread: SpreadExperts | None = None
    groups_experts = True

    def loader(self, weights: WeightSource, names: list[str]) -> ProjectionLoader[Projection]:
        launch = self.context.launch
        loader: ProjectionLoader[Projection] = loader_of(weights, names, launch.exact, launch.packed)
        if isinstance(loader, PackedLoader) and not any(".experts." in name for name in names):
            loader = replace(loader, copies=self.copies)
        if not self.adapted.takes(names):
            return loader
        return AdaptedLoader[Projection](loader, weights.placement, AdaptedProjection, self.adapted_of)

    def router(
        self, weights: WeightSource, names: Sequence[str], rows: Sequence[int], hidden: int
    ) -> tuple[torch.Tensor, Table]:
        stored = [weights.take(name, (count, hidden)) for name, count in zip(names, rows, strict=True)]
        whole = torch.cat([*stored, stored[0].new_zeros(-sum(rows) % SIDE, hidden)])
        return whole, router_tiles(*whole.shape)

    def own_experts(self, weights: WeightSource, experts: int) -> range:
        return weights.placement.own_experts(experts)

    def matrix(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.context.group.rows_of(rows)

    def some_rows(self, matrix: torch.Tensor, ids: tuple[int, ...]) -> torch.Tensor:
        return self.context.group.share_of_rows(matrix, ids)

    def joining(self, stored: torch.Tensor, part: JoinPart) -> torch.Tensor:
        """The matrix with the gains in it, and the tokens' half first, as the kernel puts them."""
        halves = stored.split(stored.shape[0], dim=1)
        joining = torch.cat(halves[::-1] if part.feature_first else halves, dim=1)
        return joining if part.gains is None else joining.mul_(torch.cat(part.gains))

    def most_rows(self, layers: Sequence[DecoderLayer[Projection]]) -> int:
        return most_rows(layers, exact=self.context.launch.exact)

    def ops(
        self, rows: ForwardRows, pool: KvPool, eps: float, few_rows: int = 0, *, whole: bool = True
    ) -> DeviceOps[Any, Any]:
        step = Forward.of(rows, self.context, whole=whole)
        if rows.count <= few_rows:
            return FewRows(step, pool, eps)
        if not self.context.launch.exact:
            return ManyRows(step, pool, eps)
        return (ExactManyRows if few_rows else ExactRows)(step, pool, eps)

    def bounded(self, rows: ForwardRows, unseen: int) -> ForwardRows:
        """Rows that are none in a layer are not seen."""
        if not unseen:
            return rows
        firsts = rows.firsts
        if firsts is None:
            firsts = torch.zeros_like(self.context.attention.tables[:, 0])
        return replace(rows, firsts=firsts + unseen)

    def join(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, part: JoinPart
    ) -> torch.Tensor:
        """Without gains: they are in the product that follows."""
        eps, blank = None if part.gains is None else part.eps, None
        if part.blank is not None:
            blank = positions - part.blank if part.blank else positions
        return join(tokens, part.embedding, features, eps, self.context.launch.pdl, blank)

    def norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        launch = self.context.launch
        return row_kernels.norm(x, eps, gain, pdl=launch.pdl, exact=launch.exact)

    def norms(self, x: torch.Tensor, gains: Sequence[torch.Tensor], eps: float) -> torch.Tensor:
        pairs = zip(x.chunk(len(gains), dim=-1), gains, strict=True)
        normed = [row_kernels.norm(part.contiguous(), eps, gain) for part, gain in pairs]
        return torch.cat(normed, dim=-1, out=skinny.empty_padded(*x.shape, like=x))

    def product(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.shape[0] > skinny.MAX_ROWS:
            return torch.mm(x, matrix.t()) if bias is None else torch.addmm(bias, x, matrix.t())
        out = skinny.empty_padded(x.shape[0], matrix.shape[0], like=x)
        skinny.linear(skinny.SkinnyInput(x), matrix, out, self.context.launch, skinny.LinearEnd(bias=bias))
        return out

    def picked(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return row_kernels.gather_rows(x, rows, pdl=self.context.launch.pdl)

    def logits(self, x: torch.Tensor, head: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        group, rows, columns = self.context.group, x.shape[0], head.shape[0]
        if out is None:
            out = torch.empty(rows, group.ranks * columns, dtype=torch.float32, device=x.device)
        own = out if group.ranks == 1 else torch.empty(rows, columns, dtype=torch.float32, device=x.device)
        product_float32(x, head, own, self.context.launch)
        return group.all_gather_columns(own, out)

    def updated(
        self, matrix: torch.Tensor, site: AdapterSite, *, of_experts: bool = False
    ) -> AdaptedProjection | None:
        if not self.adapted.takes_one(of_experts=of_experts):
            return None
        return AdaptedProjection(DenseProjection(StoredWeight(matrix)), site)

    def picked_adapters(self, adapters: torch.Tensor, picked: torch.Tensor | None) -> torch.Tensor:
        return adapters if picked is None else adapters.index_select(0, picked)

    def update_logits(
        self, logits: torch.Tensor, x: torch.Tensor, head: AdaptedProjection, adapters: torch.Tensor
    ) -> None:
        """Behind the product, and launched behind all that was before."""
        assert head.numbers is not None
        exact = self.context.launch.exact
        updates.shrunk(x, adapters, head.numbers, exact=exact).add_to(logits, False)

    def capped(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        return logits.div_(cap).tanh_().mul_(cap)

    def mtp_states(self, rows: ForwardRows, pool: KvPool, stages: int, width: int) -> DeviceMtpStates:
        sources = mtp_states.sources(rows, self.context.attention.tables, pool.page_size)
        pages = pool.behind(stages + 1, stages, width)
        return DeviceMtpStates(rows.kv_rows, sources, pages, pool.page_size, self.context.launch.pdl)


@dataclass(frozen=True)
class DeviceMtpStates:
    """The `MtpStates` of one forward, with the result of `mtp_states.sources` and the pages of the rows."""

    kv_rows: torch.Tensor
    sources: torch.Tensor
    pages: torch.Tensor
    page_size: int
    pdl: bool

    def before(self, gave: torch.Tensor, stage: int) -> torch.Tensor:
        """The results of the row before each row."""
        return mtp_states.before(gave, self.sources, self.pages, stage, self.pdl)

    def keep(self, gave: torch.Tensor) -> None:
        """Writes what the last row in each page gave."""
        mtp_states.keep(gave.contiguous(), self.kv_rows, self.pages, self.page_size, self.pdl)


def router_tiles(rows: int, hidden: int) -> Table:
    """Tiles of a router's product, for `skinny.ProductLaunch`. A router has few rows: its programs take few
    of them, and share k.
    """
    split = next(split for split in (8, 4, 2, 1) if hidden % (split * SIDE) == 0)
    tile = ProductTile(columns=SIDE, depth=128, warps=4, stages=6, split=split)
    return {("linear", padded, rows, hidden): tile for padded in (16, 32, 64, 128)}
