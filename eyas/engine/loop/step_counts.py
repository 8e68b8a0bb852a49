"""Counts the steps of a loop: how long each took, and how many sequences it had."""

from __future__ import annotations

from dataclasses import dataclass, field

from eyas.common.histogram import STEP_SECONDS, STEP_SEQUENCES, Histogram


@dataclass(frozen=True)
class StepCounts:
    """Two histograms over all steps: `seconds` from launch to landing, and `sequences` per step."""

    seconds: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    sequences: Histogram = field(default_factory=lambda: Histogram(STEP_SEQUENCES))

    def landed(self, sequences: int, seconds: float) -> None:
        """A step has landed, `seconds` after its launch."""
        self.seconds.add(seconds)
        self.sequences.add(sequences)
