"""Any number of rows: cuBLAS' products, or those of a weight's format, with row kernels between them.

What a product adds to the residual waits until the residual is read: one kernel adds, and norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.experts import back_rounded, combine_rounded
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.blocks import Fp8Rows, NormedRows, Rows
from eyas.engine.models.ops import expert_products
from eyas.engine.models.ops.device import DeviceOps, Experts
from eyas.engine.models.ops.device_step import Forward
from eyas.engine.models.ops.parts import ExpertsPart, GatedPart, Routed, RouterPart


@dataclass(frozen=True)
class NextRows:
    """The rows that `norm` makes of a residual, rounded as its reader rounds them."""

    norm: row_kernels.NormInput
    rounded: Fp8Rows


@dataclass(frozen=True)
class WideRows:
    """The residual rows [m, hidden], and what is still to be added to them: `added`, [m, hidden], if there is
    anything, or, with `post` [hidden], its norm with that gain.

    `read`: what products read of it, which adds that when it is made. `next`: what the kernel that made x has
    made of it as well.
    """

    x: torch.Tensor
    added: torch.Tensor | None = None
    post: torch.Tensor | None = None
    read: WideRead | None = None
    next: NextRows | None = None


class WideRead:
    """The rows that products read of a residual, by a norm if there is one: made when the first of them reads
    them.
    """

    def __init__(self, residual: WideRows, norm: row_kernels.NormInput | None, pdl: bool) -> None:
        self._residual, self._whole, self._pdl = residual, residual.x, pdl
        self.norm = norm
        self.rounded: Fp8Rows | None = None
        if residual.next is not None and residual.next.norm is norm:
            self.rounded = residual.next.rounded

    @cached_property
    def normed(self) -> NormedRows:
        """The rows; the residual's are whole then."""
        x, added, norm = self._residual.x, self._residual.added, self.norm
        if norm is not None and added is not None:
            return row_kernels.add_norm(added, x, norm, self._residual.post, self._pdl)
        if added is not None:
            x.add_(added)
        return NormedRows(x) if norm is None else row_kernels.normed(x, norm, self._pdl)

    @property
    def whole(self) -> torch.Tensor:
        """The residual's rows [m, hidden]."""
        if self._residual.added is not None and self._whole is self._residual.x:
            _ = self.normed
        return self._whole

    def routed(
        self, router: RouterPart, part: ExpertsPart[Projection], step: Forward
    ) -> expert_products.ScoredRoute | None:
        """Which experts take the rows, by kernels that add, norm and round them as well; None: there are none
        for these, or they are made already.
        """
        residual, norm = self._residual, self.norm
        if norm is None or residual.post is not None or "normed" in self.__dict__:
            return None
        made = expert_products.routed_rounded((residual.x, residual.added), norm, router, part, step)
        if made is not None:
            self._whole = made.residual
        return made


class ManyRows(DeviceOps[WideRows, WideRead]):
    """The residual is changed in place."""

    def embed(self, table: torch.Tensor, scale: float) -> WideRows:
        x, _ = row_kernels.embed(self.step.rows.tokens, table, scale=scale)
        return WideRows(x, torch.zeros_like(x))

    def residual(self, x: torch.Tensor) -> WideRows:
        return WideRows(x.clone())

    def joined(self, x: torch.Tensor, matrix: torch.Tensor) -> WideRows:
        return WideRows(torch.mm(x, matrix.t()))

    def given(self, x: torch.Tensor) -> WideRead:
        return WideRead(WideRows(x), None, self.step.context.launch.pdl)

    def rms(self, residual: WideRows, norm: row_kernels.NormInput | None) -> tuple[WideRead, WideRows]:
        if residual.read is not None:
            residual = WideRows(residual.read.whole)
        x, pdl = residual.x, self.step.context.launch.pdl
        if norm is None:
            return WideRead(WideRows(self.leave(residual)), None, pdl), WideRows(x)
        read = WideRead(residual, norm, pdl)
        if norm.rounding is not None and x.shape[0] <= skinny.MAX_ROWS:
            return read, WideRows(x, read=read)
        if read.rounded is None:
            _ = read.normed  # at once: what is read of many rows is not kept for long
        return read, WideRows(x)

    def leave(self, residual: WideRows) -> torch.Tensor:
        if residual.read is not None:
            return residual.read.whole
        norm = None if residual.post is None else row_kernels.NormInput(self.eps)
        return WideRead(residual, norm, False).whole

    def normed(self, read: WideRead) -> NormedRows:
        return read.normed

    def product(
        self, read: WideRead, projection: Projection, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        rounds = read.norm is not None and projection.rounding == read.norm.rounding
        if read.rounded is None or not rounds or self.step.updates_any(projection):
            return super().product(read, projection, bias)
        return self.step.product(read.rounded, projection, bias)

    def chosen(self, read: WideRead, router: RouterPart, part: Experts) -> tuple[NormedRows, Routed]:
        apart = router.updated is not None and self.step.ends_apart(router.updated)
        made = None if apart else read.routed(router, part, self.step)
        return super().chosen(read, router, part) if made is None else (made.routed.rows, made.routed)

    def mix(self, residual: WideRows, rows: NormedRows, routed: Routed, part: Experts) -> WideRows:
        """The sum over experts adds the residual, and rounds the rows that are read next, where a kernel has
        all of it.
        """
        step, reader, launch = self.step, part.out.reader, self.step.context.launch
        alone = step.context.group.ranks == 1 and step.everyones is None and part.beside is None
        if reader is None or not (alone and part.out.bare):
            return super().mix(residual, rows, routed, part)
        hidden, chosen, back = residual.x.shape[1], routed.chosen, part.out.projection
        if expert_products.is_single(routed, part, step):
            if not back_rounded.can_take(back.weight, reader):
                return super().mix(residual, rows, routed, part)
            inner, x = expert_products.inner_of_one_row(routed, part, step), self.leave(residual)
            made = back_rounded.back_rounded(inner, back.weight, chosen, x, reader, launch)
        elif combine_rounded.can_round(hidden, reader):
            each, x = expert_products.made(routed, part, step), self.leave(residual)
            made = combine_rounded.combine_rounded(each, chosen.weights, x, reader, launch.pdl)
        else:
            return super().mix(residual, rows, routed, part)
        return WideRows(made[0], next=NextRows(reader, made[1]))

    def plus(self, residual: WideRows, added: torch.Tensor, post: torch.Tensor | None) -> WideRows:
        self.step.context.group.all_reduce(added)
        return WideRows(self.leave(residual), added, post)

    def gated(self, read: WideRead, part: GatedPart[Projection]) -> Rows:
        if part.gate is None or not part.fused:
            return super().gated(read, part)
        made = self.product(read, part.projection, part.bias)
        return row_kernels.act_mul(made, part.gate.gelu, self.step.context.launch.pdl)
