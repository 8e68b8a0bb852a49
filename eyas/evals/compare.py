"""Two sides that were asked the same questions: which is right where the other is not, and by chance or not.

Differences are judged by McNemar's exact test.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from eyas.evals.scores import JudgedOutcome


@dataclass(frozen=True)
class PairedComparison:
    """The counts of the questions that both sides answered."""

    compared: int
    identical: int
    """Answers with the same text."""
    only_first_right: int
    only_second_right: int

    @property
    def p_value(self) -> float:
        """The chance of a difference at least this large, if both sides were equally good."""
        return mcnemar(self.only_first_right, self.only_second_right)

    def figures(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        return {**asdict(self), "p_value": self.p_value}


def compare(first: JudgedOutcome, second: JudgedOutcome) -> PairedComparison:
    """Compares two sides, question by question."""
    mine, other = first.outcome.answers, second.outcome.answers
    both = [index for index in range(len(mine)) if not mine[index].error and not other[index].error]
    return PairedComparison(
        compared=len(both),
        identical=sum(mine[index].text == other[index].text for index in both),
        only_first_right=sum(first.right[index] is True and not second.right[index] for index in both),
        only_second_right=sum(second.right[index] is True and not first.right[index] for index in both),
    )


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided p-value of McNemar's exact test, from the questions that one side alone has right."""
    differ = only_first + only_second
    tail = sum(math.comb(differ, k) for k in range(min(only_first, only_second) + 1))
    return float(min(1.0, 2 * tail / 2**differ))
