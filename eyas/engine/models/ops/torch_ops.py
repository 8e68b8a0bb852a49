"""The verbs of a layer in plain torch: the specification of a GPU's, and what a CPU computes.

A row's bits depend on that row and what it attends to alone: products and norms take blocks of rows of one
size, and nothing else looks at a row's place. Rows are padded to whole blocks; padding writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eyas.engine.attention.base import AttentionBackend, AttentionPlan
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products.blocks import Rows
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.activations import Activation
from eyas.engine.layers.linear import Linear, LinearExperts, in_blocks, pad_rows, per_head
from eyas.engine.layers.norm import rms_norm
from eyas.engine.layers.rotary import Angles, Rotary
from eyas.engine.layers.routing import SCORES, Routes, choose, in_order
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.parts import ExpertsPart, GatedPart, LatentPart, OutPart, QkvPart, RouterPart
from eyas.engine.parallel.expert_ranks import ExpertRanks


@dataclass(frozen=True)
class Step:
    """State that every layer of one forward shares. `tokens` [R'], padded to whole blocks. `slots` [R]:
    `KvPool.slots` of the rows being written. `angles`: of each RoPE that a layer has.
    """

    pool: KvPool
    tokens: torch.Tensor
    slots: torch.Tensor
    plan: AttentionPlan
    angles: Mapping[RopeConfig, Angles]
    backend: AttentionBackend

    @classmethod
    def of(
        cls,
        rows: ForwardBatch,
        pool: KvPool,
        rotaries: Mapping[RopeConfig, Rotary],
        backend: AttentionBackend,
    ) -> Step:
        """A forward of `rows`."""
        positions = pad_rows(rows.positions)
        angles = {rope: rotary.angles(positions) for rope, rotary in rotaries.items()}
        return cls(pool, pad_rows(rows.tokens), pool.slots(rows.kv_rows), rows.plan, angles, backend)


class TorchOps(Ops[torch.Tensor, torch.Tensor, Linear]):
    """For the rows of `step`. `eps`: of every norm. A residual is its rows, and so is what products read.

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
        return matrix(x)

    def given(self, x: torch.Tensor) -> torch.Tensor:
        return pad_rows(x)

    def norm(
        self, residual: torch.Tensor, norm: row_kernels.NormInput | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if norm is None:
            return residual, residual
        assert norm.gain is not None
        return rms_norm(residual, norm.gain, norm.eps), residual

    def leave(self, residual: torch.Tensor) -> torch.Tensor:
        return residual[: self.step.slots.shape[0]]

    def room(self, sizes: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(self.step.slots.shape[0], *sizes)

    def put(self, x: torch.Tensor, room: torch.Tensor, place: int) -> None:
        room[:, place] = x

    def product(
        self, read: torch.Tensor, projection: Linear, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return projection(read, bias)

    def product_of(self, x: Rows, projection: Linear, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return projection(x, bias)

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
        qk = Rotary.rotate(qk, step.angles[part.spec.rope])
        step.pool.write(layer, step.slots, qk[:, heads.q :], v)
        return qk[:, : heads.q]

    def attend(self, q: torch.Tensor, part: QkvPart[Linear], layer: int) -> torch.Tensor:
        step = self.step
        return step.backend.run(q, step.pool.layer(layer), step.plan, part.spec).view(q.shape[0], -1)

    def store_latents(self, made: torch.Tensor, part: LatentPart, layer: int) -> torch.Tensor:
        step, norms, (latent, rotated) = self.step, part.norms, (part.spec.kv_rank, part.spec.rotated_dim)
        queries, latents, key = made.split((made.shape[1] - latent - rotated, latent, rotated), 1)
        key = Rotary.rotate(key[:, None], step.angles[part.spec.rope])[:, 0]
        row = torch.cat((rms_norm(latents, norms.latent, norms.eps), key), 1)
        step.pool.write(layer, step.slots, row)
        return queries if norms.query is None else rms_norm(queries, norms.query, norms.eps)

    def attend_latents(self, queries: torch.Tensor, part: LatentPart, layer: int) -> torch.Tensor:
        step, spec = self.step, part.spec
        heads = queries.view(queries.shape[0], spec.num_heads, -1)
        plain, rotated = heads.split((spec.plain_dim, spec.rotated_dim), 2)
        rotated = Rotary.rotate(rotated, step.angles[spec.rope])
        q = torch.cat((per_head(plain, part.keys), rotated), -1)
        mixed = step.backend.run(q, step.pool.layer(layer), step.plan, spec)
        return per_head(mixed, part.values.transpose(1, 2)).reshape(queries.shape[0], -1)

    def normed(self, read: torch.Tensor) -> torch.Tensor:
        return read

    def route(self, rows: torch.Tensor, part: RouterPart) -> Routes:
        return routed(rows, part)

    def mix(
        self, residual: torch.Tensor, rows: torch.Tensor, routed: Routes, part: ExpertsPart[Linear]
    ) -> torch.Tensor:
        """Adds what a row's experts give in the order in which it chose them: it does not matter which
        rank an expert is on.
        """
        made = made_by_experts(rows, routed.experts, part, self._ranks)
        mixed = in_order((made.float() * routed.weights[..., None]).unbind(1)).to(rows.dtype)
        if part.beside is not None:
            gated, down = part.beside
            mixed.add_(_gated(rows, gated.activation, (gated.projection, None), (down, None)))
        return self.plus(residual, mixed, part.out.post)


def routed(x: torch.Tensor, part: RouterPart) -> Routes:
    """Which experts rows x [R, hidden] take. All of it is float32: near ties decide much."""
    scores = SCORES[part.spec.scores]
    scored = in_blocks(lambda block: scores(part.weight(block, part.bias)), x.float())
    return choose(scored, part.spec, part.correction)


Biased = tuple[Linear, torch.Tensor | None]


def made_by_experts(
    x: torch.Tensor, chosen: torch.Tensor, part: ExpertsPart[Linear], ranks: ExpertRanks | None
) -> torch.Tensor:
    """The rows that the experts make of rows x [R, hidden]: chosen int64 [R, n] -> [R, n, hidden]."""
    activation, first = part.gated.activation, 0 if ranks is None else ranks.own.start

    def made(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        each = x.new_empty(*chosen.shape, x.shape[1])
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            forth, back = (_of_expert(p, expert - first) for p in (part.gated, part.out))
            each[rows, places] = _gated(x[rows], activation, forth, back)
        return each

    return made(x, chosen) if ranks is None else ranks.made(x, chosen, made)


def _of_expert(part: GatedPart[Linear] | OutPart[Linear], number: int) -> Biased:
    """The product of one expert, and its bias."""
    assert isinstance(part.projection, LinearExperts)
    return part.projection.each[number], None if part.bias is None else part.bias[number]


def _gated(x: torch.Tensor, activation: Activation, forth: Biased, back: Biased) -> torch.Tensor:
    """x [R, hidden] -> [R, hidden], block by block all the way: the wide inner rows stay in the cache."""
    (gate_up, bias), (down, down_bias) = forth, back

    def block(rows: torch.Tensor) -> torch.Tensor:
        return down(activation(*gate_up(rows, bias).chunk(2, dim=-1)), down_bias)

    return in_blocks(block, x)
