"""Two streams for a step with prompt chunks and rounds: rounds wait for memory, chunks for matrix units."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eyas.engine.kernels.products.skinny import MAX_ROWS


class PrefillStream:
    """The stream of one engine's chunks; without a GPU there is none."""

    def __init__(self, *, cuda: bool) -> None:
        self._side = torch.cuda.Stream() if cuda else None

    def run(self, count: int, chunks: Callable[[], object], rounds: Callable[[], object]) -> None:
        """The chunks on the side, except in steps of few rows: their products are launched one into the
        other. `count`: the step's rows.
        """
        side = self._side if count > MAX_ROWS else None
        if side is None:
            chunks()
        else:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                chunks()
        rounds()
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
