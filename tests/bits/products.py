"""The narrow products as a table: each kind, at any shape, for any choice among 128 rows.

A row leaves all that its kernel writes of it. Rows have numbers of very different sizes, so that an order of
addition shows; linear products are compared before they are rounded too, which shows it most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from eyas.engine.kernels.products import exact_wide, int4, skinny
from eyas.engine.kernels.products.skinny_tiles import MOST_STRETCHES, ProductTile
from tests.bits.compare import Composition

EPS = 1e-5
Into = tuple[skinny.QkvWeights, torch.Tensor, skinny.RotaryInput, skinny.KvRows]
_LENGTH = 64  # positions of the rotary tables


@dataclass(frozen=True)
class Product:
    """One weight [n, k]; `kind`: linear, gated, qkv, or heads: qkv with a bias and norms of the heads."""

    kind: str
    n: int
    k: int
    dim: int = 128

    def table(self, tiles: Sequence[ProductTile]) -> dict[tuple[str, int, int, int], ProductTile]:
        """Tiles for 16, 32, 64 and 128 rows."""
        rows = (16, 32, 64, 128)
        return {(self.kind, r, self.n, self.k): tile for r, tile in zip(rows, tiles, strict=True)}


class ProductRows:
    """128 rows that any kind of product may take, and its weight."""

    def __init__(self, product: Product, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.product, self._device, self._dtype = product, device, dtype
        self._random = torch.Generator().manual_seed(seed)
        n, k = product.n, product.k
        sizes = torch.randint(-6, 7, (skinny.MAX_ROWS, k), generator=self._random)
        self._x = (self._normal(skinny.MAX_ROWS, k).float() * torch.exp2(sizes.to(device))).to(dtype)
        self._weight: Any = (self._normal(n, k).float() * k**-0.5).to(dtype)
        self._residual = self._normal(skinny.MAX_ROWS, n)
        groups = self._x.float().square().view(skinny.MAX_ROWS, -1, skinny.sum_group(k))
        self._sums = halved(groups).t().contiguous()  # torch's own sums have another order on a GPU
        self._bias, self._gains = self._normal(n), self._normal(2, product.dim)
        angles = torch.rand(_LENGTH, product.dim // 2, generator=self._random).to(device) * 6.28
        self._cos, self._sin = angles.cos(), angles.sin()

    def run(self, rows: Sequence[int], launch: skinny.ProductLaunch) -> dict[int, torch.Tensor]:
        """What each of these rows leaves, the narrow way: float32 [numbers]."""
        index = torch.tensor(rows, device=self._device)
        x = skinny.empty_padded(len(rows), self.product.k, like=self._x).copy_(self._x[index])
        sums = self._sums.new_full(self._sums.shape, float("nan"))
        sums[:, : len(rows)] = self._sums[:, index]
        source = skinny.SkinnyInput(x, sums, EPS)
        kinds = {"linear": self._linear, "gated": self._gated}
        left = kinds.get(self.product.kind, self._qkv)(source, index, launch)
        return dict(zip(rows, left, strict=True))

    def _linear(
        self, source: skinny.SkinnyInput, index: torch.Tensor, launch: skinny.ProductLaunch
    ) -> torch.Tensor:
        """To float32; and with a residual: the rounded row, and its 1 / rms as a reader finds it."""
        m, plain, rows = len(index), skinny.SkinnyInput(source.x), self._residual[index]
        wide = torch.empty(m, self.product.n, device=self._device)
        skinny.linear(plain, self._weight, wide, launch)
        parts = skinny.linear_parts(plain, self._weight, launch)
        sums = torch.zeros(parts, skinny.MAX_ROWS, device=self._device)
        skinny.linear(plain, self._weight, rows, launch, skinny.LinearEnd(rows, sums))
        return torch.cat((wide, rows.float(), scale_of(sums[:, :m], self.product.n)), dim=1)

    def _gated(
        self, source: skinny.SkinnyInput, index: torch.Tensor, launch: skinny.ProductLaunch
    ) -> torch.Tensor:
        out = self._x.new_empty(len(index), self.product.n // 2)
        skinny.gated(source, self._weight, out, launch)
        return out.float()

    def _qkv(
        self, source: skinny.SkinnyInput, index: torch.Tensor, launch: skinny.ProductLaunch
    ) -> torch.Tensor:
        weights, q, rotation, kv = into = self._heads(index)
        skinny.qkv_rope(source, weights, q, rotation, kv, launch)
        return self._of_heads(index, into)

    def _heads(self, index: torch.Tensor) -> Into:
        """What a product of q, k and v writes, and how."""
        dim = self.product.dim
        q = self._x.new_empty(len(index), self.product.n // dim - 2, dim)  # one head of keys, one of values
        pool = self._x.new_zeros(skinny.MAX_ROWS, 1, 2, 1, 1, dim)
        norms = skinny.HeadNorms(self._gains, EPS) if self.product.kind == "heads" else None
        weights = skinny.QkvWeights(self._weight, None if norms is None else self._bias, norms)
        rotation = skinny.RotaryInput(self._cos, self._sin, index % _LENGTH)
        return weights, q, rotation, skinny.KvRows(pool[:, 0], index)

    @staticmethod
    def _of_heads(index: torch.Tensor, into: Into) -> torch.Tensor:
        _, q, _, kv = into
        return torch.cat((q.flatten(1), kv.layer[index].flatten(1)), dim=1).float()

    def _normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self._random).to(self._device, self._dtype)


class WideRows(ProductRows):
    """The same rows the wide way: a product of raw rows, and what follows it."""

    def run(self, rows: Sequence[int], launch: skinny.ProductLaunch) -> dict[int, torch.Tensor]:
        """What each of these rows leaves, without the launch's scratch memory: float32 [numbers]."""
        index = torch.tensor(rows, device=self._device)
        kinds = {"linear": self._settled, "gated": self._multiplied}
        left = kinds.get(self.product.kind, self._rotated)(self._x[index], index, launch)
        return dict(zip(rows, left, strict=True))

    def _settled(self, x: torch.Tensor, index: torch.Tensor, launch: skinny.ProductLaunch) -> torch.Tensor:
        rows = self._residual[index]
        scales = exact_wide.settle(rows, EPS, exact_wide.shares(x, self._weight, launch))
        wide = exact_wide.product(x, self._weight, launch, dtype=torch.float32)
        return torch.cat((wide, rows.float(), scales[:, None]), dim=1)

    def _multiplied(self, x: torch.Tensor, index: torch.Tensor, launch: skinny.ProductLaunch) -> torch.Tensor:
        raw = exact_wide.product(x, self._weight, launch, "gated")
        return exact_wide.act_mul(raw, exact_wide.settle(x.clone(), EPS)).float()

    def _rotated(self, x: torch.Tensor, index: torch.Tensor, launch: skinny.ProductLaunch) -> torch.Tensor:
        raw = exact_wide.product(x, self._weight, launch, self.product.kind, self.product.dim)
        into = self._heads(index)
        weights, *rest = into
        after = exact_wide.AfterQkv(weights.bias, weights.norms)
        exact_wide.rope_write(raw, exact_wide.settle(x.clone(), EPS), after, *rest)
        return self._of_heads(index, into)


