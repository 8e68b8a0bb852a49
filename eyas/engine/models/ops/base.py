"""The verbs of a layer over the rows of one forward on a GPU. A layer says its equation over them, once.

Each verb that computes has a default made of products, primitive torch operations and what the pool and the
attention need anyway. Defaults are the specification, and any equation runs by them, captured in graphs like
all else: what a layer's parts say and no kernel fuses goes by the default. `few_rows`, `many_rows` and
`exact_rows` hold the residual as their kernels want it, and override what they fuse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from eyas.engine.attention.latent_heads import LatentHeads
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.attention.scores import Scores
from eyas.engine.kernels.experts import combine
from eyas.engine.kernels.latent.latent_rows import write_latents
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import single, skinny
from eyas.engine.kernels.products.blocks import Normed, Rows
from eyas.engine.kernels.products.skinny import empty_padded
from eyas.engine.layers.norm import rms_norm
from eyas.engine.models.fused_step import Forward
from eyas.engine.models.ops import expert_products
from eyas.engine.models.ops.parts import (
    ExpertsPart,
    GatedPart,
    LatentPart,
    OutPart,
    QkvPart,
    Routed,
    RouterPart,
)

ResidualT = TypeVar("ResidualT")
ReadT = TypeVar("ReadT")


class Ops(ABC, Generic[ResidualT, ReadT]):
    """The verbs for one forward's rows. `eps`: of every norm.

    A residual, and what products read of it, are of the way's own kind; a residual that has been passed on is
    not used again.
    """

    def __init__(self, step: Forward, eps: float) -> None:
        self.step, self.eps = step, eps

    @abstractmethod
    def embed(self, table: torch.Tensor, scale: float) -> ResidualT:
        """The rows' tokens in table [vocab, hidden], times `scale`."""

    @abstractmethod
    def residual(self, x: torch.Tensor) -> ResidualT:
        """Rows x [m, hidden], which stay as they are."""

    @abstractmethod
    def joined(self, x: torch.Tensor, matrix: torch.Tensor) -> ResidualT:
        """x [m, k] . matrix [hidden, k]^T."""

    @abstractmethod
    def given(self, x: torch.Tensor) -> ReadT:
        """Rows x [m, k] that products read as they are."""

    @abstractmethod
    def norm(self, residual: ResidualT, norm: row_kernels.Norm | None) -> tuple[ReadT, ResidualT]:
        """What products read of the residual, by a norm if there is one; and the residual, whose `x` are then
        its rows.
        """

    @abstractmethod
    def leave(self, residual: ResidualT) -> torch.Tensor:
        """The residual's rows [m, hidden]."""

    @abstractmethod
    def normed(self, read: ReadT) -> Normed:
        """What products read, as rows of their own."""

    @abstractmethod
    def plus(self, residual: ResidualT, added: torch.Tensor, post: torch.Tensor | None) -> ResidualT:
        """The residual plus the sum over all ranks of `added` [m, hidden]; or plus the norm of that sum with
        gain `post`.
        """

    def qkv(self, read: ReadT, part: QkvPart, layer: torch.Tensor) -> torch.Tensor:
        """Writes keys and values to the pool's layer -> queries [m, heads, dim]."""
        made, heads, rows = self.product(read, part.projection, part.bias), part.heads, self.step.rows
        if part.row_gains is not None:
            counts = heads.q * heads.dim, heads.kv * heads.dim
            for cut, gain in zip(made.split([*counts, counts[1]], 1), part.row_gains, strict=False):
                cut.copy_(rms_norm(cut, gain.flatten(), self.eps))
        q, kv = made.new_empty(rows.count, heads.q, heads.dim), skinny.KvRows(layer, rows.kv_rows)
        rotation, pdl = self.step.rotation(part.rope), self.step.context.launch.pdl
        row_kernels.rope_write(made, heads, q, rotation, kv, pdl)
        return q

    def attend(self, q: torch.Tensor, layer: torch.Tensor, scores: Scores) -> torch.Tensor:
        """q [m, heads, dim] -> what every query attends to, [m, heads * dim]."""
        return self.step.context.attention(q, layer, self.step.rows, scores)

    def store_latents(self, made: torch.Tensor, part: LatentPart, layer: torch.Tensor) -> Rows:
        """Writes the latents and rotated keys of rows [m, queries + latent + rotated] to the pool's layer ->
        the queries, or the normed rows that they are made of, as the next product reads them.
        """
        kv, rotation = skinny.KvRows(layer, self.step.rows.kv_rows), self.step.rotation(part.rope)
        return write_latents(made, part.norms, rotation, kv, self.step.context.launch.pdl)

    def attend_latents(self, queries: torch.Tensor, part: LatentPart, layer: torch.Tensor) -> torch.Tensor:
        """queries [m, heads * (plain + rotated)], not rotated yet -> what heads mix, [m, heads * value]."""
        rotation = self.step.rotation(part.rope)
        heads = LatentHeads(part.scale, keys=part.keys, values=part.values, rotation=rotation)
        return self.attend(queries, layer, heads)

    def gated(self, read: ReadT, part: GatedPart) -> Rows:
        """act(gate) * up, [m, width]; rounded as the next product reads it, if that is done at once."""
        return self._gated(self.normed(read), part)

    def add(self, residual: ResidualT, x: Rows, part: OutPart) -> ResidualT:
        """The residual plus the product of x, summed over all ranks and normed if there is a norm."""
        return self.plus(residual, self.product_of(x, part.projection, part.bias), part.post)

    def product(self, read: ReadT, projection: Projection, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Of what products read of the residual."""
        return self.step.product(self.normed(read), projection, bias)

    def product_of(self, x: Rows, projection: Projection, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Of rows that another verb gave."""
        return self.step.product(x, projection, bias)

    def route(self, rows: Normed, part: RouterPart) -> Routed:
        """Which experts rows take, and how much of each."""
        return expert_products.routed(rows, part, self.step)

    def mix(self, residual: ResidualT, rows: Normed, routed: Routed, part: ExpertsPart) -> ResidualT:
        """The residual plus what its experts make of a row, by weight, and what the one beside them does."""
        return self.plus(residual, self._mixed(rows, routed, part), part.out.post)

    def _mixed(self, rows: Normed, routed: Routed, part: ExpertsPart) -> torch.Tensor:
        """What `mix` adds, [m, hidden], but for the sum over the ranks."""
        step, launch, chosen = self.step, self.step.context.launch, routed.chosen
        if expert_products.is_single(routed, part, step):
            inner = expert_products.inner_of_one_row(routed, part, step)
            return single.back(inner, part.out.projection.weight, chosen, launch.pdl)
        made = expert_products.made(routed, part, step)
        if step.everyones is None:
            return combine.combine(made, chosen.weights, self._beside(rows, part), launch.pdl, launch.exact)
        sums = combine.combine_held(made, chosen.weights, chosen.experts, launch.pdl)
        room = empty_padded(*rows.plain.shape, like=sums)
        added, beside = step.context.sharers.sum_for_owners(sums, room), self._beside(rows, part)
        return added if beside is None else added.add_(beside)

    def _beside(self, rows: Normed, part: ExpertsPart) -> torch.Tensor | None:
        """What the feed-forward beside the experts makes of rows, if there is one."""
        if part.beside is None:
            return None
        gated, down = part.beside
        return self.step.product(self._gated(rows, gated), down)

    def _gated(self, rows: Normed, part: GatedPart) -> Rows:
        if part.gate is None:
            gate, up = self.step.product(rows, part.projection, part.bias).chunk(2, dim=-1)
            return part.activation(gate, up)
        rounding, products = part.projection.rounding, self.step.context.products
        return part.projection.gated(rows.read_by(rounding), products, part.gate)
