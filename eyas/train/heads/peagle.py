"""The P-EAGLE head: an EAGLE-3 head of several layers whose later steps are fed with nothing of its own.

Instead of a token and of what the step before made they have a mask token's embedding, the target's, and
learnt streams, which pass `fc` (P-EAGLE, arXiv 2602.01469, section 3). So all steps are one pass when it is
served, and in training, where every pair is a first step and some, drawn anew, have deeper ones.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from eyas.engine.checkpoint.config import ModelConfig
from eyas.train.heads import eagle3
from eyas.train.heads.base import DraftHead, MaskedHead, TargetTensors, shape_for, share_in_block
from eyas.train.heads.eagle3 import Eagle3Head
from eyas.train.model import LlamaShape

LAYERS = 2
"""One pass has to do what a chain of one layer does in several."""
UNROLL = 6

taps = eagle3.taps


def head_for(target: ModelConfig, ends: TargetTensors, token_map: Tensor | None) -> PEagleHead:
    """A new head, whose output head and norm begin as the target's."""
    shape = dataclasses.replace(shape_for(target), layers=LAYERS)
    head = PEagleHead(shape, len(taps(target)), ends, token_map)
    head.begin_as(ends)
    return head


def described(head: DraftHead, unroll: int) -> dict[str, object]:
    """The fields of config.json beside the sizes."""
    drafts = {"parallel_drafting": True, "ptd_token_id": mask_token(head.shape), "num_depths": unroll}
    return eagle3.described(head, unroll) | drafts


def mask_token(shape: LlamaShape) -> int:
    """The last id: any will do, for the learnt streams beside its embedding say the rest."""
    return shape.vocab - 1


class PEagleHead(Eagle3Head, MaskedHead):
    """An EAGLE-3 head with learnt streams."""

    def __init__(
        self, shape: LlamaShape, streams: int, ends: TargetTensors, token_map: Tensor | None = None
    ) -> None:
        """`ends`: the target's, of which it uses the mask token's embedding."""
        super().__init__(shape, streams, token_map)
        self.mask_hidden = nn.Parameter(torch.randn(1, streams * shape.hidden))
        self.register_buffer("mask_embedding", ends.embedding[mask_token(shape)].clone(), persistent=False)

    def mask_state(self) -> Tensor:
        """The mask's state: `fc` of the learnt streams."""
        state: Tensor = self.fc(self.mask_hidden)
        return state

    def share(self, step: int, unroll: int) -> float:
        """The share of a step's loss, as in DFlash; in vllm-project/speculators all depths count alike."""
        return share_in_block(step, unroll)
