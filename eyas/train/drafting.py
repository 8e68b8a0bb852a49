"""The drafts of a head along the texts of a batch, and the loss that it learns by, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from eyas.train.heads.base import BlockHead, ChainHead, DraftHead, MaskedHead
from eyas.train.one_pass import block_step, drafted_below, masked_step
from eyas.train.unroll import UnrollBatch, unrolled, unrolled_step

Step = Callable[..., Any]
"""The part of a head's step that is worth compiling."""


def step_for(head: DraftHead) -> Step:
    """A chain's is one draft; that of a head of one pass is the pass."""
    if isinstance(head, MaskedHead):
        return masked_step
    return block_step if isinstance(head, BlockHead) else unrolled_step


def drafted(
    head: DraftHead, course: UnrollBatch, unroll: int, step_of: Step | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """(states [B, rows, hidden], mean loss) of each of `unroll` drafts. `step_of`: `step_for(head)`, perhaps
    compiled.
    """
    step_of = step_of or step_for(head)
    if isinstance(head, BlockHead | MaskedHead):
        return drafted_below(head, course, unroll, step_of)
    assert isinstance(head, ChainHead)
    return unrolled(head, course, unroll, step_of)


def drafting_loss(head: DraftHead, course: UnrollBatch, unroll: int, step_of: Step | None = None) -> Tensor:
    """The losses of the steps, each as much as the head says, summed."""
    total = torch.zeros((), device=course.features.device)
    for step, (_, loss) in enumerate(drafted(head, course, unroll, step_of)):
        total = total + head.share(step, unroll) * loss
    return total
