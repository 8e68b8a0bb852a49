"""What the heads of a layer with latent attention do with latents, for those that attend for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.engine.kernels.attention.scores import Scores
from eyas.engine.kernels.products.skinny import Rotation


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentHeads(Scores):
    """A layer's rule, its scale alone, for the rows of one forward.

    keys [heads, plain, latent] and values [heads, value, latent]: each head's factors. `rotation`: of the
    forward's rows.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rotation: Rotation

    def turned(self, own: slice) -> Rotation:
        """How some of the rows are rotated."""
        return Rotation(self.rotation.cos, self.rotation.sin, self.rotation.positions[own])
