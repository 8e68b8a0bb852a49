"""Scores of groups of questions, and how they are printed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.table import Table

ENDED_BAR = 0.99  # where a group has a bar: the share of answers that must end their turn by themselves


def unbroken(answer: str) -> bool:
    """True if the answer holds no replacement character, the trace of a broken UTF-8 sequence."""
    return "\ufffd" not in answer


@dataclass
class GroupScore:
    """The counts of one group of questions. `bar`: the share that must be right, if one is demanded."""

    name: str
    bar: float | None = None
    questions: int = 0
    right: int = 0
    ended: int = 0
    unbroken: int = 0

    def add(self, right: bool, ended: bool, unbroken: bool) -> None:
        """Count one answer."""
        self.questions += 1
        self.right += right
        self.ended += ended
        self.unbroken += unbroken

    @property
    def share(self) -> float:
        """The share of right answers."""
        return self.right / max(1, self.questions)

    @property
    def error(self) -> float:
        """The standard error of the share, from the sample's own variance; 0 for fewer than two answers."""
        return math.sqrt(self.share * (1 - self.share) / max(1, self.questions - 1))

    @property
    def passed(self) -> bool:
        """True if the bar, if any, is met, the turns ended, and no character was broken."""
        if self.bar is None:
            return True
        ends = self.ended >= ENDED_BAR * self.questions
        return self.share >= self.bar and ends and self.unbroken == self.questions


def score_table(scores: list[GroupScore], title: str) -> Table:
    """A table with one line per score."""
    table = Table("", "answered", "right", "± error", "bar", "ended", "whole", "", title=title)
    for score in scores:
        bar, verdict = "", ""
        if score.bar is not None:
            bar, verdict = f"{score.bar:.0%}", "pass" if score.passed else "MISS"
        table.add_row(
            score.name,
            str(score.questions),
            f"{score.share:.1%}",
            f"{score.error:.1%}",
            bar,
            f"{score.ended / max(1, score.questions):.1%}",
            f"{score.unbroken / max(1, score.questions):.1%}",
            verdict,
        )
    return table
