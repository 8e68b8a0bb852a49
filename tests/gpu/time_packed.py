"""Products of experts in MXFP4 on a GPU: are they right, and which tiles are the fastest?

    python -m tests.gpu.time_packed --out FILE [--seconds 200] [--rows 1 8 32] [--experts 32 128]

gpt-oss's sizes. Each product is compared with one of the widened numbers, and timed in a CUDA graph for each
of several tiles, with other rows and so other experts every time; beside it stands the floor, the bytes of
the touched experts over 4.3 TB/s. A line of JSON for each tile, the fastest last.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from eyas.bench.kernels.timing import graph_us
from eyas.engine.kernels.experts import grouped_packed
from eyas.engine.kernels.experts.group import GroupedChoices, group
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import ExpertWeight, GateActivation, shape_of
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile, key_of, most_blocks, tile_for
from eyas.engine.kernels.launch.warm import KernelWarmup
from eyas.engine.kernels.products.blocks import StoredWeight
from eyas.engine.kernels.products.fp4 import PARTS, UNIT, Fp4Weight
from eyas.engine.kernels.products.skinny import ProductLaunch
from tests.gpu.report import Report

HIDDEN, PER_ROW, SETS, STEP = 2880, 4, 8, PARTS * UNIT
BYTES_PER_S, WORST = 4.3e12, 6e-3
GATE = GateActivation(clamped=True)


class Products:
    """Both weights of a layer with some experts, and rows that chance sends to them."""

    def __init__(self, experts: int, device: str = "cuda") -> None:
        self.experts, self.device = experts, device
        self.weights = self._weight(2 * HIDDEN), self._weight(HIDDEN)
        self.biases = [self._random(experts, n) for n in (2 * HIDDEN, HIDDEN)]
        self.launch = ProductLaunch.on(device, pdl=True)

    def _random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=self.device, dtype=torch.bfloat16)

    def _weight(self, n: int) -> Fp4Weight:
        steps = -(-HIDDEN // STEP)
        words = torch.randint(-32768, 32768, (self.experts, steps, n, UNIT), device=self.device)
        scales = torch.randint(243, 248, (self.experts, steps, n, 4), device=self.device, dtype=torch.uint8)
        bits = scales.view(torch.int32)[..., 0].contiguous()
        return Fp4Weight(words.to(torch.int16), bits, HIDDEN, torch.bfloat16)

    def widened(self, which: int, shared: GroupedProducts) -> StoredWeight:
        """Expert by expert, by products with a unit matrix."""
        whole, eye = self.weights[which], torch.eye(HIDDEN, device=self.device, dtype=torch.bfloat16)
        rows = whole.words.transpose(1, 2).flatten(2)
        each = (Fp4Weight(w, s, HIDDEN, whole.dtype) for w, s in zip(rows, whole.scales, strict=True))
        return StoredWeight(torch.stack([shared.dense(eye, one).t().contiguous() for one in each]))

    def choices(self, rows: int, seed: int) -> torch.Tensor:
        scores = torch.rand(rows, self.experts, generator=torch.Generator().manual_seed(seed))
        return scores.topk(PER_ROW).indices.int().to(self.device)

    def call(
        self, which: int, weight: ExpertWeight, rows: int, seed: int, tile: GroupedTile | None
    ) -> tuple[Callable[[], torch.Tensor], GroupedChoices]:
        gate, count = (GATE, None)[which], rows * PER_ROW
        table = {} if tile is None else {key_of(shape_of(weight, gate), count): tile}
        shared = GroupedProducts(self.launch, table)
        height = tile.rows if tile else tile_for(shape_of(weight, gate), count, {}).rows
        order = group(self.choices(rows, seed), self.experts, height, True)
        x = self._random(rows if which == 0 else count, HIDDEN)
        bias = self.biases[which]
        if which == 0:
            return lambda: shared.gate_up(x, weight, order, PER_ROW, GATE, bias), order  # type: ignore
        return lambda: shared.down(x, weight, order, bias), order


def tiles(which: int, rows: int, experts: int) -> Iterator[GroupedTile]:
    """Candidates for a product."""
    count = rows * PER_ROW
    for height, columns, deep, stages, split in itertools.product(
        (8, 16), (64, 128), (1, 2), (3, 4, 6), (1, 2, 4)
    ):
        made = columns // 2 if which == 0 else columns
        programs = most_blocks(count, experts, height) * -(-HIDDEN // made)
        if split > 1 and programs * split > 1600:
            continue
        if deep == 2 and stages == 6 or programs * split < 132 and split < 4:
            continue
        yield GroupedTile(height, columns, deep * STEP, 4, stages, split)


def recipe(rows: list[int], experts: list[int]) -> None:
    """Every launch, on "meta", so that all kernels are compiled at once."""
    for count in experts:
        made = Products(count, "meta")
        for height, which in itertools.product(rows, (0, 1)):
            for tile in tiles(which, height, count):
                made.call(which, made.weights[which], height, 0, tile)[0]()
            made.call(which, made.weights[which], height, 0, None)[0]()
            with mock.patch.object(grouped_packed, "MOST_AHEAD", 0):
                made.call(which, made.weights[which], height, 0, None)[0]()


def check(made: Products, which: int, rows: int) -> dict[str, object]:
    """The rule's tile against widened numbers, and against the neighbour's expert."""
    call, order = made.call(which, made.weights[which], rows, 3, None)
    wide = made.widened(which, GroupedProducts(made.launch))
    torch.manual_seed(1)
    call, order = made.call(which, made.weights[which], rows, 3, None)
    torch.manual_seed(1)
    plain, _ = made.call(which, wide, rows, 3, GroupedTile(order.rows, 64, 64, 4, 3))
    found, expected = call().float(), plain().float()
    error = ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    other = ((found - expected.roll(1, 0)).norm(dim=-1) / expected.norm(dim=-1)).min().item()
    return {"ok": error < WORST and other > 10 * WORST, "error": error, "a neighbour's": other}


def times(made: Products, which: int, rows: int) -> dict[str, object]:
    """The tiles, the fastest first."""
    touched = sum(len(made.choices(rows, seed).unique()) for seed in range(SETS)) / SETS
    bytes_ = touched * HIDDEN * HIDDEN * (2 if which == 0 else 1) * 17 / 32
    found = []
    usual = tile_for(shape_of(made.weights[which], (GATE, None)[which]), rows * PER_ROW, {})
    for tile in dict.fromkeys((usual, *tiles(which, rows, made.experts))):
        calls = [made.call(which, made.weights[which], rows, seed, tile)[0] for seed in range(SETS)]
        try:
            found.append((round(graph_us(calls, 7), 2), str(tile)))
        except Exception as error:
            found.append((1e9, f"{tile}: {str(error)[:80]}"))
    rule = found[0]
    found.sort()
    with mock.patch.object(grouped_packed, "MOST_AHEAD", 0):
        calls = [made.call(which, made.weights[which], rows, seed, usual)[0] for seed in range(SETS)]
        bare = round(graph_us(calls, 7), 2)
    floor = bytes_ / BYTES_PER_S * 1e6
    return {
        "floor us": round(floor, 2),
        "rule": rule,
        "nothing ahead": bare,
        "best": found[:6],
        "worst": found[-1],
    }


def main() -> int:
    """1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--experts", type=int, nargs="+", default=[32, 128])
    args = parser.parse_args()
    report = Report(args.out, args.seconds)
    arguments = (args.rows, args.experts)
    report.run("compile", lambda: {"kernels": KernelWarmup(
        "tests.gpu.time_packed:recipe", arguments, 90, os.cpu_count() or 1).wait().kernels})  # fmt: skip
    for count in args.experts:
        made = Products(count)
        for which, rows in itertools.product((0, 1), args.rows):
            name = f"{count} experts, {('gate and up', 'down')[which]}, {rows} rows"
            if count == min(args.experts):
                report.run(f"{name}: right", lambda w=which, r=rows, m=made: check(m, w, r))
            report.run(f"{name}: us", lambda w=which, r=rows, m=made: times(m, w, r))
        if count == min(args.experts):
            for which in (0, 1):
                report.run(f"{count} experts, 600 rows: right", lambda w=which, m=made: check(m, w, 600))
        del made
    print(f"{'FAIL' if report.failed else 'PASS'}: {report.failed} parts failed", flush=True)
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
