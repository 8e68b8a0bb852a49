"""Rotary position embedding in the half-rotation layout: element i is paired with element i + dim / 2.

A head of which a part is rotated has its elements in another order than they are stored in, in queries and
keys alike: rotated pairs stand half a head apart, as those do that are turned by no angle.
Angles come from float32 tables; it knows positions, not where rows lie in the pool.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import Temper
from eyas.engine.checkpoint.rope import RopeConfig

BEYOND = 256
"""Positions past the end of the context. A step may compute drafts there, and discards them."""

SPAN = 65536
"""Positions by which tables grow."""

Angles = tuple[torch.Tensor, torch.Tensor]


class Rotary:
    """Rotates heads of width `head_dim` at positions below `length` (and those of drafts just beyond).

    Its tables grow by spans of positions as these are met: contexts may be far longer than prompts ever are.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, length: int, device: str = "cpu") -> None:
        self._rope, self._dim, self._length, self._device = rope, head_dim, length, device
        self._cos = self._sin = torch.empty(0, head_dim, device=device)
        self._grow()

    @property
    def rows(self) -> int:
        """Positions that the tables have."""
        return self._cos.shape[0]

    def _grow(self) -> None:
        """Adds a span, whose numbers do not depend on those before it."""
        end = min(self.rows + SPAN, self._length + BEYOND)
        cos, sin = tables(self._rope, self._dim, self._length, range(self.rows, end))
        self._cos = torch.cat((self._cos, cos.repeat(1, 2).to(self._device)))
        # The sign of the rotated half is folded in, so that applying takes one roll and no concatenation.
        self._sin = torch.cat((self._sin, torch.cat((-sin, sin), dim=1).to(self._device)))

    def angles(self, positions: torch.Tensor) -> Angles:
        """cos and signed sin for positions int64 [R], each [R, 1, head_dim]; once per forward."""
        last = int(positions.amax()) if positions.numel() else 0
        while self.rows <= last < self._length + BEYOND:
            self._grow()
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]

    @staticmethod
    def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """x [R, heads, head_dim] rotated in float32, as a new contiguous tensor of x's precision."""
        cos, sin = angles
        wide = x.float()
        return torch.roll(wide, x.shape[-1] // 2, -1).mul_(sin).add_(wide * cos).to(x.dtype)


def tables(rope: RopeConfig, head_dim: int, length: int, positions: range | None = None) -> Angles:
    """cos and sin of every position below `length` and of those of drafts just beyond, or of `positions`
    alone, [.., head_dim / 2].

    `length`: of the context that is served. Both are multiplied by the attention factor; 1 and 0 where a head
    is left as it is.
    """
    span = range(length + BEYOND) if positions is None else positions
    places = torch.arange(span.start, span.stop, dtype=torch.float32)
    frequencies = _frequencies(rope, rope.rotated(head_dim), length)
    if not bool((frequencies.isfinite() & (frequencies >= 0)).all()):
        raise ConfigError(f"config.json: {rope} turns a head of {head_dim} by no finite angles")
    angles = torch.outer(places, frequencies)
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    if idle := head_dim // 2 - frequencies.shape[0]:
        cos, sin = F.pad(cos, (0, idle), value=1.0), F.pad(sin, (0, idle))
    return cos, sin


def head_order(rope: RopeConfig, head_dim: int, adjacent: bool = False) -> torch.Tensor:
    """Where each element of a head of queries or keys is stored, int64 [head_dim]. `adjacent`: stored pairs
    are neighbours.
    """
    rotated = rope.rotated(head_dim)
    turned, still = torch.arange(rotated), torch.arange(rotated, head_dim)
    pairs = turned.view(-1, 2).t() if adjacent else turned.view(2, -1)
    return torch.cat((pairs, still.view(2, -1)), 1).flatten()


def temperatures(temper: Temper, length: int) -> torch.Tensor:
    """The factor of queries at every position below `length` and at those of drafts just beyond, float32."""
    spans = (torch.arange(length + BEYOND, dtype=torch.float64) + temper.first).div(temper.span).floor_()
    return spans.add_(1.0).log_().mul_(temper.scale).add_(1.0).float()


def _frequencies(rope: RopeConfig, head_dim: int, length: int) -> torch.Tensor:
    """Radians per position of each pair, float32 [head_dim / 2]."""
    theta = rope.theta
    if rope.kind == "none":
        return torch.zeros(head_dim // 2)
    if rope.kind == "dynamic":
        stretch = rope.factor * max(length, rope.original_context) / rope.original_context - (rope.factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / theta**exponents
    if rope.kind == "proportional":
        plain[int(rope.share * head_dim // 2) :] = 0.0
        return plain / rope.factor
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "longrope":
        factors = rope.long_factors if length > rope.original_context else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Slow pairs are stretched by `factor`, fast ones left alone, and those between blended by wavelength."""
    turns = rope.original_context * plain / (2 * math.pi)  # full turns within the original context
    width = max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)  # equal ones are a step
    fast = ((turns - rope.low_freq_factor) / width).clamp(0.0, 1.0)
    return (1 - fast) * plain / rope.factor + fast * plain


def _yarn(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Frequencies as of llama3, blended by the pair's number: from the one of beta_fast turns to the one of
    beta_slow."""
    head_dim = 2 * plain.shape[0]

    def pair_of(turns: float) -> float:
        """The number, not a whole one, of the pair that turns so often within the original context."""
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = torch.arange(plain.shape[0], dtype=torch.float32).sub(low).div(max(high - low, 0.001))
    stretched = ramp.clamp(0.0, 1.0)
    return stretched * plain / rope.factor + (1 - stretched) * plain
