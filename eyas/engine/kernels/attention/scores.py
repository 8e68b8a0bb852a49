"""A layer's rule for scores: how a query's product with a key is scaled and capped, and which keys it
sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from eyas.engine.checkpoint.config import AttentionSpec

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)


@dataclass(frozen=True)
class ScoreScaling:
    """`scale` times the product of query and key, bent by a tanh to stay below `soft_cap` (0: it is not).

    `window`: a query sees this many rows at the end of its path, its own included (0: all). `sinks` float32
    [heads]: a score of each head's that no key has (None: there are none). `chunk`: it sees no row before
    the last multiple of this (0: all).
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    chunk: int = 0

    @classmethod
    def of(cls, spec: AttentionSpec, sinks: torch.Tensor | None = None) -> Self:
        """The rule of a layer that attends as `spec` says."""
        return cls(spec.scale, spec.window, spec.soft_cap, sinks, spec.chunk)

    @property
    def factor(self) -> float:
        """The factor by which kernels multiply a product first."""
        return self.scale / self.soft_cap if self.soft_cap else self.scale * LOG2_E

    @property
    def ceiling(self) -> float:
        """The cap as a power of 2 (0: none), by which kernels multiply the tanh."""
        return self.soft_cap * LOG2_E


@triton.jit
def first_row(firsts, slot):
    """A slot's first row that other rows see; a query whose own row is before that sees itself alone."""
    first = 0
    if firsts is not None:
        first = tl.load(firsts + slot)
    return first


@triton.jit
def lowest_row(firsts, slot, start, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first row that the query at row `start` sees, and none after it sees an earlier one.

    firsts int32 [slots] or None: a slot's first row that anybody sees.
    """
    low = 0
    if WINDOW > 0:
        low = tl.maximum(start - WINDOW + 1, 0)
    if CHUNK > 0:
        low = tl.maximum(low, start // CHUNK * CHUNK)
    if firsts is not None:
        low = tl.maximum(low, tl.minimum(first_row(firsts, slot), start))
    return low


@triton.jit
def with_sink(total, peak, sinks, column):
    """The sum of a softmax's weights, to the base 2 above `peak`, with that of its head's sink.

    sinks float32 [heads] or None; column: each row's head.
    """
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + column) * _LOG2_E - peak)
    return total


@triton.jit
def tanh(x):
    """The hyperbolic tangent in plain operations, which the interpreter has as well."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
