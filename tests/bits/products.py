"""The narrow products as a table: each kind, at any shape, for any choice among 128 rows.

A row leaves all that its kernel writes of it. Rows have numbers of very different sizes, so that an order of
addition shows; the products that are compared before they are rounded show it most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from eyas.engine.kernels import skinny
from eyas.engine.kernels.skinny_tiles import Tile
from tests.bits.compare import Composition

EPS = 1e-5
_LENGTH = 64  # positions of the rotary tables


@dataclass(frozen=True)
class Product:
    """One weight [n, k]; `kind`: linear, gated, qkv, or heads: qkv with a bias and norms of the heads."""

    kind: str
    n: int
    k: int
    dim: int = 128

    def table(self, tiles: Sequence[Tile]) -> dict[tuple[str, int, int, int], Tile]:
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
        self._weight = (self._normal(n, k).float() * k**-0.5).to(dtype)
        self._residual = self._normal(skinny.MAX_ROWS, n)
        parts = k // skinny.sum_group(k)
        self._sums = self._x.float().square().view(skinny.MAX_ROWS, parts, -1).sum(2).t().contiguous()
        self._bias, self._gains = self._normal(n), self._normal(2, product.dim)
        angles = torch.rand(_LENGTH, product.dim // 2, generator=self._random).to(device) * 6.28
        self._cos, self._sin = angles.cos(), angles.sin()

    def run(self, rows: Sequence[int], launch: skinny.Launch) -> dict[int, torch.Tensor]:
        """What each of these rows leaves: float32 [numbers]."""
        index = torch.tensor(rows, device=self._device)
        x = skinny.empty_padded(len(rows), self.product.k, like=self._x).copy_(self._x[index])
        sums = self._sums.new_full(self._sums.shape, float("nan"))
        sums[:, : len(rows)] = self._sums[:, index]
        source = skinny.Source(x, sums, EPS)
        kinds = {"linear": self._linear, "gated": self._gated}
        left = kinds.get(self.product.kind, self._qkv)(source, index, launch)
        return dict(zip(rows, left, strict=True))

    def _linear(self, source: skinny.Source, index: torch.Tensor, launch: skinny.Launch) -> torch.Tensor:
        """To float32; and with a residual, rounded, and its sum of squares as a reader adds it up."""
        m, n = len(index), self.product.n
        wide = torch.empty(m, n, device=self._device)
        skinny.linear(source, self._weight, wide, launch)
        plain, rows = skinny.Source(source.x), self._residual[index]
        parts = skinny.linear_parts(plain, self._weight, launch)
        sums = torch.zeros(parts, skinny.MAX_ROWS, device=self._device)
        skinny.linear(plain, self._weight, rows, launch, rows, sums)
        return torch.cat((wide, rows.float(), halved(sums[:, :m].t())[:, None]), dim=1)

    def _gated(self, source: skinny.Source, index: torch.Tensor, launch: skinny.Launch) -> torch.Tensor:
        out = torch.empty(len(index), self.product.n // 2, device=self._device)
        skinny.gated(source, self._weight, out, launch)
        return out

    def _qkv(self, source: skinny.Source, index: torch.Tensor, launch: skinny.Launch) -> torch.Tensor:
        m, dim = len(index), self.product.dim
        heads = self.product.n // dim - 2  # of queries; one of keys, one of values
        q = torch.empty(m, heads, dim, device=self._device)
        pool = torch.zeros(skinny.MAX_ROWS, 1, 2, 1, 1, dim, device=self._device)
        norms = skinny.HeadNorms(self._gains, EPS) if self.product.kind == "heads" else None
        weights = skinny.QkvWeights(self._weight, None if norms is None else self._bias, norms)
        rotation = skinny.Rotation(self._cos, self._sin, index % _LENGTH)
        skinny.qkv_rope(source, weights, q, rotation, skinny.KvRows(pool[:, 0], index), launch)
        return torch.cat((q.view(m, -1), pool[index].view(m, -1)), dim=1)

    def _normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self._random).to(self._device, self._dtype)


def halved(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, neighbours first: the rule that `halving` states, in plain torch."""
    while values.shape[-1] > 1:
        values = torch.nn.functional.pad(values, (0, values.shape[-1] % 2))
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def compositions(
    rows: ProductRows, launch: skinny.Launch, counts: Sequence[int], stride: int = 0
) -> Iterator[Composition]:
    """So many rows at once, about row 0; each time `stride` rows further on."""
    for turn, count in enumerate(counts):
        first = turn * stride - count // 2
        taken = [(first + i) % skinny.MAX_ROWS for i in range(count)]
        yield Composition(f"{count} rows from {taken[0]} on", partial(rows.run, taken, launch))


def cut_by(launch: skinny.Launch, product: Product, tiles: Sequence[Tile]) -> skinny.Launch:
    """With these tiles for 16, 32, 64 and 128 rows."""
    return replace(launch, tiles=product.table(tiles))
