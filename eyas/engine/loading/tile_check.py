"""Checks on this machine that a row has the same bits in every tile of a model's grouped products.

By the matrix unit's rule it has, which no one promises; so at every start rows go through each of the tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.fp8 import RowRounding, scales_of
from eyas.engine.checkpoint.quantized import Fp8Config
from eyas.engine.kernels.experts.group import group
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.experts.grouped_tiles import GroupedShape, GroupedTile, Table, exact_tile_for, key_of
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.blocks import Rows, StoredWeight
from eyas.engine.loading.fold_check import operands, same
from eyas.engine.parallel.shards import config_of_rank

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
    elif rounding is not None and isinstance(attention, AttentionSpec):
        dim, heads = attention.head_dim, attention.num_heads
        yield CheckedProduct(
            GroupedShape(1, (heads + 2 * attention.num_kv_heads) * dim, hidden, False, size), rounding
        )
        yield CheckedProduct(GroupedShape(1, hidden, heads * dim, False, size), rounding)


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
