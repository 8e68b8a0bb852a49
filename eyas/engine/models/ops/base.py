"""The verbs of a layer over the rows of one forward. A layer says its equation over them, once.

A few verbs are made where the rows are: products, norms, what the pool and the attention need. All others
have a default of those and of primitive torch operations, and run everywhere as they stand: a new equation is
said here. `torch_ops` computes it on a CPU, where it is the specification; `device` does on a GPU, where
`few_rows`, `many_rows` and `exact_rows` override what they fuse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch

from eyas.engine.formats.projection import ProjectionT
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products.blocks import Rows
from eyas.engine.layers.norm import LayerNorm, centred, rms_norm
from eyas.engine.layers.routing import sigmoid
from eyas.engine.models.ops import recurrent
from eyas.engine.models.ops.parts import (
    DeltaPart,
    ExpertsPart,
    GatedPart,
    LatentPart,
    OutPart,
    QkvPart,
    RouterPart,
)
from eyas.engine.states.delta import DeltaRule

ResidualT = TypeVar("ResidualT")
ReadT = TypeVar("ReadT")


class Ops(ABC, Generic[ResidualT, ReadT, ProjectionT]):
    """The verbs for one forward's rows. `eps`: of every norm.

    A residual, and what products read of it, are of the way's own kind; a residual that has been passed on is
    not used again. `layer`: a layer's number in the pool.
    """

    eps: float

    @abstractmethod
    def embed(self, table: torch.Tensor, scale: float) -> ResidualT:
        """The rows' tokens in table [vocab, hidden], times `scale`."""

    @abstractmethod
    def residual(self, x: torch.Tensor) -> ResidualT:
        """Rows x [m, hidden], which stay as they are."""

    @abstractmethod
    def joined(self, x: torch.Tensor, matrix: Any) -> ResidualT:
        """Rows x [m, k] times a draft head's matrix, as `Machine.joining` gave it."""

    @abstractmethod
    def given(self, x: torch.Tensor) -> ReadT:
        """Rows x [m, k] that products read as they are."""

    @abstractmethod
    def rms(self, residual: ResidualT, norm: row_kernels.NormInput | None) -> tuple[ReadT, ResidualT]:
        """`norm` by a root mean square, or by none."""

    @abstractmethod
    def leave(self, residual: ResidualT) -> torch.Tensor:
        """The residual's rows [m, hidden]."""

    @property
    def leaving(self) -> torch.Tensor | None:
        """The rows that are to leave the last layer, int32 [n]; None: all."""
        return None

    def some(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows x [m, k] -> those of the numbers int32 [n]."""
        return x.index_select(0, rows)

    def fewer(self, residual: ResidualT, rows: torch.Tensor) -> ResidualT:
        """The residual of these rows alone, int32 [n]."""
        return self.residual(self.some(self.leave(residual), rows))

    @abstractmethod
    def whole(self, residual: ResidualT) -> torch.Tensor:
        """The residual's rows as products give them: with those that pad them."""

    @abstractmethod
    def grown(self, residual: ResidualT, other: ResidualT, post: torch.Tensor | None) -> ResidualT:
        """The residual plus another, which is the same on all ranks; or plus its norm with gain `post`."""

    @abstractmethod
    def room(self, sizes: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Room for something of each row, [m, *sizes]."""

    @abstractmethod
    def put(self, x: torch.Tensor, room: torch.Tensor, place: int) -> None:
        """Copies rows x [m, hidden] into their place of a room [m, places, hidden]."""

    @abstractmethod
    def placed(self, table: torch.Tensor) -> torch.Tensor:
        """table [positions, ...] -> its row at the position of each row."""

    @abstractmethod
    def product(self, read: ReadT, projection: ProjectionT, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product of what products read of the residual -> [m, n]."""

    @abstractmethod
    def product_of(self, x: Rows, projection: ProjectionT, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product of rows x [m, k] that a verb has made -> [m, n]."""

    @abstractmethod
    def plus(self, residual: ResidualT, added: torch.Tensor, post: torch.Tensor | None) -> ResidualT:
        """The residual plus the sum over all ranks of `added` [m, hidden]; or plus the norm of that sum with
        gain `post`. `added` is not used again.
        """

    @abstractmethod
    def store(self, made: torch.Tensor, part: QkvPart[ProjectionT], layer: int) -> torch.Tensor:
        """made [m, (heads + 2 kv_heads) * dim]: q, k and v by heads. Norms and rotates them as `part` says,
        and writes keys and values -> queries [m, heads, dim].
        """

    @abstractmethod
    def rotated(self, made: torch.Tensor, part: QkvPart[ProjectionT]) -> torch.Tensor:
        """made [m, heads * dim]: queries alone. Norms and rotates them as `part` says -> [m, heads, dim]."""

    @abstractmethod
    def attend(self, q: torch.Tensor, part: QkvPart[ProjectionT], layer: int) -> torch.Tensor:
        """q [m, heads, dim] -> what every query attends to, [m, heads * dim]."""

    @abstractmethod
    def store_latents(self, made: torch.Tensor, part: LatentPart, layer: int) -> Rows:
        """Writes the latents and rotated keys of rows [m, queries + latent + rotated] to the pool's layer ->
        the queries, or the normed rows that they are made of, as the next product reads them.
        """

    @abstractmethod
    def attend_latents(self, queries: torch.Tensor, part: LatentPart, layer: int) -> torch.Tensor:
        """queries [m, heads * (plain + rotated)], not rotated yet -> what heads mix, [m, heads * value]."""

    @abstractmethod
    def recur(self, inputs: torch.Tensor, gates: torch.Tensor, rule: DeltaRule, layer: int) -> torch.Tensor:
        """inputs [m, rule.shape.inputs] before the convolution and gates float32 [m, rule.shape.gates]: keeps
        the rows, and folds those into the state that are due -> what each row reads of the state,
        [m, value heads * value size], of the inputs' dtype.
        """

    @abstractmethod
    def normed(self, read: ReadT) -> Any:
        """The rows that products read of the residual, as rows of their own that several verbs take."""

    @abstractmethod
    def route(self, rows: Any, part: RouterPart, judged: Any = None) -> Any:
        """Which experts the rows that `normed` gave take, and how much of each. `judged`: the rows that the
        router reads, if they are others.
        """

    @abstractmethod
    def mix(self, residual: ResidualT, rows: Any, routed: Any, part: ExpertsPart[ProjectionT]) -> ResidualT:
        """The residual plus what its experts make of a row, by weight, and what the one beside them does; or
        plus its norm. `routed`: as `route` gave it.
        """

    def chosen(self, read: ReadT, router: RouterPart, part: ExpertsPart[ProjectionT]) -> tuple[Any, Any]:
        """The rows that `normed` gives, and which of the part's experts they take, as `route` says it."""
        rows = self.normed(read)
        return rows, self.route(rows, router)

    def norm(
        self, residual: ResidualT, norm: row_kernels.NormInput | LayerNorm | None
    ) -> tuple[ReadT, ResidualT]:
        """The rows that products read of the residual, by a norm if there is one; and the residual, of which
        the rows that `leave` gives may then be read, and it be passed on.
        """
        if not isinstance(norm, LayerNorm):
            return self.rms(residual, norm)
        _, residual = self.rms(residual, None)
        return self.given(norm(self.leave(residual))), residual

    def qkv(self, read: ReadT, part: QkvPart[ProjectionT], layer: int) -> torch.Tensor:
        """Writes keys and values to the pool's layer, if it has some -> queries [m, heads, dim]."""
        return self.finish_qkv(self.product(read, part.projection, part.bias), part, layer)

    def latent_queries(
        self, made: torch.Tensor, part: LatentPart, second: ProjectionT, layer: int
    ) -> torch.Tensor:
        """Writes as `store_latents`, of rows whose queries are a product of their inner row -> queries [m,
        heads * (plain + rotated)].
        """
        return self.product_of(self.store_latents(made, part, layer), second)

    def gated_qkv(
        self, read: ReadT, part: QkvPart[ProjectionT], layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, of a product that has a gate for each query behind the values: queries, and gates
        [m, heads * dim].
        """
        made, heads = self.product(read, part.projection, part.bias), part.heads
        columns = (heads.q + 2 * heads.kv) * heads.dim
        made, gates = made.split((columns, heads.q * heads.dim), 1)
        return self.finish_qkv(made, part, layer), gates

    def let_through(self, mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """mixed [m, n] times the sigmoid of gates [m, n]; in its place."""
        return mixed.mul_(sigmoid(gates))

    def delta(self, read: ReadT, part: DeltaPart[ProjectionT], layer: int) -> torch.Tensor:
        """Keeps the rows -> what heads read of their states, normed and times a gate,
        [m, value heads * value size].
        """
        shape = part.rule.shape
        values, heads = shape.value_heads * shape.value_size, (shape.value_heads,) * (1 + shape.corrects)
        columns = (shape.inputs, values, *heads, shape.spare_rows)
        inputs, gate, *numbers, _ = self.product(read, part.projection).split(columns, 1)
        made = self.recur(inputs.contiguous(), recurrent.gates(numbers, part), part.rule, layer)
        return recurrent.gated(made, gate, part, self.eps)

    def finish_qkv(self, made: torch.Tensor, part: QkvPart[ProjectionT], layer: int) -> torch.Tensor:
        """The queries of a product of `qkv`, rows of any stride, after norms; keys and values are stored."""
        heads = part.heads
        if not heads.kv:
            return self.rotated(made, part)
        counts = heads.q * heads.dim, heads.kv * heads.dim
        cuts = made.split([*counts, counts[1]], 1)
        for cut, gain in zip(cuts, part.row_gains or (), strict=False):
            cut.copy_(rms_norm(cut, gain.flatten(), self.eps))
        for cut, gain in zip(cuts, part.centred_gains or (), strict=False):
            cut.copy_(centred(cut.unflatten(1, gain.shape), gain, self.eps).flatten(1))
        if part.value_gain is not None:
            values = cuts[2].unflatten(1, (heads.kv, heads.dim))
            values.copy_(rms_norm(values, part.value_gain, self.eps))
        return self.store(made, part, layer)

    def weighed(self, q: torch.Tensor, part: QkvPart[ProjectionT]) -> torch.Tensor:
        """Queries [m, heads, dim] as `qkv` gave them, times what the part says; in their place."""
        if part.query_gain is not None:
            q = q.mul_(part.query_gain)
        if part.temperatures is not None:
            q = q.mul_(self.placed(part.temperatures)[:, None, None])
        return q

    def times(self, residual: ResidualT, number: torch.Tensor) -> ResidualT:
        """The residual times a number [1]."""
        _, residual = self.rms(residual, None)
        self.leave(residual).mul_(number)
        return residual

    def gated(self, read: ReadT, part: GatedPart[ProjectionT]) -> Rows:
        """act(gate) * up, [m, width]; on a GPU perhaps rounded as the next product reads it."""
        return part.activation(self.product(read, part.projection, part.bias))

    def add(self, residual: ResidualT, x: Rows, part: OutPart[ProjectionT]) -> ResidualT:
        """The residual plus the product of x, scaled, summed over all ranks and normed if there is a norm."""
        return self.plus(residual, scaled(self.product_of(x, part.projection, part.bias), part), part.post)


def scaled(made: torch.Tensor, part: OutPart[Any]) -> torch.Tensor:
    """The rows of a part's product, in their place, as they are added to the residual."""
    return made if part.scale == 1.0 else made.mul_(part.scale)
