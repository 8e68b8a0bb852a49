"""The last features of a sequence: what a drafter far away is opened with when it has nothing else."""

from __future__ import annotations

import torch

ROWS = 128


class FeatureWindow:
    """Features of the rows base .. base + len(rows) - 1, the newest `ROWS` of them at most."""

    def __init__(self) -> None:
        self.base = 0
        self.rows: torch.Tensor | None = None  # [<= ROWS, head width]

    def add(self, base: int, features: torch.Tensor) -> None:
        """Features of rows base, base + 1, ...; older ones are kept if these continue them."""
        if self.rows is not None and base == self.base + len(self.rows):
            features, base = torch.cat((self.rows, features)), self.base
        dropped = max(0, len(features) - ROWS)
        self.base, self.rows = base + dropped, features[dropped:]
