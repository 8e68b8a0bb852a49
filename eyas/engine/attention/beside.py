"""Two streams for a step with prompt chunks and rounds: rounds wait for memory, chunks for matrix units.

Chunks start first, and fill as many multiprocessors as they have programs for; rounds, whose programs are
small, many and short, take the room that is left. The other way round rounds fill them all, and chunks wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from eyas.engine.kernels.products.skinny import MAX_ROWS


def apart(count: int) -> bool:
    """Whether rounds attend beside chunks in a step of `count` rows; in smaller steps chunks are too small to
    gain by it.
    """
    return bool(count >= MAX_ROWS)


class RoundsStream:
    """The stream of one engine's rounds beside chunks; without a GPU there is none."""

    def __init__(self, *, cuda: bool) -> None:
        self._side = torch.cuda.Stream() if cuda else None

    def run(self, count: int, chunks: Callable[[], object], rounds: Callable[[], object]) -> None:
        """Both, of a step of `count` rows. Rounds that are `apart` are launched without a dependency on the
        kernel before, by which they would start ahead of the chunks.
        """
        side = self._side if apart(count) else None
        if side is None:
            chunks()
            rounds()
            return
        side.wait_stream(torch.cuda.current_stream())
        chunks()
        with torch.cuda.stream(side):
            rounds()
        torch.cuda.current_stream().wait_stream(side)
