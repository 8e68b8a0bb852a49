"""At most 128 rows: reading the weights is the whole cost, and all else rides along with the products.

A norm is no kernel: what products read is the residual and the sums of its squares (`skinny.SkinnyInput`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.experts import combine
from eyas.engine.kernels.experts.one_row import JudgedRow
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import single, single_attention, skinny
from eyas.engine.kernels.products.blocks import NormedRows, Rows
from eyas.engine.models.layer import DecoderLayer
from eyas.engine.models.ops import expert_products
from eyas.engine.models.ops.device import DeviceOps, Experts
from eyas.engine.models.ops.parts import GatedPart, OutPart, QkvPart, Routed, RouterPart
from eyas.engine.parallel.group import ProcessGroup

BARE = skinny.LinearEnd()


@dataclass(frozen=True)
class GainedRows:
    """Rows [m, hidden] times a norm's gain [hidden], rounded: for a product whose weight has not got it."""

    x: torch.Tensor
    gain: torch.Tensor


@dataclass(frozen=True)
class NarrowRows:
    """The residual rows [m, hidden], and parts of their squares' sums, float32 [parts, 128]."""

    x: torch.Tensor
    sums: torch.Tensor | None = None
    gained: GainedRows | None = None


@dataclass(frozen=True)
class SourceRead:
    """Rows, and the norm that their reader applies."""

    rows: NarrowRows
    norm: row_kernels.NormInput | None = None

    @property
    def source(self) -> skinny.SkinnyInput:
        """The input of products that apply the norm to what they read; its gain is in their weights."""
        if self.norm is None:
            return skinny.SkinnyInput(self.rows.x)
        assert self.rows.sums is not None, "rows without sums of squares have readers of their own"
        return skinny.SkinnyInput(self.rows.x, self.rows.sums, self.norm.eps)


