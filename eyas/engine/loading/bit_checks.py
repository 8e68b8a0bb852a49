"""Checks on this machine, to the bit, of what no library or matrix unit promises.

**Folds.** The narrow kernels fold k from its beginning to its end. An unsplit kernel of cuBLAS does so too on
the GPUs that were tried; so every weight's shape is tried at every start: cuBLAS must add up products of many
rows as the narrow kernels do.

**Tiles.** By the matrix unit's rule a row has the same bits in every tile of a model's grouped products; so
at every start rows go through each of the tiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ExpertsSpec, LatentSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.fp8 import RowRounding, scales_of
from eyas.engine.checkpoint.quantized import Fp8Config
from eyas.engine.kernels.experts.group import group
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.experts.grouped_tiles import GroupedShape, GroupedTile, Table, exact_tile_for, key_of
from eyas.engine.kernels.products import exact_wide, int4, skinny
from eyas.engine.kernels.products.blocks import Rows, StoredWeight
from eyas.engine.kernels.products.skinny_tiles import MOST_STRETCHES
from eyas.engine.models.ops.device_machine import SIDE, router_tiles
from eyas.engine.parallel.shards import config_of_rank

COUNTS = (129, 160, 192, 256, 320, 384, 512, 640, 768, 1000, 1024, 1536, 2048, 3072, 4096)
"""Rows of the products that are compared."""
PADDED = (16, 32, 64, 128)
"""Rows of the products of few."""

MOST_PACKED = 1 << 28
"""Numbers of four bits of one weight, at most, that is tried."""

MOST_RESULTS = 1 << 27
"""Numbers of one product, at most: an output head's are fewer rows'."""
CHOICES = tuple((1 << i) + more for i in range(18) for more in (0, 1))
"""How many rows, or choices of experts, tiles are asked for: both ends of each bucket of a table. Between
them there are no other tiles.
"""
ROWS = 130
"""Of the products that are compared: a full tile of any kind, and a part of one."""
EXPERTS = 2
"""That those rows choose from; no bit depends on how many there are."""
_LARGE = 32.0  # of what is stored in FP8, on average


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
    hidden, weights = target.hidden_size, list[FoldedWeight]()
    for spec in dict.fromkeys(target.layers):
        mlp = spec.feed_forward
        weights += _mixing(spec, hidden, scaled)
        if isinstance(mlp, ExpertsSpec):
            routes = mlp.experts + (mlp.shared_share and mlp.with_shared[0] > mlp.experts)
            routes += -routes % SIDE
            weights.append(FoldedWeight("linear", routes, hidden, routes, router=True))
        else:
            weights.append(FoldedWeight("gated", 2 * mlp.width, hidden, 2 * mlp.width))
            weights.append(FoldedWeight("linear", hidden, mlp.width, hidden))
    weights.append(FoldedWeight("linear", outputs, hidden, outputs))
    return list(dict.fromkeys(weights))


def _mixing(spec: LayerSpec, hidden: int, scaled: bool) -> Iterator[FoldedWeight]:
    """The weights of a layer's state, or of its attention; of latents none."""
    attention, delta = spec.attention, spec.delta
    if delta is None and attention.latent:
        return
    if delta is not None:
        inner, kind = delta.value_heads * delta.value_size, "linear"
        rows = span = delta.weights(hidden) // hidden - inner
    else:
        dim, inner = attention.head_dim, attention.num_heads * attention.head_dim
        rows = inner * (1 + attention.gated) + 2 * attention.num_kv_heads * dim
        kind, span = skinny.qkv_kind(attention.head_norms, scaled), dim
        if attention.gated:
            kind, span = "linear", rows
    yield FoldedWeight(kind, rows, hidden, span)
    yield FoldedWeight("linear", hidden, inner, hidden)


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


@torch.inference_mode()
def packed_alike(weights: Iterable[FoldedWeight], launch: skinny.ProductLaunch, dtype: torch.dtype) -> bool:
    """True if numbers of four bits, packed, give every number of rows the bits of the matrix that they mean.

    On the device "meta" they do, and kernels are compiled.
    """
    alike = all(_is_packed_alike(weight, launch, dtype) for weight in weights if not weight.router)
    if launch.tickets.is_cuda:
        torch.cuda.empty_cache()
    return alike


