"""Decoder layers of products with four-bit weights and attention, one after the other, as a step has them.

Each product begins while the one before still runs, and calls memory ahead: so a tile's time is that which a
layer takes with it, not that of the product alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from eyas.bench.fastest import Call
from eyas.engine.attention.rows import PagedAttention, RowLimits
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.products import int4, skinny
from eyas.engine.kernels.products.skinny_tiles import ProductShape, Table
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import PoolShape

GROUP = 128
UNCACHED = 256 << 20  # bytes
ROUNDS = 4  # through all layers
PAGE, CONTEXT = 16, 320  # tokens that each row attends to
EPS = 1e-5
_NARROWEST = 16  # columns that leave a part of a sum


@dataclass(frozen=True)
class LayerJob:
    """The packed products of a decoder layer, as of no rows, in their order, and its heads."""

    heads: int
    kv_heads: int
    dim: int
    products: tuple[ProductShape, ...]


class LayerWeights:
    """The weights of more layers than an L2 cache holds."""

    def __init__(self, job: LayerJob, device: str) -> None:
        self.job, self.device = job, device
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        size = sum(shape.n * shape.k // 2 for shape in job.products)
        count = 1 if device in ("cpu", "meta") else UNCACHED // size + 2
        self.layers = [[self._weight(shape) for shape in job.products] for _ in range(count)]

    def _weight(self, shape: ProductShape) -> int4.Int4Weight:
        numbers = torch.randint(16, (shape.n, shape.k), dtype=torch.uint8, device=self.device)
        scales = torch.full((shape.n, shape.k // GROUP), shape.k**-0.5 / 8, device=self.device)
        return int4.packed(numbers, 8, scales.half(), self.dtype)


class PackedLayers:
    """Layers that decode `rows` sequences, as many as a tile has, by any tiles."""

    def __init__(self, weights: LayerWeights, rows: int) -> None:
        self._weights, self._m, self._job = weights, rows, weights.job
        device, dtype, job = weights.device, weights.dtype, weights.job
        self.device, self.shapes = device, [replace(shape, rows=rows) for shape in job.products]
        self.launch = skinny.ProductLaunch.on(device, pdl=device != "cpu")
        like = torch.empty(0, dtype=dtype, device=device)
        inputs = [shape for shape in job.products if shape.kind != "linear"]
        hidden, inner = inputs[0].k, inputs[-1].n // 2
        self._start, self._x, self._gained = (skinny.empty_padded(rows, hidden, like=like) for _ in range(3))
        self._start.normal_()
        self._gain = like.new_ones(hidden)
        self._first = self._start.float().square().sum(1)
        self._q = skinny.empty_padded(rows, job.heads, job.dim, like=like)
        self._inner = skinny.empty_padded(rows, inner, like=like)
        self._parts = like.new_ones(hidden // _NARROWEST, skinny.MAX_ROWS, dtype=torch.float32)
        self._sums = self._parts[:1]
        if job.heads:
            self._attend(like)

    def _attend(self, like: torch.Tensor) -> None:
        """The attention, and what it reads."""
        job, m = self._job, self._m
        pages = CONTEXT // PAGE + 1
        shape = PoolShape(
            KvFormat(1, job.kv_heads, job.dim), 1 + m * pages, PAGE, like.dtype, str(like.device)
        )
        self._pool = like.new_zeros(shape.sizes)[:, 0]
        tables = torch.arange(m * pages, dtype=torch.int32, device=like.device).view(m, pages) + 1
        self._attention = PagedAttention(tables, job.heads, shape, RowLimits(m, 1), pdl=self.launch.pdl)
        slots = torch.arange(m, dtype=torch.int32, device=like.device)
        positions, kv_rows = torch.full_like(slots, CONTEXT), tables[:, -1] * PAGE
        self._rows = ForwardRows(slots, positions, kv_rows, DecodeRows(slots, positions))
        angles = torch.rand(CONTEXT + 1, job.dim // 2, device=like.device)
        self._rotation = skinny.RotaryInput(angles.cos(), angles.sin(), positions)
        self._kv = skinny.KvRows(self._pool, kv_rows)
        self._norms = skinny.HeadNorms(like.new_ones(2, job.dim), EPS)

    def key(self, shape: ProductShape) -> tuple[str, int, int, int]:
        """The product's key in a table of tiles."""
        return f"int4 {shape.kind}", shape.rows, shape.n, shape.k

    def calls(self, tiles: Table) -> Sequence[Call]:
        """A layer after the other; each is one call."""
        launch = replace(self.launch, tiles=tiles)
        return [partial(self._layer, layer, launch) for layer in self._weights.layers] * ROUNDS

    def result(self, call: Call) -> torch.Tensor:
        """The rows that leave a layer, always from the same ones."""
        self._x.copy_(self._start)
        self._gained.copy_(self._start)
        self._parts[:1].zero_()
        self._parts[0, : self._m] = self._first
        self._sums = self._parts[:1]
        call()
        return self._x.float()

    def _layer(self, layer: list[int4.Int4Weight], launch: skinny.ProductLaunch) -> None:
        given = self._inner
        for shape, weight in zip(self._job.products, layer, strict=True):
            source = skinny.SkinnyInput(self._gained, self._sums, EPS)
            if shape.kind == "gated":
                skinny.gated(source, weight, self._inner, launch)
                given = self._inner
            elif shape.kind == "linear":
                self._back(skinny.SkinnyInput(given), weight, launch)
            else:
                qkv = skinny.QkvWeights(weight, norms=self._norms if shape.kind == "heads" else None)
                skinny.qkv_rope(source, qkv, self._q, self._rotation, self._kv, launch)
                given = self._attention(self._q, self._pool, self._rows, ScoreScaling(self._job.dim**-0.5))

    def _back(
        self, source: skinny.SkinnyInput, weight: int4.Int4Weight, launch: skinny.ProductLaunch
    ) -> None:
        self._sums = self._parts[: skinny.linear_parts(source, weight, launch)]
        end = skinny.LinearEnd(self._x, self._sums, self._gain, self._gained)
        skinny.linear(source, weight, self._x, launch, end)
