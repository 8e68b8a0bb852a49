"""A selective state space model (Mamba, arXiv 2312.00752): what a row does to its state follows from what the
convolution gives of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eyas.engine.states.delta import DeltaRows, DeltaRule, DeltaState, MovingRows


class Selected(NamedTuple):
    """What a selective rule reads of n rows: the steps of all columns [n, columns], keys and queries [n, key
    size]; float32.
    """

    steps: torch.Tensor
    keys: torch.Tensor
    queries: torch.Tensor


def nothing(made: torch.Tensor) -> Selected:
    """Raises TypeError: of a rule that is used without what selects."""
    raise TypeError("a selective rule needs what selects")


@dataclass(frozen=True)
class SelectiveRule(DeltaRule):
    """The rule of a layer of a `SelectiveShape`. `rates` float32 [key size, columns]: a step times one is the
    logarithm of a decay. `select`: of what the convolution gives [n, columns]; the bits of a row are its own.
    """

    rates: torch.Tensor | None = None
    select: Callable[[torch.Tensor], Selected] = nothing

    def _moving(self, start: DeltaState, rows: DeltaRows, parents: Sequence[int]) -> MovingRows:
        values = self._activated(start, rows, parents)
        steps, keys, queries = (part[:, None] for part in self.select(values))
        return MovingRows(queries[..., None], keys[..., None], values[:, None], steps, steps)

    def _left(self, decay: torch.Tensor) -> torch.Tensor:
        assert self.rates is not None
        return (decay[..., None, :] * self.rates).exp_()
