"""Chooses the workers that prefer prompts under `--layout auto`, by pure functions of the load.

The number of these workers is the one with the highest capacity for the current mix of requests. It changes
only for a clear gain, and a change acts at the next admission: running requests are not affected.

The load is the mix of recent requests (fading sums) and the pace of steps over the times measured at the
start. A table of step times is never right everywhere: it may be right for small batches and wrong for large
ones. So a pace measured while k workers prefer prompts is used for k, and for numbers without a measurement.
The estimate of the capacity is not exact either: between numbers with nearly the same estimate, the share of
requests that meet their targets decides.
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
"""The number of workers for prompts changes for at least this factor of capacity, so that it does not flap.
While too many requests miss their targets it changes for any gain.
"""
FADE = 0.98
"""The decay of a value's weight per later value: about the last hundred values count."""

OTHER = 1.8
"""The load has changed if the mean of the last ENOUGH values differs from that of all by this factor: then
only the last ones count.
"""

CHANGE = 0.1
"""A mix that differs from the last reported one by less than this part is reported as that one."""

ENOUGH = 20
"""Requests, or answers, that are enough to detect a change of the load."""

FIRST = 6
"""Requests, and answers, before there is a mix: until then every worker does both kinds of work."""

COUNTING_S = 1.0
"""The seconds over which requests are counted to measure the dispersion of arrivals."""

DECAY = 0.96
"""The decay of a count's weight per later count: about the last 25 counts matter."""

LATELY_S = 40.0
"""The time constant (seconds) by which the weight of a request that met or missed its targets decays."""

WRONG = 1.05
"""If too many requests miss their targets, the estimate for the current number of workers is divided by this,
so that another number with nearly the same estimate is tried. Missed targets justify no larger correction.
"""

CLEARLY = 2.0
"""Too many requests miss their targets if the excess is this number of standard deviations of chance."""

SETTLED_S = 20.0
"""Seconds after a change before missed targets count. Requests that miss them come in bunches, so a shorter
time is not significant.
"""

BELIEVED_S = 300.0
"""Seconds for which a number whose estimate was too high is not tried again."""

COUNTS = 12.0
"""Counts that are needed before arrivals count as uneven."""


def estimates(mix: RequestMix, workers: int, rates: MeasuredRates, paces: PaceMemory) -> list[float]:
    """The requests per second that the workers bear if 0, 1, 2 ... of them prefer prompts."""
    bears = []
    for prefilling in range(workers):
        times = dataclasses.replace(rates.times, pace=paces.at(prefilling))
        bears.append(capacity(mix, workers, prefilling, dataclasses.replace(rates, times=times)))
    return bears


def best_split(bears: Sequence[float], now: int, gain: float = GAIN) -> int:
    """The number of workers that should prefer prompts; 0: all do both kinds of work. `bears`: the capacity
    (requests per second) by that number. `now`: the current number.
    """
    now = min(now, len(bears) - 1)
    best = max(range(len(bears)), key=bears.__getitem__)
    return best if bears[best] > gain * bears[now] else now


def preferring(places: Sequence[WorkerPlace]) -> int:
    """The number of workers that prefer prompts."""
    return sum(p.preference is AdmissionPreference.PREFILL for p in places)


def prefer(places: Sequence[WorkerPlace], prefilling: int) -> dict[str, AdmissionPreference]:
    """The preference of each worker, by name, such that `prefilling` of them prefer prompts.

    Those that prefer prompts now are chosen first, then those with the fewest sequences to finish. At least
    one worker always decodes.
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
    """The mean of recent values and of their squares."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[float] = deque(maxlen=ENOUGH)
        self._weight = self._sum = self._squares = 0.0

    def add(self, value: float) -> bool:
        """Adds a value. True if the values have changed, so that those before the last ENOUGH were
        dropped.
        """
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
        """The mean of the values; there must be at least one."""
        return self._sum / self._weight

    @property
    def spread(self) -> float:
        """The mean square over the square of the mean; 1.0: all alike."""
        return max(self._squares / self._weight / max(self.mean, 1.0) ** 2, 1.0)


