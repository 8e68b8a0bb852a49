"""The tensors of a folder that are written anew: matrices of fewer bits, and others as they were."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from eyas.quantize.formats import WrittenFormat

_LEFT_OUT = re.compile(
    r"lm_head|head|.*embed.*|wte|wpe|.*norm.*|gate|shared_expert_gate|router|visual|vision.*|.*projector"
)
"""The parts of names, between dots, of modules that stay as they are."""


@dataclass
class Written:
    """The work done: where each tensor is, its bytes before and after, and the matrices of either kind.
    `stacked`: tensors of many matrices, which stay as they are.
    """

    files: dict[str, str] = field(default_factory=dict)
    before: int = 0
    after: int = 0
    quantized: int = 0
    left_out: list[str] = field(default_factory=list)
    stacked: int = 0

    def add(self, file: str, name: str, tensor: torch.Tensor) -> None:
        """A tensor that is in that file."""
        self.files[name] = file
        self.after += tensor.nbytes


def is_left_out(module: str) -> bool:
    """True for the modules that stay as they are in every format."""
    return any(map(_LEFT_OUT.fullmatch, module.split(".")))


def stays(module: str, shape: Sequence[int], form: WrittenFormat) -> bool:
    """True for a module whose matrix [n, k] stays as it is: no format has it, or not this one."""
    n, k = shape
    return is_left_out(module) or not form.holds(n, k)
