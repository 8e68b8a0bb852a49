"""What the sweep of the skinny products measures: single products and the chain of a whole decoder, and how.

Shapes are those of Llama-3.1-8B and of its EAGLE-3 head. Products go over the weights of 32 layers, or over
as many copies as L2 cannot hold, so that every weight comes from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

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
EAGLE = [
    Product("draft_qkv", "qkv", (HEADS + 2 * KV_HEADS) * DIM, 2 * HIDDEN),
    Product("draft_lm_head", "linear", 32000, HIDDEN),
    Product("fc", "linear", HIDDEN, 3 * HIDDEN),
]


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

    def call(self, product: Product, weight: torch.Tensor, launch: skinny.ProductLaunch) -> Call:
        """One product, as the engine calls it; its result is in `result`."""
        x = self.x[product.k]
        source = skinny.SkinnyInput(x, self.sums[:1], EPS) if product.k == HIDDEN else skinny.SkinnyInput(x)
        if product.kind == "qkv":
            qkv = skinny.QkvWeights(weight)
            return partial(skinny.qkv_rope, source, qkv, self.q, self.rotation, self.kv(0), launch)
        if product.kind == "gated":
            return partial(skinny.gated, source, weight, self.inner, launch)
        if product.n > 2 * INNER:
            out = torch.empty(self.m, product.n, dtype=torch.float32, device="cuda")
            return partial(skinny.linear, skinny.SkinnyInput(x), weight, out, launch)
        plain = skinny.SkinnyInput(x)
        sums = torch.empty(
            skinny.linear_parts(plain, weight, launch), skinny.MAX_ROWS, dtype=torch.float32, device="cuda"
        )
        end = skinny.LinearEnd(self.x[HIDDEN], sums)
        return partial(skinny.linear, plain, weight, torch.empty_like(self.x[HIDDEN]), launch, end)

    def expected(self, product: Product, weight: torch.Tensor) -> torch.Tensor:
        """What the call writes (of qkv: the queries), by plain torch in float32."""
        x, wide = self.x[product.k].float(), weight.float()
        if product.kind != "linear" and product.k == HIDDEN:
            x = F.rms_norm(x, (HIDDEN,), eps=EPS)
        y = x @ wide.t()
        if product.kind == "gated":
            gate, up = y.chunk(2, dim=1)
            return F.silu(gate) * up
        if product.kind == "qkv":
            return rotated(y.view(self.m, -1, DIM)[:, :HEADS], self.rotation)
        return y if product.n > 2 * INNER else y + self.x[HIDDEN]


def result(call: Call) -> torch.Tensor:
    """The tensor that a call of `Rows.call` writes: its third argument."""
    return call.args[2]  # type: ignore[attr-defined]


def rotated(x: torch.Tensor, rotation: skinny.RotaryInput) -> torch.Tensor:
    """x [m, heads, dim] by plain torch, in float32."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = rotation.cos[rotation.positions][:, None], rotation.sin[rotation.positions][:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


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

    def plain(self) -> None:
        """The same by torch.mm and torch's own small operations."""
        rows, x = self._rows, self._start.clone()
        gain = torch.ones(HIDDEN, dtype=x.dtype, device=x.device)
        slots = rows.kv_rows
        for i in range(LAYERS):
            qkv, o, gate_up, down = (self._layers[p.name][i] for p in LAYER)
            y = torch.mm(F.rms_norm(x, (HIDDEN,), gain, EPS), qkv.t()).view(rows.m, -1, DIM)
            turned = rotated(y[:, : HEADS + KV_HEADS], rows.rotation).to(x.dtype)
            rows.pool[slots // 16, i, 0, slots % 16] = turned[:, HEADS:]
            rows.pool[slots // 16, i, 1, slots % 16] = y[:, HEADS + KV_HEADS :]
            x = x + torch.mm(turned[:, :HEADS].reshape(rows.m, -1), o.t())
            gate, up = torch.mm(F.rms_norm(x, (HIDDEN,), gain, EPS), gate_up.t()).chunk(2, dim=1)
            x = x + torch.mm(F.silu(gate) * up, down.t())
        self.x.copy_(x)

    def products(self) -> None:
        """cuBLAS's products alone, without anything between them."""
        for i in range(LAYERS):
            for p in LAYER:
                torch.mm(self._rows.x[p.k], self._layers[p.name][i].t())


def milliseconds(calls: Sequence[Call]) -> float:
    """Median time of the calls, one after another, as one CUDA graph."""
    return graph_us(calls) * len(calls) / 1e3
