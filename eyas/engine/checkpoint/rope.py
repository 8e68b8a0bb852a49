"""Rotary embedding as numbers: what a config.json says of it, and which of those numbers make no angles.

Without torch: `eyas.engine.layers.rotary` computes the angles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

DEFAULT_ROPE_THETA = 10000.0

MOST_CONTEXT = 2**24
"""Tokens: angles are made of positions in float32, which tells no more of them apart."""

MOST_STRETCH, MOST_THETA = 1e6, 1e15

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "none"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of a head, as transformers computes it for these kinds.

    `share`: how much of a head is rotated, its first elements; the others are left as they are.
    linear: all frequencies are divided by `factor`. llama3: slow pairs are stretched by `factor`, fast ones
    kept, those between blended (`low_freq_factor`, `high_freq_factor`). yarn: the same by another ramp
    (`beta_fast`, `beta_slow`; `truncate`: its ends are whole pairs), and cos and sin are multiplied by
    `attention_factor`. dynamic: theta grows with the length L of the context that is served, by
    (factor * L / original_context - factor + 1) ** (dim / (dim - 2)) where L is above `original_context`. It
    is the same for all requests, so a key never depends on when it was computed; transformers takes the
    length of the sequence at hand, which gives the same for one that fills the context. longrope: each
    frequency is divided by its own number of `long_factors` where L is above `original_context`, else of
    `short_factors`; there too transformers takes the sequence at hand. proportional: all elements of a head
    are paired, and the first pairs, by `share`, turn as those of a whole head do, `factor` times as slowly;
    the others do not. none: nothing is rotated (arXiv 2305.19466).
    """

    theta: float = DEFAULT_ROPE_THETA
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    share: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def rotated(self, head_dim: int) -> int:
        """The number of rotated elements of a head."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.share)

    @property
    def follows_length(self) -> bool:
        """True if its angles depend on the length of the context that is served."""
        return self.kind in ("dynamic", "longrope")

    def complaints(self) -> Iterator[str]:
        """Finds parameters that are impossible or give angles that are not finite; a sentence for each."""
        if not 0 < self.theta < math.inf:
            yield f"rope_theta {self.theta} is not a positive number"
        elif not 1 < self.theta <= MOST_THETA:
            yield f"rope_theta {self.theta} is not above 1 and at most {MOST_THETA:g}"
        ranges = {
            "factor": (self.factor, 1 / MOST_STRETCH, MOST_STRETCH),
            "low_freq_factor": (self.low_freq_factor, 1 / MOST_STRETCH, MOST_STRETCH),
            "high_freq_factor": (self.high_freq_factor, 1 / MOST_STRETCH, MOST_STRETCH),
            "beta_fast": (self.beta_fast, 1 / MOST_STRETCH, MOST_STRETCH),
            "beta_slow": (self.beta_slow, 1 / MOST_STRETCH, MOST_STRETCH),
            "attention_factor (or mscale)": (self.attention_factor, 1e-3, 1e3),
        }
        factors = (*self.short_factors, *self.long_factors)
        for i, each in enumerate(factors):
            ranges[f"number {i} of short_factor and long_factor"] = (each, 1 / MOST_STRETCH, MOST_STRETCH)
        for name, (value, least, most) in ranges.items():
            if not least <= value <= most:  # nor is NaN
                yield f"{name} {value} of the {self.kind} RoPE is not a number from {least:g} to {most:g}"
        if not 0 < self.share <= 1:
            yield f"partial_rotary_factor {self.share} is not above 0 and at most 1"
        if self.kind == "llama3" and self.low_freq_factor > self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            yield f"low_freq_factor {low} is above high_freq_factor {high}"
        if self.kind == "yarn" and self.beta_slow > self.beta_fast:
            yield f"beta_slow {self.beta_slow} is above beta_fast {self.beta_fast}"


NO_ROPE = RopeConfig(kind="none")
"""Of a layer that does not know where rows stand, but for their order."""
