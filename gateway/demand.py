"""What requests were like lately: the mix that preferences are chosen for.

It knows sums and how they fade. It knows no worker, and times only as it is told them.
"""

from __future__ import annotations

from gateway.capacity import Mix

FADE = 0.98
"""What is left of a request's weight after the next one: about the last hundred count."""

CHANGE = 0.1
"""A mix within this part of the one told last is told as that one: what follows from it need not change."""

ENOUGH = 20
"""Requests, and answers, before there is a mix."""

COUNTING_S = 1.0
"""Requests are counted over this time to see how evenly they come."""

KEPT = 0.98
"""What is left of a count's weight after the next one."""


class DemandMeter:
    """Fading means over requests and over answers."""

    def __init__(self, since_s: float = 0.0) -> None:
        """`since_s`: when the first requests may come, on the clock of `asked`."""
        self._count = self._answers = 0
        self._weight = self._prompt = self._missing = self._square = 0.0
        self._answered = self._output = 0.0
        self._told: Mix | None = None
        self._since_s, self._now, self._before = since_s, 0, 0
        self._counts = self._sum = self._squares = 0.0

    def asked(self, at_s: float, prompt: int, missing: int) -> None:
        """Counts a request that came at `at_s`, of whose prompt `missing` tokens are to be computed."""
        self._count += 1
        self._weight = FADE * self._weight + 1.0
        self._prompt = FADE * self._prompt + prompt
        self._missing = FADE * self._missing + missing
        self._square = FADE * self._square + missing**2
        while at_s >= self._since_s + COUNTING_S:
            self._end_count()
        self._now += 1

    def answered(self, output: int) -> None:
        """Counts an answer that took `output` steps."""
        self._answers += 1
        self._answered = FADE * self._answered + 1.0
        self._output = FADE * self._output + output

    def _end_count(self) -> None:
        self._since_s += COUNTING_S
        self._counts = KEPT * self._counts + 1.0
        self._sum = KEPT * self._sum + self._now
        self._squares = KEPT * self._squares + (self._now - self._before) ** 2 / 2
        self._now, self._before = 0, self._now

    def _burst(self) -> float:
        """Variance over mean of the counts; 1.0 while there are too few of them.

        From differences of neighbours, so that a rate that changes is not taken for bursts.
        """
        if self._counts < ENOUGH / 2 or not self._sum:
            return 1.0
        return max(self._squares / self._sum, 1.0)

    def mix(self) -> Mix | None:
        """The mix; None while there were too few requests."""
        if min(self._count, self._answers) < ENOUGH:
            return None
        missing = max(self._missing / self._weight, 1.0)
        spread = max(self._square / self._weight / missing**2, 1.0)
        output = self._output / self._answered
        new = Mix(self._prompt / self._weight, missing, output, spread, self._burst())
        if self._told is None or _differ(new, self._told):
            self._told = new
        return self._told


def _differ(new: Mix, old: Mix) -> bool:
    pairs = [(new.prompt, old.prompt), (new.missing, old.missing), (new.output, old.output)]
    return any(abs(one - other) > CHANGE * other for one, other in pairs) or not (
        0.5 < new.burst / old.burst < 2.0
    )
