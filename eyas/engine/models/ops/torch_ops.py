"""A CPU: the verbs of a layer, and what stands beside layers, in plain torch: the specification of a GPU's.

A row's bits depend on that row and what it attends to alone: products and norms take blocks of rows of one
size, and nothing else looks at a row's place. Rows are padded to whole blocks; padding writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eyas.engine.adapters.sites import AdapterSite
from eyas.engine.attention.base import AttentionBackend, AttentionPlan
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.attention.soft_cap import soft_cap
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.adapted import Adapted, AdaptedLoader
from eyas.engine.formats.projection import ProjectionLoader
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products.blocks import Rows
from eyas.engine.kernels.products.skinny_tiles import Table
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.activations import Inner
from eyas.engine.layers.adapted import AdaptedLinear, RowsOfSlots, among, product
from eyas.engine.layers.linear import Linear, LinearExperts, LinearLoader, in_blocks, pad_rows, per_head
from eyas.engine.layers.norm import rms_norm
from eyas.engine.layers.rotary import Angles, Rotary
from eyas.engine.layers.routing import SCORES, Routes, choose, in_order, sigmoid
from eyas.engine.models.layer import DecoderLayer
from eyas.engine.models.ops.base import Ops, scaled
from eyas.engine.models.ops.machine import Machine
from eyas.engine.models.ops.parts import (
    BesidePart,
    ExpertsPart,
    GatedPart,
    JoinPart,
    LatentPart,
    OutPart,
    QkvPart,
    RouterPart,
)
from eyas.engine.parallel.expert_places import SpreadExperts
from eyas.engine.parallel.expert_ranks import ExpertRanks
from eyas.engine.states.delta import DeltaRule
from eyas.engine.states.plain import recur
from eyas.engine.states.rows import StateRows

Rotation = tuple[RopeConfig, int]
"""Of a layer's heads: `AttentionSpec.rotation`."""


@dataclass(frozen=True)
class Step:
    """State that every layer of one forward shares. `tokens` and `positions` [R'], padded to whole blocks.
    `groups`: of each group of layers, `KvPool.slots` [R] of the rows being written, and the plan. `angles`:
    of each rotation that a layer has. `states`: the same rows for layers with states, if there are some.
    `adapters`: as of `ForwardBatch`.
    """

    pool: KvPool
    tokens: torch.Tensor
    positions: torch.Tensor
    groups: Sequence[tuple[torch.Tensor, AttentionPlan]]
    angles: Mapping[Rotation, Angles]
    backend: AttentionBackend
    states: StateRows | None = None
    adapters: RowsOfSlots = ()

    @classmethod
    def of(
        cls,
        rows: ForwardBatch,
        pool: KvPool,
        rotaries: Mapping[Rotation, Rotary],
        backend: AttentionBackend,
    ) -> Step:
        """A forward of `rows`."""
        positions = pad_rows(rows.positions)
        angles = {rotation: rotary.angles(positions) for rotation, rotary in rotaries.items()}
        groups = [(pool.slots(group.kv_rows), group.plan) for group in rows.groups]
        tokens = pad_rows(rows.tokens)
        return cls(pool, tokens, positions, groups, angles, backend, rows.states, rows.adapters)

    @property
    def count(self) -> int:
        """R."""
        return self.groups[0][0].shape[0]

    def slots(self, layer: int) -> torch.Tensor:
        """`KvPool.slots` of the rows being written in a layer."""
        return self.groups[self.pool.group_of(layer)][0]

    def plan(self, layer: int) -> AttentionPlan:
        """The plan of a layer's attention."""
        return self.groups[self.pool.group_of(layer)][1]


