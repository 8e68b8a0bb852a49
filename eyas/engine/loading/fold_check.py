"""Checks on this machine, to the bit, that cuBLAS adds up products of many rows as the narrow kernels do.

The narrow kernels fold k from its beginning to its end. An unsplit kernel of cuBLAS does so too on the GPUs
that were tried, which no one promises; so every weight's shape is tried at every start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.kernels.products import exact_wide, skinny
from eyas.engine.models.ops.device_machine import SIDE, router_tiles
from eyas.engine.parallel.shards import config_of_rank

COUNTS = (129, 160, 192, 256, 320, 384, 512, 640, 768, 1000, 1024, 1536, 2048, 3072, 4096)
"""Rows of the products that are compared."""

MOST_RESULTS = 1 << 27
"""Numbers of one product, at most: an output head's are fewer rows'."""


@dataclass(frozen=True)
class FoldedWeight:
    """A product's weight [n, k]; `kind` and `span` as of `skinny_tiles.ProductShape`. `router`: of
    experts."""

    kind: str
    n: int
    k: int
    span: int
    router: bool = False

    def __str__(self) -> str:
        return f"{self.n} x {self.k}"


def weights_of(target: ModelConfig, ranks: int = 1, *, scaled: bool = False) -> list[FoldedWeight]:
    """Every distinct weight of a decoder, or of one rank's share of it, that cuBLAS may have. `scaled`: its
    keys and values are stored with scales.
    """
    target, outputs = config_of_rank(target, ranks), target.vocab_size // ranks
    hidden, weights = target.hidden_size, []
    for spec in dict.fromkeys(target.layers):
        attention, mlp = spec.attention, spec.feed_forward
        if not attention.latent:
            dim, heads = attention.head_dim, attention.num_heads
            rows = (heads + 2 * attention.num_kv_heads) * dim
            weights.append(FoldedWeight(skinny.qkv_kind(attention.head_norms, scaled), rows, hidden, dim))
            weights.append(FoldedWeight("linear", hidden, heads * dim, hidden))
        if isinstance(mlp, ExpertsSpec):
            routes = mlp.experts + -mlp.experts % SIDE
            weights.append(FoldedWeight("linear", routes, hidden, routes, router=True))
        else:
            weights.append(FoldedWeight("gated", 2 * mlp.width, hidden, 2 * mlp.width))
            weights.append(FoldedWeight("linear", hidden, mlp.width, hidden))
    weights.append(FoldedWeight("linear", outputs, hidden, outputs))
    return list(dict.fromkeys(weights))


@torch.inference_mode()
def unequal(
    weights: Iterable[FoldedWeight], launch: skinny.ProductLaunch, dtype: torch.dtype
) -> list[FoldedWeight]:
    """The weights for which cuBLAS gives other bits than a fold of k.

    Raises ConfigError if two kernels of ours differ: then no exact arithmetic is possible here. On the device
    "meta" all are equal, and kernels are compiled.
    """
    failures = [weight for weight in weights if not _folds(weight, launch, dtype)]
    if launch.tickets.is_cuda:
        torch.cuda.empty_cache()
    return failures


def _folds(weight: FoldedWeight, launch: skinny.ProductLaunch, dtype: torch.dtype) -> bool:
    counts = [count for count in COUNTS if count * weight.n <= MOST_RESULTS] or [COUNTS[0]]
    x, matrix = operands(weight.n, weight.k, counts[-1], launch.tickets.device, dtype)
    ours, theirs = (dataclasses.replace(launch, cublas=cublas) for cublas in (False, True))
    if weight.kind == "linear":
        tiles = router_tiles(weight.n, weight.k) if weight.router else ours.tiles
        _check_ours(weight, x[: skinny.MAX_ROWS], matrix, dataclasses.replace(ours, tiles=tiles))
    return all(
        same(exact_wide.product(x[:count], matrix, ours, *how), product)
        for count in counts
        for how in ((weight.kind, weight.span, dtype), (weight.kind, weight.span, torch.float32))
        for product in [exact_wide.product(x[:count], matrix, theirs, *how)]
    )


def _check_ours(
    weight: FoldedWeight, x: torch.Tensor, matrix: torch.Tensor, launch: skinny.ProductLaunch
) -> None:
    """Raises ConfigError unless the narrow kernel and the wide one agree."""
    narrow = torch.empty(x.shape[0], weight.n, device=x.device)
    skinny.linear(skinny.SkinnyInput(x), matrix, narrow, launch)
    if not same(narrow, exact_wide.product(x, matrix, launch, dtype=torch.float32)):
        text = f"--deterministic: this GPU's sums for a weight of {weight} depend on the shape of a tile"
        raise ConfigError(text, param="deterministic")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two results have the same bits; on the device "meta" all have."""
    return one.is_meta or torch.equal(one, other)


def operands(
    n: int, k: int, rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, k] of numbers of very different sizes, so that another order shows; and a weight [n, k]."""
    random = None if device.type == "meta" else torch.Generator(device).manual_seed(1)
    x, matrix = (torch.randn(count, k, generator=random, device=device) for count in (rows, n))
    sizes = torch.randint(-6, 7, x.shape, generator=random, device=device)
    return (x * torch.exp2(sizes.float())).to(dtype), (matrix * k**-0.5).to(dtype)