def _is_packed_alike(weight: FoldedWeight, launch: skinny.ProductLaunch, dtype: torch.dtype) -> bool:
    n, k, device = weight.n, weight.k, launch.tickets.device
    groups = k // math.gcd(k, int4.BLOCK)
    if n * k > MOST_PACKED or not int4.served(k, groups, k // MOST_STRETCHES):
        return True  # an output head, or widened in any case
    x, _ = operands(16, k, skinny.MAX_ROWS, device, dtype)
    numbers = (torch.arange(n * k, dtype=torch.int32, device=device) * 2654435 >> 8).view(n, k) & 15
    scales = torch.linspace(0.5, 1.5, n * groups, device=device).view(n, groups).mul(k**-0.5 / 4).to(dtype)
    packed = int4.packed(numbers.to(torch.uint8), 8, scales, dtype, k // MOST_STRETCHES)
    matrices: tuple[skinny.SkinnyWeight, ...] = (packed, packed.widened())
    for count in PADDED:
        ours, theirs = (torch.empty(count, n, device=device) for _ in range(2))
        for matrix, out in zip(matrices, (ours, theirs), strict=True):
            skinny.linear(skinny.SkinnyInput(x[:count]), matrix, out, launch)
        if not same(ours, theirs):
            return False
    return True


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


@dataclass(frozen=True)
class CheckedProduct:
    """A product. `rounding`: of its rows, if it is in FP8. `like`: the one that cut its rows into blocks."""

    shape: GroupedShape
    rounding: RowRounding | None = None
    like: GroupedShape | None = None

    def tiles(self, table: Table) -> list[GroupedTile]:
        """All tiles that it takes, each once."""
        tiles: dict[GroupedTile, None] = {}
        for choices in CHOICES:
            rows = exact_tile_for(self.like, choices, table).rows if self.like else 0
            tiles[exact_tile_for(self.shape, choices, table, rows)] = None
        return list(tiles)


def products_of(target: ModelConfig, ranks: int = 1) -> list[CheckedProduct]:
    """Every distinct grouped product of a decoder, or of one rank's share of it.

    Of weights in FP8 all that may be: some layers of a model may be without.
    """
    stored, rounding = target.quantized, None
    if isinstance(stored, Fp8Config) and stored.rows:
        rounding = RowRounding(stored.rows, stored.powers, scale=0.05)
    products = []
    for spec in dict.fromkeys(config_of_rank(target, ranks).layers):
        products += list(_of_layer(spec, target.hidden_size, rounding))
    return list(dict.fromkeys(products))


def _of_layer(spec: LayerSpec, hidden: int, rounding: RowRounding | None) -> Iterator[CheckedProduct]:
    size, attention, mlp = 2 if rounding is None else 1, spec.attention, spec.feed_forward
    dense = 0 if rounding is None else mlp.width
    if isinstance(mlp, ExpertsSpec):
        experts, _ = mlp.with_shared
        gate_up = GroupedShape(experts, 2 * mlp.width, hidden, True, size)
        yield CheckedProduct(gate_up, rounding)
        yield CheckedProduct(GroupedShape(experts, hidden, mlp.width, False, size), rounding, gate_up)
        dense = mlp.shared_width
    if dense:
        yield CheckedProduct(GroupedShape(1, 2 * dense, hidden, True, size), rounding)
        yield CheckedProduct(GroupedShape(1, hidden, dense, False, size), rounding)
    if isinstance(attention, LatentSpec):
        yield from _of_latents(attention, hidden, rounding)
    elif rounding is not None:
        for weight in _mixing(spec, hidden, scaled=False):
            yield CheckedProduct(GroupedShape(1, weight.n, weight.k, False, size), rounding)


def _of_latents(spec: LatentSpec, hidden: int, rounding: RowRounding | None) -> Iterator[CheckedProduct]:
    size, each = 2 if rounding is None else 1, spec.plain_dim + spec.rotated_dim
    queries = spec.query_rank or spec.num_heads * each
    yield CheckedProduct(GroupedShape(1, queries + spec.head_dim, hidden, False, size), rounding)
    if spec.query_rank:
        yield CheckedProduct(GroupedShape(1, spec.num_heads * each, spec.query_rank, False, size), rounding)
    yield CheckedProduct(GroupedShape(1, hidden, spec.num_heads * spec.value_dim, False, size), rounding)


@torch.inference_mode()
def check_tiles(
    products: Iterable[CheckedProduct], launch: skinny.ProductLaunch, table: Table, dtype: torch.dtype
) -> int:
    """Checks that all tiles give the same bits, and counts them.

    Raises ConfigError, which names the weight, if two differ: then no exact arithmetic is possible here. On
    the device "meta" kernels are compiled.
    """
    count = 0
    for product in products:
        x, weight = _operands(product, launch.tickets.device, dtype)
        first, *others = (_made(product, tile, x, weight, launch) for tile in product.tiles(table))
        count += 1 + len(others)
        if not all(same(first, other) for other in others):
            weight_of = f"a weight of {product.shape.n} x {product.shape.k}"
            text = f"--deterministic: this GPU's sums for {weight_of} depend on the shape of a tile"
            raise ConfigError(text, param="deterministic")
    return count


def _made(
    product: CheckedProduct,
    tile: GroupedTile,
    x: torch.Tensor,
    weight: StoredWeight,
    launch: skinny.ProductLaunch,
) -> torch.Tensor:
    """The product of x [ROWS, k] by this tile."""
    shape, gate = product.shape, GateActivation() if product.shape.gated else None
    if shape.experts == 1:
        products = GroupedProducts(launch, {key_of(shape, ROWS): tile})
        return products.dense(x, weight) if gate is None else _plain(products.dense_gated(x, weight, gate))
    products = GroupedProducts(launch, {key_of(replace(shape, experts=EXPERTS), ROWS): tile})
    chosen = torch.arange(ROWS, dtype=torch.int32, device=x.device)[:, None] % EXPERTS
    grouped = group(chosen, EXPERTS, tile.rows, launch.pdl)
    if gate is not None:
        return _plain(products.gate_up(x, weight, grouped, 1, gate))
    return products.down(x, weight, grouped)


def _plain(made: Rows) -> torch.Tensor:
    """The result of a gate that nothing rounds."""
    assert isinstance(made, torch.Tensor)
    return made


def _operands(
    product: CheckedProduct, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, StoredWeight]:
    shape, rounding = product.shape, product.rounding
    each = (shape.n, shape.k)
    x, matrix = operands(*each, ROWS, device, dtype)
    count = (EXPERTS,) if shape.experts > 1 else ()
    whole = matrix.expand(*count, *each).contiguous()
    if rounding is None:
        return x, StoredWeight(whole)
    stored = (whole.float() * (shape.k**0.5 * _LARGE)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    sizes = scales_of(each, "block" if rounding.rows == "block" else "channel")
    scales = torch.linspace(0.5, 1.5, torch.Size(sizes).numel(), device=device).view(sizes) / _LARGE
    return x, StoredWeight(stored, scales.expand(*count, *sizes).contiguous(), rounding)
