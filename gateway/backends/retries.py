"""Limits how often a request is retried, and after which errors.

The retries of a request are limited in a row and in total. Requests that no worker has admitted yet also
share one budget per process, so that retries do not multiply the load of a cluster in trouble.
"""

from __future__ import annotations

from eyas.common.errors import Cancelled, EyasError, Overloaded, Unavailable

MAX_RETRIES = 4  # in a row, with no token delivered between them
MAX_IN_ALL = 12  # per request, whatever was delivered between them: the request may be what breaks workers
SHARE = 0.2  # retries per request
LEAST_PER_S = 10.0  # retries that are allowed at any number of requests
MOST_SAVED = 100.0  # retries


class RetryBudget:
    """The retries that all requests share. Times are seconds of one clock."""

    def __init__(self, now: float = 0.0) -> None:
        self._left = MOST_SAVED
        self._at = now

    def add_request(self, now: float) -> None:
        """Adds the share of a new request."""
        self._left = min(self._filled(now) + SHARE, MOST_SAVED)
        self._at = now

    def take(self, now: float) -> bool:
        """Takes one retry from the budget; False if there is none left."""
        self._left, self._at = self._filled(now), now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def _filled(self, now: float) -> float:
        return min(self._left + LEAST_PER_S * max(now - self._at, 0.0), MOST_SAVED)


class RetryState:
    """The retries left to one request, which begins `now`."""

    def __init__(self, budget: RetryBudget, now: float) -> None:
        self._budget = budget
        self._left = MAX_RETRIES  # in a row
        self._left_in_all = MAX_IN_ALL
        self._tokens = 0
        budget.add_request(now)

    def spend(self, error: EyasError, tokens: int, now: float, *, admitted: bool) -> None:
        """Takes one retry. Raises `error` if a retry cannot help or none is left.

        `tokens`: the number delivered so far. Once `admitted`, a request is never refused for load: it
        retries until its deadline and takes nothing from the shared budget.
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
