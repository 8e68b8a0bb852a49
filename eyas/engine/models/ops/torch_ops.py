"""The verbs of a layer in plain torch: the specification that a GPU's are held to, and what a CPU computes.

A row's bits depend on that row and what it attends to alone: products and norms take blocks of rows of one
size, and nothing else looks at a row's place. Rows are padded to whole blocks; padding writes nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products.blocks import Rows
from eyas.engine.layers.linear import Linear, per_head
from eyas.engine.layers.norm import rms_norm
from eyas.engine.layers.rotary import Rotary
from eyas.engine.layers.step import Step
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.parts import LatentPart, QkvPart


class TorchOps(Ops[torch.Tensor, torch.Tensor, Linear]):
    """For the rows of `step`. `eps`: of every norm. A residual is its rows, and so is what products read."""

    def __init__(self, step: Step, eps: float) -> None:
        self.step, self.eps = step, eps

    def embed(self, table: torch.Tensor, scale: float) -> torch.Tensor:
        x = F.embedding(self.step.tokens, table)
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def given(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def norm(
        self, residual: torch.Tensor, norm: row_kernels.NormInput | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if norm is None:
            return residual, residual
        assert norm.gain is not None
        return rms_norm(residual, norm.gain, norm.eps), residual

    def leave(self, residual: torch.Tensor) -> torch.Tensor:
        return residual

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
