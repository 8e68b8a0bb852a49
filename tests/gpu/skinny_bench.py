"""The products of a whole decoder in a chain, and how they are timed.

Shapes are those of Llama-3.1-8B. Products go over the weights of 32 layers, or over
as many copies as L2 cannot hold, so that every weight comes from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eyas.bench.kernels.timing import graph_us
from eyas.engine.kernels.products import skinny

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 4096, 14336, 32, 8, 128, 32
EPS = 1e-5
_UNCACHED = 512 << 20

Call = Callable[[], None]


@dataclass(frozen=True)
class Product:
    """One weight [n, k] and what is done with it; `layered`: every decoder layer has one."""

    name: str
    kind: str
    n: int
    k: int
    layered: bool = False

    @property
    def nbytes(self) -> int:
        return 2 * self.n * self.k


LAYER = [
    Product("qkv", "qkv", (HEADS + 2 * KV_HEADS) * DIM, HIDDEN, True),
    Product("o", "linear", HIDDEN, HEADS * DIM, True),
    Product("gate_up", "gated", 2 * INNER, HIDDEN, True),
    Product("down", "linear", HIDDEN, INNER, True),
]
LM_HEAD = Product("lm_head", "linear", 128256, HIDDEN)


def weights(product: Product) -> list[torch.Tensor]:
    count = LAYERS if product.layered else -(-_UNCACHED // product.nbytes) + 1
    return [_normal(product.n, product.k) * product.k**-0.5 for _ in range(count)]


def _normal(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")


class Rows:
    """m rows on their way through products of every kind, with everything these read and write."""

    def __init__(self, m: int) -> None:
        self.m = m
        self.x = {k: _normal(m, k) for k in (HIDDEN, 2 * HIDDEN, 3 * HIDDEN, INNER)}
        self.sums = torch.zeros(512, skinny.MAX_ROWS, device="cuda")
        self.sums[0, :m] = self.x[HIDDEN].float().square().sum(1)
        self.q = torch.empty(m, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.inner = torch.empty(m, INNER, dtype=torch.bfloat16, device="cuda")
        self.pool = torch.zeros(8, LAYERS, 2, 16, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        places = torch.arange(m, device="cuda")
        angles = torch.outer(torch.arange(256.0), 1e4 ** -(torch.arange(0.0, DIM, 2) / DIM)).cuda()
        self.rotation = skinny.RotaryInput(angles.cos(), angles.sin(), places)
        self.kv_rows = places

    def kv(self, layer: int) -> skinny.KvRows:
        return skinny.KvRows(self.pool[:, layer], self.kv_rows)


class Chain:
    """All layers' products in a row, attention left out: the queries stand for what it returns."""

    def __init__(self, layers: dict[str, list[torch.Tensor]], m: int) -> None:
        self._layers, self._rows, self._start = layers, Rows(m), _normal(m, HIDDEN)
        self._sums = torch.zeros(2, 512, skinny.MAX_ROWS, device="cuda")
        self._first = torch.zeros(1, skinny.MAX_ROWS, device="cuda")
        self._first[0, :m] = self._start.float().square().sum(1)
        self.x = torch.empty_like(self._start)

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for stack in self._layers.values() for w in stack)

    def fused(self, launch: skinny.ProductLaunch) -> None:
        """The four kernels a layer."""
        rows, x, sums = self._rows, self.x, self._first
        torch.mul(
            self._start, 1.0, out=x
        )  # a kernel, as the embedding is: not a copy, which PDL does not know
        attended, inner = skinny.SkinnyInput(rows.q.view(rows.m, -1)), skinny.SkinnyInput(rows.inner)
        for i in range(LAYERS):
            qkv, o, gate_up, down = (self._layers[p.name][i] for p in LAYER)
            source = skinny.SkinnyInput(x, sums, EPS)
            skinny.qkv_rope(source, skinny.QkvWeights(qkv), rows.q, rows.rotation, rows.kv(i), launch)
            middle = self._sums[0, : skinny.linear_parts(attended, o, launch)]
            skinny.linear(attended, o, x, launch, skinny.LinearEnd(x, middle))
            skinny.gated(skinny.SkinnyInput(x, middle, EPS), gate_up, rows.inner, launch)
            sums = self._sums[1, : skinny.linear_parts(inner, down, launch)]
            skinny.linear(inner, down, x, launch, skinny.LinearEnd(x, sums))


def milliseconds(calls: Sequence[Call]) -> float:
    """Median time of the calls, one after another, as one CUDA graph."""
    return graph_us(calls) * len(calls) / 1e3