class ArrivalDispersion:
    """The dispersion of arrivals: the variance of the number per second over its mean; 1.0 for Poisson
    arrivals.

    Measured on pairs of consecutive seconds, all with the same weight: (a - b)^2 / (a + b) has the mean 1 for
    Poisson arrivals at every rate, so that a changing rate does not count as bursts.
    """

    def __init__(self, since_s: float) -> None:
        self._since_s, self._now, self._before = since_s, 0, 0
        self._weight = self._sum = 0.0

    def count(self, at_s: float) -> None:
        """Counts a request."""
        while at_s >= self._since_s + COUNTING_S:
            self._end_count()
        self._now += 1

    def forget(self) -> None:
        """Drops the counts so far."""
        self._weight = self._sum = 0.0

    @property
    def burst(self) -> float:
        """The dispersion, at least 1.0; 1.0 while there are too few counts."""
        return max(self._sum / self._weight, 1.0) if self._weight >= COUNTS * DECAY**COUNTS else 1.0

    def _end_count(self) -> None:
        self._since_s += COUNTING_S
        if both := self._now + self._before:
            self._weight = DECAY * self._weight + 1.0
            self._sum = DECAY * self._sum + (self._now - self._before) ** 2 / both
        self._now, self._before = 0, self._now


class TargetMemory:
    """Measures whether requests meet their targets, and corrects the estimates by it. Times are seconds of
    one clock.
    """

    def __init__(self, since_s: float) -> None:
        self._at_s = self._since_s = since_s
        self._prefilling = 0
        self._ended = self._met = 0.0  # requests, fading
        self._wrong: dict[int, float] = {}  # numbers of workers with a too high estimate: time of the finding

    def ended(self, at_s: float, began_s: float, met: bool) -> None:
        """Counts an answer, unless its request began under another number of workers for prompts."""
        if began_s >= self._since_s:
            self._fade(at_s)
            self._ended += 1
            self._met += met

    def forget(self) -> None:
        """Drops all findings about the earlier load."""
        self._wrong.clear()
        self._ended = self._met = 0.0

    @property
    def missed(self) -> bool:
        """Whether more than the tolerated share of requests miss their targets, by more than chance."""
        return self._missed_by(1.0)

    def _missed_by(self, deviations: float) -> bool:
        if self._ended < ENOUGH or self._at_s - self._since_s < SETTLED_S:
            return False
        chance = math.sqrt(TAIL * (1 - TAIL) * self._ended)
        return self._met + deviations * chance < (1 - TAIL) * self._ended

    def corrected(self, at_s: float, bears: Sequence[float], now: int) -> list[float]:
        """The estimates, reduced where they were too high. `now`: the number of workers that prefer
        prompts.
        """
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
    """Measures the mix of requests from every request and every answer."""

    def __init__(self, since_s: float = 0.0) -> None:
        """`since_s`: the time from which requests arrive, on the clock of `add_request`."""
        self._prompt, self._missing, self._output = FadingMean(), FadingMean(), FadingMean()
        self._evenness = ArrivalDispersion(since_s)
        self.targets = TargetMemory(since_s)
        self._reported: RequestMix | None = None

    def add_request(self, at_s: float, prompt: int, missing: int) -> None:
        """Counts a request that arrived at `at_s` and has `missing` uncached tokens in its prompt."""
        self._evenness.count(at_s)
        others = self._prompt.add(prompt), self._missing.add(missing)
        if any(others):
            self._evenness.forget()
            self.targets.forget()

    def best_split(self, at_s: float, bears: Sequence[float], now: int) -> int:
        """The number of workers that should prefer prompts, by corrected estimates; `now`: the current
        number.
        """
        corrected = self.targets.corrected(at_s, bears, now)
        return best_split(corrected, now, 1.0 if self.targets.missed else GAIN)

    def answered(self, output: int) -> None:
        """Counts an answer that took `output` steps."""
        self._output.add(output)

    def mix(self) -> RequestMix | None:
        """The mix of recent requests; None while there are too few."""
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
    """Stores the last pace for each number of workers that prefer prompts, so that a wrong change is not
    repeated."""

    def __init__(self) -> None:
        self._known: dict[int, StepPace] = {}

    def record(self, prefilling: int, pace: StepPace) -> None:
        """Records the current pace, while `prefilling` workers prefer prompts. Small differences are
        ignored.
        """
        if not alike(pace, self.at(prefilling)):
            self._known[prefilling] = pace

    def at(self, prefilling: int) -> StepPace:
        """Returns the pace for that number or the nearest measured one; all 1.0 without a measurement."""
        nearest = min(self._known, key=lambda known: abs(known - prefilling), default=None)
        return StepPace() if nearest is None else self._known[nearest]
