"""Tries tiles of grouped and dense products: every one that fits, each against the rule's result, by a graph.

A tile whose result differs, or that does not compile, is none.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from eyas.bench.fastest import Call, FastestTile, TileRace, compiled
from eyas.engine.checkpoint.config import ExpertsSpec, LatentSpec, LayerSpec
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.experts import grouped_wide
from eyas.engine.kernels.experts.group import GroupedChoices, group
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation, shape_of
from eyas.engine.kernels.experts.grouped_tiles import (
    GroupedShape,
    GroupedTile,
    Key,
    fitted,
    key_of,
    most_blocks,
    tile_for,
)
from eyas.engine.kernels.products import few, single, vendor
from eyas.engine.kernels.products.blocks import SIDE, Rows, StoredWeight
from eyas.engine.kernels.products.skinny import ProductLaunch
from eyas.engine.models.table import read_model
from eyas.engine.parallel.shards import config_of_rank

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCKS = (16, 32, 64, 128)
SETS = 4  # of rows, so that experts' weights come from memory
SPREAD = 4 * 132  # programs: more parts of k than these take help nothing


@dataclass(frozen=True)
class TuningJob:
    """Products to be tuned: of experts `gate_up` and `down`, `per_row` each; or (0) one dense product."""

    shapes: tuple[GroupedShape, ...]
    per_row: int = 0


@dataclass(frozen=True)
class ProductInput:
    """Rows of a product, as its weight reads them, and the order of their experts."""

    x: Rows
    order: GroupedChoices | None


def jobs_of(model: str, ranks: int, products: str) -> tuple[TuningJob, ...]:
    """The tuning jobs of one rank's share of a model: those of experts ("moe"), or the dense ones in FP8
    blocks ("gemm").
    """
    config = config_of_rank(read_model(model, "dummy", impl="eyas"), ranks)
    in_fp8 = bool(config.quantized and config.quantized.rows)
    itemsize = 1 if in_fp8 else 2
    jobs: dict[TuningJob, None] = {}
    for layer in config.layers:
        spec = layer.feed_forward
        if products == "moe" and isinstance(spec, ExpertsSpec):
            experts, per_row = spec.with_shared
            jobs[TuningJob(gated_pair(experts, spec.width, config.hidden_size, itemsize), per_row)] = None
        elif products == "gemm" and in_fp8:
            jobs |= dict.fromkeys(TuningJob((shape,)) for shape in dense_shapes(layer, config.hidden_size))
    return tuple(jobs)


def gated_pair(experts: int, width: int, hidden: int, itemsize: int) -> tuple[GroupedShape, GroupedShape]:
    """Gate and up, and down."""
    return GroupedShape(experts, 2 * width, hidden, True, itemsize), GroupedShape(
        experts, hidden, width, False, itemsize
    )


def dense_shapes(layer: LayerSpec, hidden: int) -> Iterator[GroupedShape]:
    """The shapes of a layer's dense products in FP8 blocks, with the shared expert that is like the
    others.
    """
    attention, spec = layer.attention, layer.feed_forward
    if isinstance(attention, LatentSpec):
        yield from _latent_shapes(attention, hidden)
    else:
        heads, kv, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        yield GroupedShape(1, (heads + 2 * kv) * dim, hidden, False, 1)
        yield GroupedShape(1, hidden, heads * dim, False, 1)
    width = spec.width
    if isinstance(spec, ExpertsSpec):
        width = 0 if spec.shared_width == spec.width else spec.shared_width
    if width:
        yield from gated_pair(1, width, hidden, 1)


def _latent_shapes(spec: LatentSpec, hidden: int) -> Iterator[GroupedShape]:
    """The shapes of the first product of the input, the queries' second factor, and the way back."""
    queries = spec.num_heads * (spec.plain_dim + spec.rotated_dim)
    yield GroupedShape(1, (spec.query_rank or queries) + spec.head_dim, hidden, False, 1)
    if spec.query_rank:
        yield GroupedShape(1, queries, spec.query_rank, False, 1)
    yield GroupedShape(1, hidden, spec.num_heads * spec.value_dim, False, 1)


def search(
    jobs: tuple[TuningJob, ...], device: str, deadline: float
) -> Iterator[tuple[Key, FastestTile[GroupedTile]]]:
    """The best tile of every product and number of rows, until the deadline (`time.monotonic`)."""
    compiled(f"{__name__}:launches", (jobs,), device)
    for job in jobs:
        bench = TuningBench(job, device)
        for rows in ROWS:
            if time.monotonic() > deadline:
                return
            if not bench.is_elsewhere(rows):
                yield from bench.best(rows, deadline)


def launches(jobs: tuple[TuningJob, ...]) -> None:
    """Every launch that a search may make, on "meta": a recipe of `eyas.engine.kernels.launch.warm`."""
    for job in jobs:
        bench = TuningBench(job, "meta")
        for rows in ROWS:
            choices = rows * max(job.per_row, 1)
            for block, at in itertools.product(bench.blocks(rows), range(len(job.shapes))):
                inputs = bench.inputs(at, rows, block)
                for tile in candidates(job.shapes[at], choices, block):
                    bench.calls(at, inputs, tile, choices)[0]()


def meant(made: Rows) -> torch.Tensor:
    """The numbers that rows stand for, float32."""
    if isinstance(made, torch.Tensor):
        return made.float()
    return made.stored.float() * made.scales.repeat_interleave(SIDE, 1)[:, : made.stored.shape[1]]


