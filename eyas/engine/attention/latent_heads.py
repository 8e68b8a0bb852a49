"""The heads of a layer with latent attention, as attention backends see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.products.skinny import RotaryInput


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentHeads(ScoreScaling):
    """A layer's rule, its scale alone, for the rows of one forward.

    keys [heads, plain, latent] and values [heads, value, latent]: each head's factors. `rotation`: of the
    forward's rows.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rotation: RotaryInput

    def turned(self, own: slice) -> RotaryInput:
        """The rotary angles of some of the rows."""
        return RotaryInput(self.rotation.cos, self.rotation.sin, self.rotation.positions[own])
