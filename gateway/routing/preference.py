"""Chooses the workers that prefer prompts under `--layout auto`: a pure function of the load.

The number of workers for prompts is the one that bears the highest rate of the requests that come now. It
changes only for a clear gain, and a change acts at the next admission: no running request notices. Its caller
decides how often it is asked.

The load is the mix of recent requests, sums that fade, and the pace of steps over what was measured at the
start. A table of step times is never right everywhere: it may hold for small batches and not for large ones.
So what is seen while k workers prefer prompts is believed of k, and of the numbers of which nothing is known
yet. The estimate that follows is not right everywhere either: among numbers for which it is nearly alike,
whether requests keep their targets decides.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

from eyas.common.step_times import StepPace, alike
from gateway.routing.capacity import TAIL, RequestMix, capacity
from gateway.routing.placement import AdmissionPreference, MeasuredRates, WorkerPlace

GAIN = 1.05
"""The number changes for at least this factor of capacity: preferences do not flap between equals. While too
many requests miss their targets it changes for any gain.
"""
FADE = 0.98
"""The part of a value's weight that is left after the next one: about the last hundred count."""

OTHER = 1.8
"""If the mean of the last ENOUGH values is this many times that of all, or the inverse, they alone count."""

CHANGE = 0.1
"""A mix that differs from the last reported one by less than this part is reported as that one."""

ENOUGH = 20
"""Requests, or answers, that say whether the load has become another."""

FIRST = 6
"""Requests, and answers, before there is a mix: until then prompts go beside streams, whatever that costs."""

COUNTING_S = 1.0
"""Requests are counted over this time to see how evenly they come."""

DECAY = 0.96
"""The part of a count's weight that is left after the next one: about the last 25 count."""

LATELY_S = 40.0
"""After this time, whether a request kept its targets has lost all but 1/e of its weight."""

WRONG = 1.05
"""Where too many requests miss their targets, the estimate for that number of workers is divided by this. So
another number is tried whose estimate is nearly as high. Missed targets say no more than that.
"""

CLEARLY = 2.0
"""Requests do so clearly if more miss than may, by this many standard deviations of chance."""

SETTLED_S = 20.0
"""Seconds after a change until missed targets are looked at. Requests that miss them come in bunches, so a
shorter time says nothing.
"""

BELIEVED_S = 300.0
"""Seconds for which a number whose estimate was too high is not tried again."""

COUNTS = 12.0
"""Counts of one kind of load before it is said to come unevenly."""


def estimates(mix: RequestMix, workers: int, rates: MeasuredRates, paces: PaceMemory) -> list[float]:
    """The requests per second that the workers bear if 0, 1, 2 ... of them prefer prompts."""
    bears = []
    for prefilling in range(workers):
        times = dataclasses.replace(rates.times, pace=paces.at(prefilling))
        bears.append(capacity(mix, workers, prefilling, dataclasses.replace(rates, times=times)))
    return bears


def best_split(bears: Sequence[float], now: int, gain: float = GAIN) -> int:
    """How many of the workers should prefer prompts; 0: none does, and all do both. `bears`: requests per
    second by that number. `now`: how many do.
    """
    now = min(now, len(bears) - 1)
    best = max(range(len(bears)), key=bears.__getitem__)
    return best if bears[best] > gain * bears[now] else now


def preferring(places: Sequence[WorkerPlace]) -> int:
    """How many workers prefer prompts."""
    return sum(p.preference is AdmissionPreference.PREFILL for p in places)


def prefer(places: Sequence[WorkerPlace], prefilling: int) -> dict[str, AdmissionPreference]:
    """The preference of each worker, by name, if `prefilling` of them are to prefer prompts.

    Those that prefer prompts now keep doing so; then come those with the fewest sequences to finish. At least
    one worker that can decode goes on decoding.
    """
    if not prefilling:
        return {p.worker: AdmissionPreference.ANY for p in places}
    order = sorted(
        places,
        key=lambda p: (p.preference is not AdmissionPreference.PREFILL, p.sequences, -p.queued, p.worker),
    )
    chosen = {p.worker for p in order[: min(prefilling, len(order) - 1)]}
    return {
        p.worker: AdmissionPreference.PREFILL if p.worker in chosen else AdmissionPreference.DECODE
        for p in places
    }


