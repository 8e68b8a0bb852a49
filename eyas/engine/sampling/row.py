"""The one noun of sampling: everything about a distribution that is not its logits. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.common.params import SamplingParams


@dataclass(frozen=True)
class Row:
    """One distribution to sample from: a plain row, a prompt's last row, or one node of a verify tree.

    `position` is the absolute index of the token being sampled. `ancestors` are the draft tokens between
    the output and this node, root left out. `banned` ids must not be chosen here, nor what would complete one
    of the parameters' bad words. Rows of one tree should share their `prompt` and `output` objects: history
    is counted once for each pair.
    """

    params: SamplingParams
    choice: int
    position: int
    prompt: Sequence[int]
    output: Sequence[int]
    ancestors: Sequence[int]
    banned: Sequence[int] = ()