class FewRows(DeviceOps[NarrowRows, SourceRead]):
    """Four products of a dense layer, and attention: nothing more, where kernels know the layer's parts."""

    def embed(self, table: torch.Tensor, scale: float) -> NarrowRows:
        launch = self.step.context.launch
        tokens, how = self.step.rows.tokens, {"pdl": launch.pdl, "exact": launch.exact}
        return NarrowRows(*row_kernels.embed(tokens, table, sums=True, scale=scale, **how))

    def residual(self, x: torch.Tensor) -> NarrowRows:
        return NarrowRows(x)

    def joined(self, x: torch.Tensor, matrix: torch.Tensor) -> NarrowRows:
        return self._summed(skinny.SkinnyInput(x), matrix)

    def given(self, x: torch.Tensor) -> SourceRead:
        return SourceRead(NarrowRows(x))

    def rms(self, residual: NarrowRows, norm: row_kernels.NormInput | None) -> tuple[SourceRead, NarrowRows]:
        return SourceRead(residual, norm), residual

    def leave(self, residual: NarrowRows) -> torch.Tensor:
        return residual.x

    def normed(self, read: SourceRead) -> NormedRows:
        return self._finished(read.rows.x, read.norm)

    def plus(self, residual: NarrowRows, added: torch.Tensor, post: torch.Tensor | None) -> NarrowRows:
        launch, group, width = self.step.context.launch, self.step.context.group, added.shape[1]
        if post is not None:
            (group.sum_in_order if launch.exact else group.all_reduce)(added)
            sums = row_kernels.add_normed(added, residual.x, post, self.eps, launch.pdl, launch.exact)
            return NarrowRows(residual.x, sums)
        parts = width // skinny.sum_group(width) if launch.exact else ProcessGroup.sum_parts(width)
        sums = self._room_for_sums(parts, added)
        (group.sum_in_order if launch.exact else group.all_reduce_add)(added, residual.x, sums)
        return NarrowRows(added, sums)

    def times(self, residual: NarrowRows, number: torch.Tensor) -> NarrowRows:
        if residual.sums is not None:
            residual.sums.mul_(number.float().square())
        return super().times(residual, number)

    def qkv(self, read: SourceRead, part: QkvPart[Projection], layer: int) -> torch.Tensor:
        if part.projection.matrix is None or part.normed_apart or part.stored is not None:
            return super().qkv(read, part, layer)
        rows, heads = self.rows_of(layer), part.heads
        q = skinny.empty_padded(rows.count, heads.q, heads.dim, like=read.rows.x)
        kv, rotation = skinny.KvRows(self.pool.layer(layer), rows.kv_rows), self.step.rotation(part.spec)
        source, launch = self._source(read), self.step.context.launch
        updates = self.step.updates(source.x, part.projection)
        weights = skinny.QkvWeights(part.projection.matrix, part.bias, heads.norms, updates)
        if single_attention.can_take_qkv(rows.count, weights, kv, launch):
            single_attention.qkv_rope(source, weights, q, rotation, kv, launch.pdl)
        else:
            skinny.qkv_rope(source, weights, q, rotation, kv, launch)
        return q

    def gated(self, read: SourceRead, part: GatedPart[Projection]) -> Rows:
        matrix = part.projection.matrix
        if matrix is None or part.gate is None or not part.fused:
            return super().gated(read, part)
        inner = skinny.empty_padded(read.rows.x.shape[0], matrix.shape[0] // 2, like=read.rows.x)
        source, launch = self._source(read), self.step.context.launch
        skinny.gated(
            source, matrix, inner, launch, part.gate.gelu, self.step.updates(source.x, part.projection)
        )
        return inner

    def add(self, residual: NarrowRows, x: Rows, part: OutPart[Projection]) -> NarrowRows:
        """The product adds the residual, where nothing but a bias stands between them; exact arithmetic
        rounds before it adds one.
        """
        launch, bias = self.step.context.launch, part.bias
        apart = not part.bare or self.step.context.group.ranks > 1 or (launch.exact and bias is not None)
        if (matrix := part.projection.matrix) is None or apart:
            return super().add(residual, x, part)
        assert isinstance(x, torch.Tensor)
        updates = self.step.updates(x, part.projection)
        end = skinny.LinearEnd(residual.x, gain=part.gain, bias=bias, updates=updates)
        single = updates is None and single_attention.can_take(x.shape[0], matrix, launch)
        if not (part.to_experts and single):
            return self._summed(skinny.SkinnyInput(x), matrix, end)
        out = skinny.empty_padded(1, matrix.shape[0], like=x)
        single_attention.linear(x, matrix, out, end, launch.pdl)
        return NarrowRows(out)

    def product(
        self, read: SourceRead, projection: Projection, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if projection.matrix is None:
            return super().product(read, projection, bias)
        return self._product(self._source(read), projection, bias)

    def product_of(self, x: Rows, projection: Projection, bias: torch.Tensor | None = None) -> torch.Tensor:
        if projection.matrix is None:
            return super().product_of(x, projection, bias)
        assert isinstance(x, torch.Tensor)
        return self._product(skinny.SkinnyInput(x), projection, bias)

    def chosen(
        self, read: SourceRead, router: RouterPart, part: Experts
    ) -> tuple[NormedRows, Routed | JudgedRow]:
        if router.updated is not None and self.step.ends_apart(router.updated):
            return super().chosen(read, router, part)
        rows = read.rows
        row = expert_products.judged(rows.x, read.norm, router, part, self.step)
        if row is not None:
            return NormedRows(row.normed), row
        routed = expert_products.routed_row(rows.x, read.norm, router, self.step)
        if routed is None:
            source = skinny.SkinnyInput(rows.x, rows.sums)
            routed = expert_products.routed_at_once(source, read.norm, router, part, self.step)
        return super().chosen(read, router, part) if routed is None else (routed.rows, routed)

    def mix(
        self,
        residual: NarrowRows,
        rows: NormedRows,
        routed: Routed | JudgedRow,
        part: Experts,
    ) -> NarrowRows:
        if isinstance(routed, JudgedRow):
            return NarrowRows(*expert_products.mixed_row(routed, residual.x, part, self.step))
        step, launch, chosen = self.step, self.step.context.launch, routed.chosen
        if (
            step.context.group.ranks > 1
            or step.everyones is not None
            or part.out.post is not None
            or part.out.scale != 1.0
        ):
            return super().mix(residual, rows, routed, part)
        if expert_products.is_single(routed, part, step):
            inner, back = expert_products.inner_of_one_row(routed, part, step), part.out.projection.weight
            return NarrowRows(*single.back_add(inner, back, chosen, residual.x, launch.pdl))
        made, beside = expert_products.made(routed, part, step), self._beside(rows, part)
        return NarrowRows(
            *combine.combine_add(made, chosen.weights, beside, residual.x, launch.pdl, launch.exact)
        )

    def _source(self, read: SourceRead) -> skinny.SkinnyInput:
        """The rows for a product that norms them; or normed ones, where neither the weights nor the rows
        have the gain in them.
        """
        gained, norm = read.rows.gained, read.norm
        if norm is None or norm.gain is None:
            return read.source
        if gained is not None and gained.gain is norm.gain:
            return skinny.SkinnyInput(gained.x, read.rows.sums, norm.eps)
        return skinny.SkinnyInput(self.normed(read).plain)

    def _product(
        self, source: skinny.SkinnyInput, projection: Projection, bias: torch.Tensor | None
    ) -> torch.Tensor:
        launch, matrix = self.step.context.launch, projection.matrix
        assert matrix is not None
        out = skinny.empty_padded(source.x.shape[0], matrix.shape[0], like=source.x)
        updates = self.step.updates(source.x, projection)
        end = skinny.LinearEnd(bias=None if launch.exact else bias, updates=updates)
        skinny.linear(source, matrix, out, launch, end)
        return out.add_(bias) if launch.exact and bias is not None else out

    def _summed(
        self,
        source: skinny.SkinnyInput,
        matrix: skinny.SkinnyWeight,
        end: skinny.LinearEnd = BARE,
    ) -> NarrowRows:
        """The product with what `end` adds, the sums of its squares, and it times the gain.

        float16 has no room for that, and exact arithmetic norms many rows before it multiplies them.
        """
        launch = self.step.context.launch
        out = skinny.empty_padded(source.x.shape[0], matrix.shape[0], like=source.x)
        sums = self._room_for_sums(skinny.linear_parts(source, matrix, launch), out)
        if (gain := end.gain) is None or launch.exact or out.dtype == torch.float16:
            skinny.linear(source, matrix, out, launch, replace(end, sums=sums, gain=None))
            return NarrowRows(out, sums)
        gained = skinny.empty_padded(*out.shape, like=out)
        skinny.linear(source, matrix, out, launch, replace(end, sums=sums, gained=gained))
        return NarrowRows(out, sums, GainedRows(gained, gain))

    @staticmethod
    def _room_for_sums(parts: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(parts, skinny.MAX_ROWS, dtype=torch.float32)


def most_rows(layers: Sequence[DecoderLayer[Projection]], *, exact: bool = False) -> int:
    """The most rows for which `FewRows` are the verbs of all these layers (0: of none).

    In exact arithmetic latents have one way alone.
    """
    return min(0 if _is_left_out(layer, exact) else skinny.MAX_ROWS for layer in layers)


def _is_left_out(layer: DecoderLayer[Projection], exact: bool) -> bool:
    unfused = any(each.matrix is None for each in layer.mixing)
    return unfused or bool(exact and layer.spec.attention.latent)