class FadingMean:
    """The mean of the values of late, and of their squares."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[float] = deque(maxlen=ENOUGH)
        self._weight = self._sum = self._squares = 0.0

    def add(self, value: float) -> bool:
        """Whether values have become others, so that those before the last ENOUGH are forgotten."""
        self.count += 1
        self._recent.append(value)
        self._take(value)
        lately = sum(self._recent) / len(self._recent)
        if self.count < ENOUGH or self.mean / OTHER <= lately <= self.mean * OTHER:
            return False
        self._weight = self._sum = self._squares = 0.0
        for recent in self._recent:
            self._take(recent)
        return True

    def _take(self, value: float) -> None:
        self._weight = FADE * self._weight + 1.0
        self._sum = FADE * self._sum + value
        self._squares = FADE * self._squares + value**2

    @property
    def mean(self) -> float:
        """The mean of the values, of which there must be one."""
        return self._sum / self._weight

    @property
    def spread(self) -> float:
        """The mean square over the square of the mean; 1.0: all alike."""
        return max(self._squares / self._weight / max(self.mean, 1.0) ** 2, 1.0)


class ArrivalDispersion:
    """How evenly requests come: the variance of their number per second over its mean; 1.0: as Poisson's do.

    From neighbouring seconds, each pair with the same weight: (a - b)^2 / (a + b) has the mean 1 for Poisson
    requests at every rate, so that a rate that changes is not taken for bursts, and a load is soon forgotten.
    """

    def __init__(self, since_s: float) -> None:
        self._since_s, self._now, self._before = since_s, 0, 0
        self._weight = self._sum = 0.0

    def came(self, at_s: float) -> None:
        """Counts a request."""
        while at_s >= self._since_s + COUNTING_S:
            self._end_count()
        self._now += 1

    def forget(self) -> None:
        """Forgets the load before."""
        self._weight = self._sum = 0.0

    @property
    def burst(self) -> float:
        """1.0 while there are too few counts."""
        return max(self._sum / self._weight, 1.0) if self._weight >= COUNTS * DECAY**COUNTS else 1.0

    def _end_count(self) -> None:
        self._since_s += COUNTING_S
        if both := self._now + self._before:
            self._weight = DECAY * self._weight + 1.0
            self._sum = DECAY * self._sum + (self._now - self._before) ** 2 / both
        self._now, self._before = 0, self._now


class TargetMemory:
    """Whether requests keep their targets, and what that says of estimates, by the number of workers that
    prefer prompts. Times are seconds of one clock.
    """

    def __init__(self, since_s: float) -> None:
        self._at_s = self._since_s = since_s
        self._prefilling = 0
        self._ended = self._met = 0.0  # requests, fading
        self._wrong: dict[int, float] = {}  # numbers whose estimate is too high, and when that was seen

    def ended(self, at_s: float, began_s: float, met: bool) -> None:
        """Counts an answer. One that began under another number of workers says nothing of this one."""
        if began_s >= self._since_s:
            self._fade(at_s)
            self._ended += 1
            self._met += met

    def forget(self) -> None:
        """Forgets the load before."""
        self._wrong.clear()
        self._ended = self._met = 0.0

    @property
    def missed(self) -> bool:
        """Whether more requests miss their targets than may, and than chance makes of that."""
        return self._missed_by(1.0)

    def _missed_by(self, deviations: float) -> bool:
        if self._ended < ENOUGH or self._at_s - self._since_s < SETTLED_S:
            return False
        chance = math.sqrt(TAIL * (1 - TAIL) * self._ended)
        return self._met + deviations * chance < (1 - TAIL) * self._ended

    def corrected(self, at_s: float, bears: Sequence[float], now: int) -> list[float]:
        """The estimates; those that were too high are less. `now`: how many workers prefer prompts."""
        self._fade(at_s)
        if now != self._prefilling:
            self._prefilling, self._since_s = now, at_s
            self._ended = self._met = 0.0
        self._wrong = {k: seen_s for k, seen_s in self._wrong.items() if at_s - seen_s < BELIEVED_S}
        if self._missed_by(CLEARLY):
            self._wrong[now] = at_s
        elif at_s - self._since_s >= SETTLED_S:
            self._wrong.pop(now, None)
        return [bear / (WRONG if k in self._wrong else 1.0) for k, bear in enumerate(bears)]

    def _fade(self, at_s: float) -> None:
        passed = max(at_s - self._at_s, 0.0)
        decay = math.exp(-passed / LATELY_S)
        self._at_s += passed
        self._ended, self._met = decay * self._ended, decay * self._met


class DemandMeter:
    """Told of every request and every answer."""

    def __init__(self, since_s: float = 0.0) -> None:
        """`since_s`: when the first requests may come, on the clock of `add_request`."""
        self._prompt, self._missing, self._output = FadingMean(), FadingMean(), FadingMean()
        self._evenness = ArrivalDispersion(since_s)
        self.targets = TargetMemory(since_s)
        self._reported: RequestMix | None = None

    def add_request(self, at_s: float, prompt: int, missing: int) -> None:
        """Counts a request that came at `at_s`, of whose prompt `missing` tokens are to be computed."""
        self._evenness.came(at_s)
        others = self._prompt.add(prompt), self._missing.add(missing)
        if any(others):
            self._evenness.forget()
            self.targets.forget()

    def best_split(self, at_s: float, bears: Sequence[float], now: int) -> int:
        """How many workers should prefer prompts, by estimates and by what is seen; `now`: how many do."""
        corrected = self.targets.corrected(at_s, bears, now)
        return best_split(corrected, now, 1.0 if self.targets.missed else GAIN)

    def answered(self, output: int) -> None:
        """Counts an answer that took `output` steps."""
        self._output.add(output)

    def mix(self) -> RequestMix | None:
        """The mix; None while there were too few requests."""
        if min(self._prompt.count, self._output.count) < FIRST:
            return None
        missing = max(self._missing.mean, 1.0)
        new = RequestMix(
            self._prompt.mean, missing, self._output.mean, self._missing.spread, self._evenness.burst
        )
        if self._reported is None or _differ(new, self._reported):
            self._reported = new
        return self._reported


def _differ(new: RequestMix, old: RequestMix) -> bool:
    pairs = [(new.prompt, old.prompt), (new.missing, old.missing), (new.output, old.output)]
    return any(abs(one - other) > CHANGE * other for one, other in pairs) or not (
        0.5 < new.burst / old.burst < 2.0
    )


class PaceMemory:
    """Keeps the last pace of each number: after a change that was wrong, what showed it is not forgotten."""

    def __init__(self) -> None:
        self._known: dict[int, StepPace] = {}

    def saw(self, prefilling: int, pace: StepPace) -> None:
        """The pace of now, while `prefilling` workers prefer prompts. Small differences count for nothing."""
        if not alike(pace, self.at(prefilling)):
            self._known[prefilling] = pace

    def at(self, prefilling: int) -> StepPace:
        """Returns the pace for that number, or for the nearest measured one; all 1.0 while none is."""
        nearest = min(self._known, key=lambda known: abs(known - prefilling), default=None)
        return StepPace() if nearest is None else self._known[nearest]
