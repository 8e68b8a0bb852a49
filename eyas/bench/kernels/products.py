"""Cases of matrix products: those of one decoder layer, and the output head, at the model's own sizes.

The calls go through copies of a weight that no cache holds together. Few rows go through the engine's skinny
products with all that these carry out beside the product; a prompt's chunk through the library's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from eyas.bench.kernels.case import Call, KernelCalls, KernelCase, KernelSetting
from eyas.engine.checkpoint.config import AttentionSpec
from eyas.engine.kernels.products import skinny
from eyas.engine.layers.linear import Linear

ROWS = (1, 8, 16, 32, 64)
EPS = 1e-5


@dataclass(frozen=True)
class MatrixProduct:
    """out [m, n] = x [m, k] . weight [n, k]^T; `kind`: qkv, linear (with a residual), gated or head."""

    name: str
    kind: str
    n: int
    k: int

    def nbytes(self, m: int, itemsize: int) -> int:
        """The weight, the rows read and the rows written, once each; `gated` writes half of its n."""
        written = self.n // 2 if self.kind == "gated" else self.n
        return itemsize * (self.n * self.k + m * (self.k + written))

    def flops(self, m: int) -> int:
        """The operations for m rows."""
        return 2 * m * self.n * self.k


def products_of(setting: KernelSetting) -> list[MatrixProduct]:
    """The products of one layer in the order of a forward, then the head's, as one rank has them."""
    model, layer = setting.model, setting.model.layers[0]
    heads, dim, hidden = layer.attention, model.head_dim, model.hidden_size
    width, ranks = layer.feed_forward.width, setting.config.tensor_parallel_size
    return [
        MatrixProduct("qkv", "qkv", (heads.num_heads + 2 * heads.num_kv_heads) * dim, hidden),
        MatrixProduct("o", "linear", hidden, heads.num_heads * dim),
        MatrixProduct("gate_up", "gated", 2 * width, hidden),
        MatrixProduct("down", "linear", hidden, width),
        MatrixProduct("lm_head", "head", model.vocab_size // ranks, hidden),
    ]


def cases(setting: KernelSetting) -> Iterator[KernelCase]:
    """Every product by rows, and those of a layer for a prompt's chunk."""
    products = products_of(setting)
    for m in ROWS:
        for product in products:
            yield KernelCase(
                f"{product.name} {product.n} x {product.k}, {m} rows", partial(_work, setting, product, m)
            )
    for product in products[:-1]:
        m = setting.config.chunk_tokens
        yield KernelCase(
            f"{product.name} {product.n} x {product.k}, chunk of {m}", partial(_work, setting, product, m)
        )


def _work(setting: KernelSetting, product: MatrixProduct, m: int) -> KernelCalls:
    nbytes = product.nbytes(m, setting.dtype.itemsize)
    copies = setting.calls(product.n * product.k * setting.dtype.itemsize)
    weights = [setting.normal(product.n, product.k).mul_(product.k**-0.5) for _ in range(copies)]
    if not setting.fast:
        x = setting.normal(m, product.k)
        calls: list[Call] = [partial(Linear(weight), x) for weight in weights]
    elif m > skinny.MAX_ROWS:
        x = setting.normal(m, product.k)
        calls = [partial(torch.mm, x, weight.t()) for weight in weights]
    else:
        launch = skinny.ProductLaunch.on(setting.device, pdl=setting.pdl)
        rows = _LayerRows(setting, m)
        calls = [rows.call(product, weight, launch) for weight in weights]
    return KernelCalls(calls, nbytes, product.flops(m), clock=setting.clock)


class _LayerRows:
    """m rows on their way through a layer, with everything that its products read and write beside them."""

    def __init__(self, setting: KernelSetting, m: int) -> None:
        model, self._setting, self._m = setting.model, setting, m
        self._hidden = self._normal(model.hidden_size)
        self._squares = torch.zeros(1, skinny.MAX_ROWS, device=setting.device)
        self._squares[0, :m] = self._hidden.float().square().sum(1)
        places = torch.arange(m, dtype=torch.int32, device=setting.device)
        angles = torch.zeros(2, m, model.head_dim // 2, device=setting.device)
        self._rotation = skinny.RotaryInput(angles[0], angles[1], places)
        size = setting.config.page_size
        pages = -(-m // size)
        pool = torch.zeros(
            pages, 2, size, model.num_kv_heads, model.head_dim, dtype=setting.dtype, device=setting.device
        )
        self._kv = skinny.KvRows(pool, places)

    def call(self, product: MatrixProduct, weight: torch.Tensor, launch: skinny.ProductLaunch) -> Call:
        """One product, as the engine calls it."""
        normed = skinny.SkinnyInput(self._hidden, self._squares, EPS)
        if product.kind == "qkv":
            spec = self._setting.model.layers[0].attention
            q = self._empty(spec.num_heads, spec.head_dim)
            qkv = self._qkv(spec, weight)
            return partial(skinny.qkv_rope, normed, qkv, q, self._rotation, self._kv, launch)
        if product.kind == "gated":
            gelu = self._setting.model.layers[0].feed_forward.activation == "gelu_tanh"
            return partial(skinny.gated, normed, weight, self._empty(product.n // 2), launch, gelu)
        plain = skinny.SkinnyInput(self._normal(product.k))
        if product.kind == "head":
            out = torch.empty(self._m, product.n, dtype=torch.float32, device=self._setting.device)
            return partial(skinny.linear, plain, weight, out, launch)
        parts = skinny.linear_parts(plain, weight, launch)
        sums = torch.empty(parts, skinny.MAX_ROWS, dtype=torch.float32, device=self._setting.device)
        end = skinny.LinearEnd(self._hidden, sums)
        return partial(skinny.linear, plain, weight, self._empty(product.n), launch, end)

    def _qkv(self, spec: AttentionSpec, weight: torch.Tensor) -> skinny.QkvWeights:
        norms = None
        if spec.head_norms:
            norms = skinny.HeadNorms(torch.ones_like(weight[:2, : spec.head_dim]), EPS)
        return skinny.QkvWeights(weight, weight[:, 0].contiguous() if spec.qkv_bias else None, norms)

    def _normal(self, columns: int) -> torch.Tensor:
        like = torch.empty(0, dtype=self._setting.dtype, device=self._setting.device)
        return skinny.empty_padded(self._m, columns, like=like).normal_()

    def _empty(self, *sizes: int) -> torch.Tensor:
        return skinny.empty_padded(self._m, *sizes, like=self._hidden)
