"""Scores of question sets and how they are printed.

It knows counting and tables; it refuses to know questions.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

ENDED_BAR = 0.99  # the share of answers that must end their turn by themselves


@dataclass
class Score:
    """The counts of one question set."""

    name: str
    bar: float
    asked: int = 0
    right: int = 0
    ended: int = 0
    unbroken: int = 0

    def add(self, right: bool, ended: bool, unbroken: bool) -> None:
        """Count one answer."""
        self.asked += 1
        self.right += right
        self.ended += ended
        self.unbroken += unbroken

    @property
    def share(self) -> float:
        """The share of right answers."""
        return self.right / max(1, self.asked)

    @property
    def passed(self) -> bool:
        """Whether the bar is met, the turns ended, and no character was broken."""
        ends = self.ended >= ENDED_BAR * self.asked
        return self.share >= self.bar and ends and self.unbroken == self.asked


def score_table(scores: list[Score]) -> Table:
    """A table with one line per set."""
    table = Table("set", "asked", "right", "bar", "ended", "whole", "", title="held-out questions")
    for score in scores:
        table.add_row(
            score.name,
            str(score.asked),
            f"{score.share:.1%}",
            f"{score.bar:.0%}",
            f"{score.ended / max(1, score.asked):.1%}",
            f"{score.unbroken / max(1, score.asked):.1%}",
            "pass" if score.passed else "MISS",
        )
    return table
