"""How often a request is tried again, and after which errors.

A request may be tried a few times in a row, and some more times in all. The requests of a process that no
worker has admitted yet share one budget, so that retries do not multiply the load of a cluster in trouble.
"""

from __future__ import annotations

from eyas.common.errors import Cancelled, EyasError, Overloaded, Unavailable

MAX_RETRIES = 4  # in a row, with no token delivered between them
MAX_IN_ALL = 12  # of one request, whatever was delivered between them: it may be what its workers fail by
SHARE = 0.2  # retries per request
LEAST_PER_S = 10.0  # retries that are allowed however few requests there are
MOST_SAVED = 100.0  # retries


class RetryBudget:
    """The tries of all requests. Times are seconds of one clock."""

    def __init__(self, now: float = 0.0) -> None:
        self._left = MOST_SAVED
        self._at = now

    def add_request(self, now: float) -> None:
        """A request begins."""
        self._left = min(self._filled(now) + SHARE, MOST_SAVED)
        self._at = now

    def take(self, now: float) -> bool:
        """Whether one more try is within the budget, which then has one less."""
        self._left, self._at = self._filled(now), now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def _filled(self, now: float) -> float:
        return min(self._left + LEAST_PER_S * max(now - self._at, 0.0), MOST_SAVED)


class RetryState:
    """The tries of one request, which begins `now`."""

    def __init__(self, budget: RetryBudget, now: float) -> None:
        self._budget = budget
        self._left = MAX_RETRIES  # in a row
        self._left_in_all = MAX_IN_ALL
        self._tokens = 0
        budget.add_request(now)

    def spend(self, error: EyasError, tokens: int, now: float, *, admitted: bool) -> None:
        """Raises `error` if trying again cannot help, or if too many tries in a row brought no token, or if
        it has tried too often in all.

        `tokens`: delivered so far. Once `admitted`, a request is never refused for load: it tries again until
        its deadline, and spends nothing of the common budget.
        """
        if isinstance(error, Overloaded) and admitted:
            return
        if tokens > self._tokens:
            self._tokens, self._left = tokens, MAX_RETRIES
        if not isinstance(error, Unavailable | Cancelled) or not (self._left and self._left_in_all):
            raise error
        if not admitted and not self._budget.take(now):
            raise error
        self._left -= 1
        self._left_in_all -= 1