def packed_weight(product: Product, device: str, dtype: torch.dtype, group: int = 128) -> int4.Int4Weight:
    """Numbers of four bits with zero points; stretches of k are of whole groups."""
    random = torch.Generator().manual_seed(product.n + product.k)
    sizes = (product.n, product.k // group)
    numbers = torch.randint(16, (product.n, product.k), generator=random, dtype=torch.uint8)
    zeros = torch.randint(16, sizes, generator=random)
    scales = ((torch.rand(sizes, generator=random) + 0.5) * product.k**-0.5 / 4).to(dtype)
    parts = (each.to(device) for each in (numbers, zeros, scales))
    return int4.packed(*parts, dtype, product.k // MOST_STRETCHES)


class PackedRows(ProductRows):
    """The same with a packed weight, the narrow way."""

    def __init__(self, product: Product, device: str, dtype: torch.dtype) -> None:
        super().__init__(product, device, dtype)
        self._weight = packed_weight(product, device, dtype)


class WidenedRows(ProductRows):
    """With the matrix that this means."""

    def __init__(self, product: Product, device: str, dtype: torch.dtype) -> None:
        super().__init__(product, device, dtype)
        self._weight = packed_weight(product, device, dtype).widened()


class WideWidenedRows(WidenedRows, WideRows):
    """The same, the wide way."""


def halved(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, neighbours first: the rule that `halving` states, in plain torch."""
    while values.shape[-1] > 1:
        values = torch.nn.functional.pad(values, (0, values.shape[-1] % 2))
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def scale_of(sums: torch.Tensor, width: int) -> torch.Tensor:
    """Sums of squares [parts, m] of rows -> 1 / rms [m, 1], in float32."""
    return torch.rsqrt(halved(sums.t()) / width + EPS)[:, None]


def compositions(
    rows: ProductRows, launch: skinny.ProductLaunch, counts: Sequence[int], stride: int = 0
) -> Iterator[Composition]:
    """Rows at once, about row 0; each time `stride` rows further on."""
    for turn, count in enumerate(counts):
        first = turn * stride - count // 2
        taken = [(first + i) % skinny.MAX_ROWS for i in range(count)]
        yield Composition(f"{count} rows from {taken[0]} on", partial(rows.run, taken, launch))


def cut_by(
    launch: skinny.ProductLaunch, product: Product, tiles: Sequence[ProductTile]
) -> skinny.ProductLaunch:
    """With these tiles for 16, 32, 64 and 128 rows."""
    return replace(launch, tiles=product.table(tiles))