class TorchOps(Ops[torch.Tensor, torch.Tensor, Linear]):
    """The verbs of layers in plain torch, for the rows of `step`. `eps`: of every norm. A residual is its
    rows, and so is what products read.

    `ranks`: over which experts are spread, whole; None: all are here.
    """

    def __init__(self, step: Step, eps: float, ranks: ExpertRanks | None = None) -> None:
        self.step, self.eps, self._ranks = step, eps, ranks

    def embed(self, table: torch.Tensor, scale: float) -> torch.Tensor:
        x = F.embedding(self.step.tokens, table)
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        return pad_rows(x)

    def joined(self, x: torch.Tensor, matrix: Linear) -> torch.Tensor:
        return matrix(pad_rows(x))

    def given(self, x: torch.Tensor) -> torch.Tensor:
        return pad_rows(x)

    def rms(
        self, residual: torch.Tensor, norm: row_kernels.NormInput | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if norm is None:
            return residual, residual
        assert norm.gain is not None
        return rms_norm(residual, norm.gain, norm.eps), residual

    def leave(self, residual: torch.Tensor) -> torch.Tensor:
        return residual[: self.step.count]

    def whole(self, residual: torch.Tensor) -> torch.Tensor:
        return residual

    def grown(self, residual: torch.Tensor, other: torch.Tensor, post: torch.Tensor | None) -> torch.Tensor:
        return self.plus(residual, other, post)

    def room(self, sizes: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(self.step.count, *sizes)

    def put(self, x: torch.Tensor, room: torch.Tensor, place: int) -> None:
        room[:, place] = x

    def placed(self, table: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, self.step.positions)

    def product(
        self, read: torch.Tensor, projection: Linear, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.product_of(read, projection, bias)

    def product_of(self, x: Rows, projection: Linear, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return product(x, projection, bias, self.step.adapters)

    def plus(self, residual: torch.Tensor, added: torch.Tensor, post: torch.Tensor | None) -> torch.Tensor:
        if post is not None:
            added = rms_norm(added, post, self.eps)
        return added.add_(residual)

    def store(self, made: torch.Tensor, part: QkvPart[Linear], layer: int) -> torch.Tensor:
        heads, step = part.heads, self.step
        qkv = made.view(made.shape[0], -1, heads.dim)
        qk, v = qkv[:, : -heads.kv], qkv[:, -heads.kv :]
        if (norms := heads.norms) is not None:
            parts = zip(qk.split((heads.q, heads.kv), 1), norms.gains, strict=True)
            qk = torch.cat([rms_norm(each, gain, norms.eps) for each, gain in parts], 1)
        qk = Rotary.rotate(qk, step.angles[part.spec.rotation])
        step.pool.write(layer, step.slots(layer), qk[:, heads.q :], v)
        return qk[:, : heads.q]

    def rotated(self, made: torch.Tensor, part: QkvPart[Linear]) -> torch.Tensor:
        q = made.view(made.shape[0], -1, part.heads.dim)
        if (norms := part.heads.norms) is not None:
            q = rms_norm(q, norms.gains[0], norms.eps)
        return Rotary.rotate(q, self.step.angles[part.spec.rotation])

    def attend(self, q: torch.Tensor, part: QkvPart[Linear], layer: int) -> torch.Tensor:
        step = self.step
        rows = step.pool.layer(layer, part.stored)
        mixed = step.backend.run(q, rows, step.plan(layer), part.spec, part.scores.sinks)
        return mixed.view(q.shape[0], -1)

    def store_latents(self, made: torch.Tensor, part: LatentPart, layer: int) -> torch.Tensor:
        step, norms, (latent, rotated) = self.step, part.norms, (part.spec.kv_rank, part.spec.rotated_dim)
        queries, latents, key = made.split((made.shape[1] - latent - rotated, latent, rotated), 1)
        key = Rotary.rotate(key[:, None], step.angles[part.spec.rotation])[:, 0]
        row = torch.cat((rms_norm(latents, norms.latent, norms.eps), key), 1)
        step.pool.write(layer, step.slots(layer), row)
        return queries if norms.query is None else rms_norm(queries, norms.query, norms.eps)

    def attend_latents(self, queries: torch.Tensor, part: LatentPart, layer: int) -> torch.Tensor:
        step, spec = self.step, part.spec
        heads = queries.view(queries.shape[0], spec.num_heads, -1)
        plain, rotated = heads.split((spec.plain_dim, spec.rotated_dim), 2)
        rotated = Rotary.rotate(rotated, step.angles[spec.rotation])
        q = torch.cat((per_head(plain, part.keys), rotated), -1)
        mixed = step.backend.run(q, step.pool.layer(layer), step.plan(layer), spec)
        return per_head(mixed, part.values.transpose(1, 2)).reshape(queries.shape[0], -1)

    def recur(self, inputs: torch.Tensor, gates: torch.Tensor, rule: DeltaRule, layer: int) -> torch.Tensor:
        step, count = self.step, self.step.count
        assert step.states is not None
        made = recur(step.states, step.pool.state_layers[layer], rule, inputs[:count], gates[:count])
        return pad_rows(made)

    def normed(self, read: torch.Tensor) -> torch.Tensor:
        return read

    def route(self, rows: torch.Tensor, part: RouterPart, judged: torch.Tensor | None = None) -> Routes:
        routes = routed(rows if judged is None else judged, part, self.step.adapters)
        if part.places is None or self._ranks is None:
            return routes
        return routes._replace(experts=self._ranks.placed(routes.experts, part.places))

    def mix(
        self, residual: torch.Tensor, rows: torch.Tensor, routed: Routes, part: ExpertsPart[Linear]
    ) -> torch.Tensor:
        """Adds what a row's experts give in the order in which it chose them: it does not matter which
        rank an expert is on.
        """
        read = rows if part.latent is None else self.product_of(rows, part.latent[0])
        adapters = self.step.adapters
        if part.weighs_input:
            read = read * routed.weights.to(read.dtype)
            mixed = made_by_experts(read, routed.experts, part, self._ranks, adapters)[:, 0]
        else:
            made = made_by_experts(read, routed.experts, part, self._ranks, adapters)
            mixed = in_order((made.float() * routed.weights[..., None]).unbind(1)).to(read.dtype)
        if part.latent is not None:
            mixed = self.product_of(mixed, part.latent[1])
        if part.beside is not None:
            mixed = mixed.add_(_made_beside(rows, part.beside, adapters))
        return self.plus(residual, scaled(mixed, part.out), part.out.post)


def routed(x: torch.Tensor, part: RouterPart, adapters: RowsOfSlots = ()) -> Routes:
    """Which experts rows x [R, hidden] take. All of it is float32: near ties decide much; what adapters add
    is rounded as x is.
    """
    logits = in_blocks(lambda block: part.weight(block, part.bias), x.float())
    if part.updated is not None:
        part.updated.updated(logits, x, adapters)
    scored = in_blocks(SCORES[part.spec.scores], logits)
    routes = choose(scored, part.spec, part.correction)
    return (
        routes
        if part.factors is None
        else routes._replace(weights=routes.weights * part.factors[routes.experts])
    )


def _made_beside(x: torch.Tensor, part: BesidePart[Linear], adapters: RowsOfSlots) -> torch.Tensor:
    made = _gated(x, part.gated.activation, (part.gated.projection, None), (part.down, None), adapters)
    if part.share is None:
        return made
    shares = sigmoid(in_blocks(part.share[0], x.float()))
    return made.mul_(shares[:, :1].to(made.dtype))


Biased = tuple[Linear, torch.Tensor | None]


def made_by_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    part: ExpertsPart[Linear],
    ranks: ExpertRanks | None,
    adapters: RowsOfSlots = (),
) -> torch.Tensor:
    """The rows that the experts make of rows x [R, hidden]: chosen int64 [R, n] -> [R, n, hidden]. `chosen`:
    of experts of which some have replicas, their slots. `adapters`: of rows, which other ranks' have none of.
    """
    activation = part.gated.activation

    def made(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        each = x.new_empty(*chosen.shape, x.shape[1])
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            forth, back = (_of_expert(p, expert) for p in (part.gated, part.out))
            each[rows, places] = _gated(x[rows], activation, forth, back, among(rows, adapters))
        return each

    return made(x, chosen) if ranks is None else ranks.made(x, chosen, made)


def _of_expert(part: GatedPart[Linear] | OutPart[Linear], number: int) -> Biased:
    """The product of one expert, and its bias."""
    assert isinstance(part.projection, LinearExperts)
    return part.projection.each[number], None if part.bias is None else part.bias[number]


def _gated(
    x: torch.Tensor, activation: Inner, forth: Biased, back: Biased, adapters: RowsOfSlots
) -> torch.Tensor:
    """x [R, hidden] -> [R, hidden], block by block all the way: the wide inner rows stay in the cache. Where
    there are adapters, product by product.
    """
    (gate_up, bias), (down, down_bias) = forth, back
    if adapters:
        return product(in_blocks(activation, product(x, gate_up, bias, adapters)), down, down_bias, adapters)

    def block(rows: torch.Tensor) -> torch.Tensor:
        return down(activation(gate_up(rows, bias)), down_bias)

    return in_blocks(block, x)


class TorchMachine(Machine[Linear]):
    """Weights of all formats are widened as they are read; a router's are float32.

    `ranks`: over which experts are spread, whole; None: all are here. `adapted`: adapters may update the
    weights, by names that begin with `adapted_of`. `spread`: as of `Machine`.
    """

    groups_experts = False

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        ranks: ExpertRanks | None = None,
        *,
        adapted: Adapted = Adapted.NOTHING,
        adapted_of: str = "",
        spread: SpreadExperts | None = None,
    ) -> None:
        """`config`: of the decoder whose layers run here."""
        self.backend, self.ranks, self._adapted, self._adapted_of = backend, ranks, adapted, adapted_of
        self.spread = spread
        length, each = (
            config.context_length,
            dict.fromkeys(layer.attention.rotation for layer in config.layers),
        )
        self._rotaries = {rotation: Rotary(*rotation, length, backend.device) for rotation in each}

    def loader(self, weights: WeightSource, names: list[str]) -> ProjectionLoader[Linear]:
        loader = LinearLoader.of(weights, names)
        if not self._adapted.takes(names):
            return loader
        return AdaptedLoader[Linear](loader, weights.placement, AdaptedLinear, self._adapted_of)

    def router(
        self, weights: WeightSource, names: Sequence[str], rows: Sequence[int], hidden: int
    ) -> tuple[Linear, Table]:
        stored = [
            weights.take(name, (count, hidden), torch.float32)
            for name, count in zip(names, rows, strict=True)
        ]
        return Linear(torch.cat(stored)), {}

    def own_experts(self, weights: WeightSource, experts: int) -> range:
        return range(experts) if self.ranks is None else self.ranks.own

    def matrix(self, rows: torch.Tensor) -> Linear:
        return Linear(rows)

    def own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def some_rows(self, matrix: Linear, ids: tuple[int, ...]) -> Linear:
        return matrix.in_order(torch.tensor(ids))

    def joining(self, stored: torch.Tensor, part: JoinPart) -> Linear:
        return Linear(stored)

    def most_rows(self, layers: Sequence[DecoderLayer[Linear]]) -> int:
        return 0

    def ops(
        self, rows: ForwardBatch, pool: KvPool, eps: float, few_rows: int = 0, *, whole: bool = True
    ) -> TorchOps:
        return TorchOps(Step.of(rows, pool, self._rotaries, self.backend), eps, self.ranks)

    def bounded(self, rows: ForwardBatch, unseen: int) -> ForwardBatch:
        """The same: a specification says so to the attention."""
        return rows

    def join(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, part: JoinPart
    ) -> torch.Tensor:
        count = len(tokens)
        embedded, features = F.embedding(pad_rows(tokens), part.embedding), pad_rows(features)
        if part.blank is not None:
            embedded = embedded.masked_fill((pad_rows(positions) <= part.blank)[:, None], 0.0)
        if part.gains is not None:
            pairs = zip((embedded, features), part.gains, strict=True)
            embedded, features = (rms_norm(x, gain, part.eps) for x, gain in pairs)
        halves = (features, embedded) if part.feature_first else (embedded, features)
        return torch.cat(halves, dim=-1)[:count]

    def norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, gain, eps)

    def norms(self, x: torch.Tensor, gains: Sequence[torch.Tensor], eps: float) -> torch.Tensor:
        pairs = zip(x.chunk(len(gains), dim=-1), gains, strict=True)
        return torch.cat([rms_norm(part, gain, eps) for part, gain in pairs], dim=-1)

    def product(self, x: torch.Tensor, matrix: Linear, bias: torch.Tensor | None = None) -> torch.Tensor:
        return matrix(x, bias)

    def picked(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x[rows]

    def logits(self, x: torch.Tensor, head: Linear, out: torch.Tensor | None = None) -> torch.Tensor:
        made = head(x).float()
        return made if out is None else out.copy_(made)

    def updated(self, matrix: Linear, site: AdapterSite, *, of_experts: bool = False) -> AdaptedLinear | None:
        return AdaptedLinear(matrix, site) if self._adapted.takes_one(of_experts=of_experts) else None

    def picked_adapters(self, adapters: RowsOfSlots, picked: torch.Tensor | None) -> RowsOfSlots:
        return adapters if picked is None else among(picked, adapters)

    def update_logits(
        self, logits: torch.Tensor, x: torch.Tensor, head: AdaptedLinear, adapters: RowsOfSlots
    ) -> None:
        head.updated(logits, x, adapters)

    def capped(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        return soft_cap(logits, cap)

    def mtp_states(self, rows: ForwardBatch, pool: KvPool, stages: int, width: int) -> TorchMtpStates:
        return TorchMtpStates(rows.spans, pool, stages, width)

    @torch.inference_mode()
    def serve_others(self, layers: Sequence[DecoderLayer[Linear]], nothing: torch.Tensor) -> None:
        """A step without rows on this rank: layer by layer its experts take the rows of the other ranks.

        `nothing`: rows [0, hidden].
        """
        for part in (layer.experts for layer in layers):
            if part is not None and self.ranks is not None:
                chosen = torch.empty(0, part.per_row, dtype=torch.int64, device=nothing.device)
                made_by_experts(nothing, chosen, part, self.ranks)


class TorchMtpStates:
    """The `MtpStates` of one forward of certain rows."""

    def __init__(self, spans: Sequence[QuerySpan], pool: KvPool, stages: int, width: int) -> None:
        """`spans`: of the forward, one after the other."""
        self._pages = pool.behind(stages + 1, stages, width)
        size, row = pool.page_size, 0
        # Rows whose row before is no row here, and its page (-1: none); each page's last row, and the page.
        self._firsts: list[tuple[int, int]] = []
        self._ends: list[tuple[int, int]] = []
        for span in spans:
            before, end = span.start - 1, span.start + span.count
            self._firsts.append((row, span.pages[before // size] if span.start else -1))
            for last in [*range(span.start // size * size + size, end, size), end]:
                self._ends.append((row + last - 1 - span.start, span.pages[(last - 1) // size]))
            row += span.count

    def before(self, gave: torch.Tensor, stage: int) -> torch.Tensor:
        """The results of the row before each row."""
        earlier = gave.roll(1, 0)
        for row, page in self._firsts:
            earlier[row] = self._pages[page, stage] if page >= 0 else 0.0
        return earlier

    def keep(self, gave: torch.Tensor) -> None:
        """Writes what the last row in each page gave."""
        for row, page in self._ends:
            self._pages[page] = gave[row]
