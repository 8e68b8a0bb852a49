"""The verbs of a layer on a GPU, as far as the ways through it agree: kernels of one thing each.

What a layer's parts say and no kernel fuses goes by these, captured in CUDA graphs like all else. How a
residual is stored as its kernels read it is a way's own: `few_rows`, `many_rows`, `exact_rows`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from eyas.engine.attention.latent_heads import LatentHeads
from eyas.engine.batch.rows import ForwardRows
from eyas.engine.formats.fp8 import Fp8Projection
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.experts import combine
from eyas.engine.kernels.latent import latent_query
from eyas.engine.kernels.latent.latent_rows import write_latents
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import single, skinny
from eyas.engine.kernels.products.blocks import NormedRows, Rows
from eyas.engine.kernels.products.skinny import empty_padded
from eyas.engine.kernels.states.gates import gated_groups, gated_norm, rule_gates
from eyas.engine.kernels.states.order import DeltaLayer
from eyas.engine.kernels.states.recur import recur
from eyas.engine.kernels.states.rings import SolvedStore
from eyas.engine.kernels.states.short import convolve
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.norm import rms_norm
from eyas.engine.models.ops import expert_products
from eyas.engine.models.ops.base import Ops, ReadT, ResidualT, scaled
from eyas.engine.models.ops.device_step import Forward
from eyas.engine.models.ops.parts import (
    DeltaPart,
    ExpertsPart,
    GatedPart,
    LatentPart,
    QkvPart,
    Routed,
    RouterPart,
)
from eyas.engine.states.convolution import ShortConvolution
from eyas.engine.states.delta import DeltaRule
from eyas.engine.states.shape import SpaceShape

Experts = ExpertsPart[Projection]


class DeviceOps(Ops[ResidualT, ReadT, Projection]):
    """The verbs of layers on a GPU, for one forward's rows over `pool`. `eps`: of every norm."""

    def __init__(self, step: Forward, pool: KvPool, eps: float) -> None:
        self.step, self.pool, self.eps = step, pool, eps
        self._rooms: dict[int, torch.Tensor] = {}

    def rows_of(self, layer: int) -> ForwardRows:
        """The forward's rows in a layer: where they are written, and which pages they see."""
        return self.step.rows.in_group(self.pool.group_of(layer))

    def _finished(self, x: torch.Tensor, norm: row_kernels.NormInput | None) -> NormedRows:
        """Rows x [m, k] that have passed the norm, if there is one."""
        launch = self.step.context.launch
        return NormedRows(x) if norm is None else row_kernels.normed(x, norm, launch.pdl, launch.exact)

    def whole(self, residual: ResidualT) -> torch.Tensor:
        return self.leave(residual)

    def grown(self, residual: ResidualT, other: ResidualT, post: torch.Tensor | None) -> ResidualT:
        added = self.leave(other)
        if self.step.context.group.rank:
            added.zero_()  # what the sum over the ranks has already
        return self.plus(residual, added, post)

    def room(self, sizes: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return empty_padded(self.step.rows.count, *sizes, like=like)

    @property
    def leaving(self) -> torch.Tensor | None:
        return self.step.rows.leaving

    def some(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return row_kernels.gather_rows(x, rows, self.step.context.launch.pdl)

    def put(self, x: torch.Tensor, room: torch.Tensor, place: int) -> None:
        row_kernels.put_rows(x, room, place, self.step.context.launch.pdl)

    def placed(self, table: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, self.step.rows.positions)

    def product(self, read: ReadT, projection: Projection, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product of what products read of the residual, by the kernel that the weight's format
        chooses."""
        return self.step.product(self.normed(read), projection, bias)

    def product_of(self, x: Rows, projection: Projection, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product of rows that another verb gave, which may be rounded."""
        return self.step.product(x, projection, bias)

    def qkv(self, read: ReadT, part: QkvPart[Projection], layer: int) -> torch.Tensor:
        """A product that adds no bias of its own leaves it to the kernel that rotates."""
        if part.bias is None or part.normed_apart or part.projection.matrix is not None:
            return super().qkv(read, part, layer)
        made, heads = self.product(read, part.projection), replace(part.heads, bias=part.bias)
        return self.finish_qkv(made, replace(part, heads=heads), layer)

    def store(self, made: torch.Tensor, part: QkvPart[Projection], layer: int) -> torch.Tensor:
        heads, rows = part.heads, self.rows_of(layer)
        q = made.new_empty(rows.count, heads.q, heads.dim)
        kv = skinny.KvRows(self.pool.layer(layer, part.stored), rows.kv_rows)
        rotation, pdl = self.step.rotation(part.spec), self.step.context.launch.pdl
        row_kernels.rope_write(made, heads, q, rotation, kv, pdl)
        return q

    def rotated(self, made: torch.Tensor, part: QkvPart[Projection]) -> torch.Tensor:
        q = made.unflatten(1, (-1, part.heads.dim))
        if (norms := part.heads.norms) is not None:
            q = rms_norm(q, norms.gains[0], norms.eps)
        rotation = self.step.rotation(part.spec)
        angles = (table[rotation.positions][:, None] for table in (rotation.cos, rotation.sin))
        return _rotated(q.float(), *angles).to(made.dtype)

    def attend(self, q: torch.Tensor, part: QkvPart[Projection], layer: int) -> torch.Tensor:
        rows = self.pool.layer(layer, part.stored)
        return self.step.context.attention(q, rows, self.rows_of(layer), part.scores)

    def let_through(self, mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return row_kernels.gate_rows(mixed, gates, self.step.context.launch.pdl)

    def store_latents(self, made: torch.Tensor, part: LatentPart, layer: int) -> Rows:
        kv, rotation = self._latents(part, layer)
        return write_latents(made, part.norms, rotation, kv, self.step.context.launch.pdl)

    def latent_queries(
        self, made: torch.Tensor, part: LatentPart, second: Projection, layer: int
    ) -> torch.Tensor:
        """Queries of latents; for one row, one launch does both products."""
        launch = self.step.context.launch
        fits = isinstance(second, Fp8Projection) and not launch.exact
        if not fits or not latent_query.takes(len(made), part.norms, second.weight):
            return super().latent_queries(made, part, second, layer)
        kv, rotation = self._latents(part, layer)
        return latent_query.query(made, part.norms, rotation, kv, second.weight, launch.pdl)

    def _latents(self, part: LatentPart, layer: int) -> tuple[skinny.KvRows, skinny.RotaryInput]:
        """The cached rows of latents in a layer, and the rotation of their keys."""
        kv = skinny.KvRows(self.pool.layer(layer), self.step.rows.kv_rows)
        return kv, self.step.rotation(part.spec)

    def attend_latents(self, queries: torch.Tensor, part: LatentPart, layer: int) -> torch.Tensor:
        rotation = self.step.rotation(part.spec)
        heads = LatentHeads(part.spec.scale, keys=part.keys, values=part.values, rotation=rotation)
        return self.step.context.attention(queries, self.pool.layer(layer), self.step.rows, heads)

    def recur(self, inputs: torch.Tensor, gates: torch.Tensor, rule: DeltaRule, layer: int) -> torch.Tensor:
        groups, states, pdl = self.step.rows.states, self.pool.states, self.step.context.launch.pdl
        assert groups is not None and states is not None
        if isinstance(rule, ShortConvolution):
            return convolve(inputs, rule, states.layers[layer], groups, pdl)
        kept = states.beside
        assert isinstance(kept, SolvedStore)
        one = DeltaLayer(rule, states.layers[layer], kept.layers[layer])
        room = self._room_for_reads(inputs, rule.shape.value_heads * rule.shape.value_size)
        return recur(inputs, gates, one, groups, room, pdl)

    def _room_for_reads(self, inputs: torch.Tensor, columns: int) -> torch.Tensor:
        """Room for what rows read of a state, one for all layers: what a layer has read is used no more when
        the next one reads. Rows of padding are zeros there, which nobody writes, and so stay numbers.
        """
        if columns not in self._rooms:
            self._rooms[columns] = inputs.new_zeros(inputs.shape[0], columns)
        return self._rooms[columns]

    def delta(self, read: ReadT, part: DeltaPart[Projection], layer: int) -> torch.Tensor:
        shape, pdl = part.rule.shape, self.step.context.launch.pdl
        values, heads = shape.value_heads * shape.value_size, (shape.value_heads,) * (1 + shape.corrects)
        inputs, gate, *numbers = self.product(read, part.projection).split((shape.inputs, values, *heads), 1)
        gates = rule_gates(numbers, part.step_bias, part.rate, shape, pdl)
        made = self.recur(inputs, gates, part.rule, layer)
        if isinstance(shape, SpaceShape):
            return gated_groups(made, gate, part.gain, shape, self.eps, pdl)
        assert part.gain is not None
        return gated_norm(made, gate, part.gain, shape.norm_eps or self.eps, pdl)

    def gated(self, read: ReadT, part: GatedPart[Projection]) -> Rows:
        """act(gate) * up, [m, width]; rounded as the next product reads it, if that is done at once."""
        return self._gated(self.normed(read), part)

    def route(self, rows: NormedRows, part: RouterPart, judged: NormedRows | None = None) -> Routed:
        return expert_products.routed(rows, part, self.step, judged)

    def mix(self, residual: ResidualT, rows: NormedRows, routed: Routed, part: Experts) -> ResidualT:
        mixed = scaled(self._mixed(rows, routed, part), part.out)
        return self.plus(residual, mixed, part.out.post)

    def _mixed(self, rows: NormedRows, routed: Routed, part: Experts) -> torch.Tensor:
        """The rows that `mix` adds, [m, hidden], but for the sum over the ranks."""
        step, launch, chosen = self.step, self.step.context.launch, routed.chosen
        if expert_products.is_single(routed, part, step):
            inner = expert_products.inner_of_one_row(routed, part, step)
            return single.back(inner, part.out.projection.weight, chosen, launch.pdl)
        made = expert_products.made(routed, part, step)
        if step.everyones is None:
            return combine.combine(made, chosen.weights, self._beside(rows, part), launch.pdl, launch.exact)
        sums = combine.combine_local(made, chosen.weights, chosen.experts, launch.pdl)
        room = empty_padded(*rows.plain.shape, like=sums)
        added, beside = step.context.sharers.sum_for_owners(sums, room), self._beside(rows, part)
        return added if beside is None else added.add_(beside.whole)

    def _beside(self, rows: NormedRows, part: Experts) -> combine.BesideRows | None:
        """The rows that the feed-forward beside the experts makes, if there is one."""
        if part.beside is None:
            return None
        made = self.step.product(self._gated(rows, part.beside.gated), part.beside.down)
        share = part.beside.share
        logits = None if share is None else expert_products.logits(rows.plain, *share, self.step)
        return combine.BesideRows(made, logits)

    def _gated(self, rows: NormedRows, part: GatedPart[Projection]) -> Rows:
        if part.gate is None or self.step.ends_apart(part.projection):
            return part.activation(self.step.product(rows, part.projection, part.bias))
        rounding, products = part.projection.rounding, self.step.context.products
        return part.projection.gated(rows.read_by(rounding), products, part.gate)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads x [m, heads, dim], element i turned with i + dim / 2 by cos and sin [m, 1, dim / 2]."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