def candidates(shape: GroupedShape, choices: int, rows: int) -> list[GroupedTile]:
    """Tiles of `rows` rows that fit, the rule's first."""
    tiles = [tile_for(shape, choices, {}, rows)]
    depths = (128,) if shape.itemsize == 1 else (64, 128)
    in_flight = (3, 5) if rows < grouped_wide.FEWEST else (3, 4, 5)
    for columns, depth, warps, stages, split in itertools.product(
        (32, 64, 128), depths, (4, 8), in_flight, (1, 2, 4, 8)
    ):
        if warps == 8 and columns * rows < 64 * 64 or columns * rows > 128 * 128:
            continue
        tile = fitted(GroupedTile(rows, columns, depth, warps, stages, split), shape, choices)
        programs = most_blocks(choices, shape.experts, rows) * -(-shape.outputs // tile.columns)
        if tile.split == split and (split == 1 or programs * split <= SPREAD):
            tiles.append(tile)
    return list(dict.fromkeys(tiles))


class TuningBench:
    """Weights and rows of a job, on a device."""

    def __init__(self, job: TuningJob, device: str) -> None:
        self.job, self._device = job, device
        self._launch = ProductLaunch.on(device, pdl=device != "cpu")
        self._weights = [self._weight(shape) for shape in job.shapes]

    def is_elsewhere(self, rows: int) -> bool:
        """True if an engine multiplies this many rows by the dense weight without a tile."""
        weight = self._weights[0]
        if self.job.per_row or weight.rounding is None:
            return False
        alone = rows == 1 and single.can_hold(weight)
        by_few = few.takes(rows, weight) and not self.job.shapes[0].gated
        by_vendor = vendor.is_there(self._device) and vendor.takes(rows, self._dtype, weight)
        return alone or by_few or by_vendor

    def best(self, rows: int, deadline: float) -> Iterator[tuple[Key, FastestTile[GroupedTile]]]:
        """Both products of experts have blocks of one size: that of the smaller sum."""
        choices, fastest = rows * max(self.job.per_row, 1), None
        for block in self.blocks(rows):
            measured = [self._fastest(at, rows, block, deadline) for at in range(len(self._weights))]
            total = sum(each.us for each in measured)
            if fastest is None or total < fastest[0]:
                fastest = total, measured
        assert fastest is not None
        yield from zip((key_of(shape, choices) for shape in self.job.shapes), fastest[1], strict=True)

    def blocks(self, rows: int) -> list[int]:
        """Numbers of rows of a tile that are worth a try: about as many as an expert has."""
        choices, experts = rows * max(self.job.per_row, 1), self.job.shapes[0].experts
        each = -(-choices // min(choices, experts))
        return [block for block in BLOCKS if block <= max(4 * each, 16) and 4 * block >= min(each, 128)]

    def inputs(self, at: int, rows: int, block: int) -> list[ProductInput]:
        """The input of a product: rows, and where they go; drawn on the device, the same for every tile."""
        shape, per_row = self.job.shapes[at], self.job.per_row
        count = rows * per_row if at else rows
        inputs = []
        for _ in range(SETS):
            x = torch.randn(count, shape.k, dtype=self._dtype, device=self._device)
            order = None
            if per_row:
                chosen = torch.rand(rows, shape.experts, device=self._device).topk(per_row).indices
                order = group(chosen.int(), shape.experts, block)
            inputs.append(ProductInput(self._weights[at].read(x, self._launch.pdl), order))
        return inputs

    def calls(self, at: int, inputs: list[ProductInput], tile: GroupedTile, choices: int) -> list[Call]:
        """A product of each of the inputs, by this tile."""
        shape = self.job.shapes[at]
        products = GroupedProducts(self._launch, {key_of(shape, choices): tile})
        return [partial(self._product, products, at, given) for given in inputs]

    def _product(self, products: GroupedProducts, at: int, given: ProductInput) -> Rows:
        """Runs the product. A gate's result is rounded for the next product, by the tile or after it."""
        weight, gate = self._weights[at], GateActivation(rounding=self._weights[at].rounding)
        if not self.job.shapes[at].gated:
            if given.order is None:
                return products.dense(given.x, weight)
            return products.down(given.x, weight, given.order)
        if given.order is None:
            return weight.read(products.dense_gated(given.x, weight, gate), self._launch.pdl)
        made = products.gate_up(given.x, weight, given.order, self.job.per_row, gate)
        return weight.read(made, self._launch.pdl)

    def _fastest(self, at: int, rows: int, block: int, deadline: float) -> FastestTile[GroupedTile]:
        choices, inputs = rows * max(self.job.per_row, 1), self.inputs(at, rows, block)
        race: TileRace[GroupedTile] = TileRace(
            lambda tile: self.calls(at, inputs, tile, choices), lambda call: meant(call()), self._device
        )
        return race.fastest(candidates(self.job.shapes[at], choices, block), deadline)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self._device == "cpu" else torch.bfloat16

    def _weight(self, shape: GroupedShape) -> StoredWeight:
        sizes = (shape.experts, shape.n, shape.k) if self.job.per_row else (shape.n, shape.k)
        noise = torch.empty(sizes, dtype=self._dtype, device=self._device)
        for part in noise.view(-1, shape.k).split(4096):
            part.normal_().mul_(shape.k**-0.5)
        if shape.itemsize > 1:
            return StoredWeight(noise)
        blocks = (*sizes[:-2], -(-shape.n // 128), -(-shape.k // 128))
        scales = torch.full(blocks, 1 / 64, dtype=torch.float32, device=self._device)
        weight = StoredWeight(noise.mul_(64).to(torch.float8_e4m3fn), scales, RowRounding("block"))
        assert shape_of(weight, GateActivation() if shape.gated else None) == shape
        return weight
