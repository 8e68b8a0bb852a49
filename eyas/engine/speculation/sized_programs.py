"""Launches for batches of fixed sizes: each size is a graph where one has been captured, else plain
launches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.engine.kernels.launch.launching import CAPTURE


class SizedProgram(Protocol):
    """The launches for one size, on memory that stays where it is."""

    def run(self) -> None:
        """The same calls run at once and into a graph."""


@dataclass(frozen=True)
class _CapturedProgram:
    """A program whose launches are recorded, and whose memory the graph uses."""

    program: SizedProgram
    graph: torch.cuda.CUDAGraph


class SizedPrograms:
    """`sizes`: ascending batches that others are filled up to; a larger one is taken as it is. `made`: the
    program of a size.
    """

    def __init__(self, sizes: SequenceOf[int], made: Callable[[int], SizedProgram]) -> None:
        self._sizes = sizes
        self._made = made
        self.graphs: dict[int, _CapturedProgram] = {}

    def size(self, count: int) -> int:
        """The least that holds `count` sequences."""
        place = bisect_left(self._sizes, count)
        return self._sizes[place] if place < len(self._sizes) else count

    def launch(self, size: int) -> None:
        """What the memory says is to be done."""
        captured = self.graphs.get(size)
        if captured is None:
            self._made(size).run()
        else:
            captured.graph.replay()

    def capture(self, tell: Callable[[int], None]) -> None:
        """Records a graph for each size, all in one pool of memory; no two are replayed at once.

        `tell`: fills the memory of a size with a batch of padding.
        """
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            tell(size)
            program = self._made(size)
            program.run()  # compiles and loads what it needs
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode=CAPTURE):
                program.run()
            self.graphs[size] = _CapturedProgram(program, graph)
