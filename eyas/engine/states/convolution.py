"""A convolution without a state behind it: what a row reads are the inputs of the rows just before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.engine.states.delta import DeltaRows, DeltaRule, DeltaState


class ShortConvolution(DeltaRule):
    """The rule of a layer of a `ConvolutionShape`."""

    def walk(
        self,
        start: DeltaState,
        rows: DeltaRows,
        parents: Sequence[int],
        at: Sequence[int],
        behind: Sequence[int] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """See `DeltaRule.walk`: what rows `at` these numbers read, [n, 1, columns], and empty states."""
        made = self._convolved(start, rows, parents)[list(at), None]
        return made, [made.new_empty(self.shape.state) for _ in behind]
