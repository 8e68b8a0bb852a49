"""The fastest of several tiles of a product: one whose result differs, or that does not compile, is none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from triton.runtime.errors import OutOfResources

from eyas.bench.kernels.timing import graph_us, host_us
from eyas.common.machine import gpus
from eyas.engine.kernels.launch.warm import KernelWarmup

DIFFERENT = 2e-2  # of the result's norm

Call = Callable[[], Any]
TileT = TypeVar("TileT")


@dataclass(frozen=True)
class FastestTile(Generic[TileT]):
    """The fastest tile, its microseconds, and those of the rule's."""

    tile: TileT
    us: float
    ruled_us: float


@dataclass(frozen=True)
class TileRace(Generic[TileT]):
    """A product by any tile. `calls`: its calls by a tile, each with other weights or rows; `result`: calls
    one, and gives what it computed, float32.
    """

    calls: Callable[[TileT], Sequence[Call]]
    result: Callable[[Call], torch.Tensor]
    device: str

    def fastest(self, tiles: Sequence[TileT], deadline: float) -> FastestTile[TileT]:
        """The fastest of `tiles` whose result is that of the first, the rule's; none is tried after the
        deadline (`time.monotonic`).
        """
        times = self.times(tiles, deadline)
        tile = min(times, key=times.__getitem__)
        return FastestTile(tile, times[tile], times[tiles[0]])

    def times(self, tiles: Sequence[TileT], deadline: float) -> dict[TileT, float]:
        """The microseconds of each tile that `fastest` may choose."""
        clock = host_us if self.device == "cpu" else graph_us
        ruled, *others = tiles
        first = self.calls(ruled)
        expected = self.result(first[0])
        times = {ruled: clock(first)}
        for tile in others:
            if time.monotonic() > deadline:
                break
            try:
                same = self.calls(tile)
                error = (self.result(same[0]) - expected).norm() / expected.norm()
                if error < DIFFERENT:
                    times[tile] = clock(same)
            except (RuntimeError, ValueError, OutOfResources):
                continue
        return times


def compiled(recipe: str, args: tuple[Any, ...], device: str) -> int:
    """Compiles a recipe's kernels for a GPU, by all cores, and gives their number."""
    warmup = KernelWarmup(recipe, args, gpus.capability(device), os.cpu_count() or 1)
    return warmup.wait().kernels
