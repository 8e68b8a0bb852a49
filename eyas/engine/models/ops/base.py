"""The verbs of a layer over the rows of one forward on a GPU. A layer says its equation over them, once.

Each verb that computes has a default made of products, primitive torch operations and what the pool and the
attention need anyway. Defaults are the specification, and any equation runs by them, captured in graphs like
all else: what a layer's parts say and no kernel fuses goes by the default. `few_rows`, `many_rows` and
`exact_rows` hold the residual as their kernels want it, and override what they fuse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from eyas.engine.checkpoint.rope import Rope
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.attention.scores import Scores
from eyas.engine.kernels.experts.grouped_task import Gate
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.blocks import Normed, Rows
from eyas.engine.layers.activations import Activation
from eyas.engine.layers.norm import rms_norm
from eyas.engine.models.fused_residual import NarrowRows, ScaledRows
from eyas.engine.models.fused_step import Forward

ResidualT = TypeVar("ResidualT")
ReadT = TypeVar("ReadT")


@dataclass(frozen=True)
class QkvPart:
    """The product of q, k and v, and what they pass until they are stored.

    `heads`: with the norms of each head, if there are such. `row_gains`: of the norms of all heads of q as
    one row, and of k, [heads, dim] and [kv_heads, dim].
    """

    projection: Projection
    heads: row_kernels.Heads
    rope: Rope
    bias: torch.Tensor | None = None
    row_gains: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True)
class GatedPart:
    """The product of gate and up, and the activation behind it.

    `gate`: what kernels know of the activation; None: they do not know it, or there is a bias. `fused`:
    whether this product and the one behind it are of numbers themselves, so that kernels may put more into
    them.
    """

    projection: Projection
    activation: Activation
    gate: Gate | None
    fused: bool
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class OutPart:
    """A product whose result is added to the residual; with `post`, the norm of the result with that gain.

    `one_way`: in exact arithmetic forwards of few rows are no others, so its bits have no pattern to follow.
    """

    projection: Projection
    bias: torch.Tensor | None = None
    post: torch.Tensor | None = None
    one_way: bool = False


class ExpertsPart(Protocol):
    """A feed-forward of experts, which says its verbs itself."""

    norm: row_kernels.Norm

    def narrow(self, residual: NarrowRows, step: Forward) -> NarrowRows:
        """At most 128 rows, with what it makes of their norm added to them."""

    def wide(self, normed: Normed, step: Forward) -> torch.Tensor:
        """-> what is added to the residual, [m, hidden], but for the sum over the ranks."""

    def exact_wide(self, residual: ScaledRows, step: Forward) -> ScaledRows:
        """Any rows, with what it makes of their norm added to them, by the bits of `narrow`."""


class LatentPart(Protocol):
    """Attention over latents, which says its verbs itself, up to what every head has mixed."""

    def narrow(self, source: skinny.Source, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        """At most 128 rows -> every head's values, [m, heads * value]."""

    def wide(self, normed: Normed, layer: torch.Tensor, step: Forward) -> torch.Tensor:
        """The same of any number of rows."""

    def keep_narrow(self, source: skinny.Source, layer: torch.Tensor, step: Forward) -> Rows:
        """`narrow`, as far as it keeps the rows."""

    def keep_wide(self, normed: Normed, layer: torch.Tensor, step: Forward) -> Rows:
        """`wide`, as far as it keeps the rows."""


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

    @abstractmethod
    def latents(self, read: ReadT, part: LatentPart, layer: torch.Tensor) -> torch.Tensor:
        """Keeps the rows and attends -> [m, heads * value]."""

    @abstractmethod
    def keep_latents(self, read: ReadT, part: LatentPart, layer: torch.Tensor) -> None:
        """Keeps the rows."""

    @abstractmethod
    def experts(self, residual: ResidualT, part: ExpertsPart) -> ResidualT:
        """With what the experts make of its norm added."""

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

    def gated(self, read: ReadT, part: GatedPart) -> Rows:
        """act(gate) * up, [m, width]; rounded as the next product reads it, if that is done at once."""
        if part.gate is None:
            gate, up = self.product(read, part.projection, part.bias).chunk(2, dim=-1)
            return part.activation(gate, up)
        rounding, products = part.projection.rounding, self.step.context.products
        return part.projection.gated(self.normed(read).read_by(rounding), products, part.gate)

    def add(self, residual: ResidualT, x: Rows, part: OutPart) -> ResidualT:
        """The residual plus the product of x, summed over all ranks and normed if there is a norm."""
        return self.plus(residual, self.step.product(x, part.projection, part.bias), part.post)

    def product(self, read: ReadT, projection: Projection, bias: torch.Tensor | None) -> torch.Tensor:
        """Of what products read of the residual."""
        return self.step.product(self.normed(read), projection, bias)
