"""Features of each slot's newest drafts, kept on a draft worker's device.

A run ahead of a verdict has those rows once more, among others.
"""

from __future__ import annotations

import torch


class ChainFeatures:
    """`features` [slots, 1 + outcomes * steps, width]: the feature of each slot's newest certain row, then
    those of `outcomes` chains of `steps` drafts, one after the other. A proposal is the first of these.
    """

    def __init__(self, slots: int, outcomes: int, steps: int, like: torch.Tensor) -> None:
        """`like` [..., width]: of the features' width and dtype, on their device."""
        self.outcomes, self.steps = outcomes, steps
        self.features = like.new_zeros(slots, 1 + outcomes * steps, like.shape[-1])

    @property
    def flat(self) -> torch.Tensor:
        """[places, width]."""
        return self.features.flatten(0, 1)

    def newest(self, slot: int) -> int:
        """The place of the newest certain row's feature."""
        return slot * self.features.shape[1]

    def places(self, slot: int, outcome: int, count: int) -> range:
        """The places of a chain's first `count` features."""
        first = self.newest(slot) + 1 + outcome * self.steps
        return range(first, first + count)

    def keep_newest(self, slots: torch.Tensor, features: torch.Tensor) -> None:
        """features [B, width] of the certain rows below which drafts are proposed. slots int64 [B]."""
        self.features[:, 0].index_copy_(0, slots, features)

    def keep_draft(self, slots: torch.Tensor, step: int, features: torch.Tensor) -> None:
        """features [B, width] that the rows of drafts number `step` of proposals join. slots int64 [B]."""
        self.features[:, 1 + step].index_copy_(0, slots, features)

    def keep_level(self, slots: torch.Tensor, step: int, features: torch.Tensor) -> None:
        """The same of all outcomes, features [B * outcomes, width]."""
        chains = self.features[:, 1:].unflatten(1, (self.outcomes, self.steps))
        chains[:, :, step].index_copy_(0, slots, features.view(len(slots), self.outcomes, -1))
