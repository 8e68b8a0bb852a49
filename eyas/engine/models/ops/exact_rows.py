"""Any number of rows with the bits that `FewRows` gives them in exact arithmetic.

A product reads raw rows, and the kernel behind it scales them by 1 / rms; or, of a format that cannot, rows
that have passed their norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.products import exact_wide, skinny
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products.blocks import NormedRows, Rows
from eyas.engine.models.ops.base import scaled
from eyas.engine.models.ops.device import DeviceOps
from eyas.engine.models.ops.parts import GatedPart, OutPart, QkvPart


@dataclass(frozen=True)
class ScaledRows:
    """The residual rows [m, hidden], and 1 / rms of each, float32 [m]."""

    x: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class ScaledRead:
    """Rows [m, k], 1 / rms of each, float32 [m], and the norm that their reader applies."""

    x: torch.Tensor
    scales: torch.Tensor
    norm: row_kernels.NormInput | None = None


class ExactRows(DeviceOps[ScaledRows, ScaledRead]):
    """The residual is changed in place."""

    def embed(self, table: torch.Tensor, scale: float) -> ScaledRows:
        x, _ = row_kernels.embed(self.step.rows.tokens, table, scale=scale)
        return self._scaled(x)

    def residual(self, x: torch.Tensor) -> ScaledRows:
        return self._scaled(x.clone())

    def joined(self, x: torch.Tensor, matrix: torch.Tensor) -> ScaledRows:
        return self._scaled(exact_wide.product(x, matrix, self.step.context.launch))

    def given(self, x: torch.Tensor) -> ScaledRead:
        return ScaledRead(x, x.new_ones(x.shape[0], dtype=torch.float32))

    def rms(self, residual: ScaledRows, norm: row_kernels.NormInput | None) -> tuple[ScaledRead, ScaledRows]:
        if norm is None:
            return self.given(residual.x), residual
        return ScaledRead(residual.x, residual.scales, norm), residual

    def leave(self, residual: ScaledRows) -> torch.Tensor:
        return residual.x

    def normed(self, read: ScaledRead) -> NormedRows:
        return self._finished(read.x, read.norm)

    def plus(self, residual: ScaledRows, added: torch.Tensor, post: torch.Tensor | None) -> ScaledRows:
        """`added`: [m, hidden], or what `exact_wide.shares` gave. It is changed in place."""
        group, x = self.step.context.group, residual.x
        if group.ranks == 1:
            return self._scaled(x, added, post)
        added = exact_wide.total(added, x.dtype)
        if post is None:
            group.sum_in_order(added, x)
            return self._scaled(added)
        group.sum_in_order(added)
        return self._scaled(x, added, post)

    def qkv(self, read: ScaledRead, part: QkvPart[Projection], layer: int) -> torch.Tensor:
        if part.normed_apart:
            return super().qkv(read, part, layer)
        read, heads = self._readable(read, part.projection), part.heads
        kv = skinny.KvRows(self.pool.layer(layer), self.rows_of(layer).kv_rows)
        kind = skinny.qkv_kind(heads.norms is not None, kv.scaled)
        raw = self.step.exact_product(read.x, part.projection, kind, heads.dim)
        q = raw.new_empty(raw.shape[0], heads.q, heads.dim)
        after = exact_wide.AfterQkv(part.bias, heads.norms, self.step.context.launch.pdl)
        exact_wide.rope_write(raw, read.scales, after, q, self.step.rotation(part.spec), kv)
        return q

    def gated(self, read: ScaledRead, part: GatedPart[Projection]) -> Rows:
        if part.gate is None or not part.fused:
            return super().gated(read, part)
        read = self._readable(read, part.projection)
        raw = self.step.exact_product(read.x, part.projection, "gated")
        return exact_wide.act_mul(raw, read.scales, part.gate.gelu, self.step.context.launch.pdl)

    def add(self, residual: ScaledRows, x: Rows, part: OutPart[Projection]) -> ScaledRows:
        if part.one_way:
            return super().add(residual, x, part)
        added = self.step.exact_shares(x, part.projection)
        if part.bias is not None or part.scale != 1.0:
            added = exact_wide.total(added, residual.x.dtype)
            added = scaled(added if part.bias is None else added.add_(part.bias), part)
        return self.plus(residual, added, part.post)

    def _scaled(
        self, x: torch.Tensor, added: torch.Tensor | None = None, post: torch.Tensor | None = None
    ) -> ScaledRows:
        return ScaledRows(x, exact_wide.settle(x, self.eps, added, post, self.step.context.launch.pdl))

    def _readable(self, read: ScaledRead, projection: Projection) -> ScaledRead:
        """The read with its norm applied, if the product cannot do it behind: of rows without a gain."""
        if projection.matrix is not None and (read.norm is None or read.norm.gain is None):
            return read
        norm = None if read.norm is None else replace(read.norm, rounding=None)
        return self.given(self._finished(read.x, norm).plain)


class ExactManyRows(ExactRows):
    """Exact verbs of many rows, in layers that few rows pass by `FewRows`: plain products have the bits of
    those, too.
    """

    def product(
        self, read: ScaledRead, projection: Projection, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if projection.matrix is None:
            return super().product(read, projection, bias)
        read = self._readable(read, projection)
        made = self.step.exact_product(read.x, projection)
        if read.norm is not None:
            made.mul_(read.scales[:, None])
        return made if bias is None else made.add_(bias)
