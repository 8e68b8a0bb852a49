"""A row to sample: everything about its distribution besides the logits. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.common.params import SamplingParams


@dataclass(frozen=True)
class SampledRow:
    """One distribution to sample from: a plain row, a prompt's last row, or one node of a verify tree.

    `position` is the absolute index of the token being sampled. `ancestors` are the draft tokens between
    the output and this node, without the root. `banned` ids must not be chosen here, and neither must an id
    that completes one of the parameters' bad words, nor one that is not `allowed`. Rows of one tree should
    share their `prompt` and `output` objects, because history is counted once per pair of objects.
    """

    params: SamplingParams
    choice: int
    position: int
    prompt: Sequence[int]
    output: Sequence[int]
    ancestors: Sequence[int]
    banned: Sequence[int] = ()
    allowed: np.ndarray | None = None  # bits, as `eyas.engine.grammar` has them; None: all
