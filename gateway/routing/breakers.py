"""Circuit breakers: workers that fail their requests although they seem healthy get none until a trial
succeeds.

A worker that fails quickly has no queue, and so would attract every request. After `FAILURES` in a row it is
avoided for a while, then gets one request as a trial; if that fails too, it is avoided for twice as long. An
avoided worker is still taken if there is no other.
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES = 3  # in a row
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
TRIAL_S = 10.0  # after this time a trial without an outcome counts as lost, and another may begin


@dataclass(frozen=True)
class CircuitBreaker:
    """The failures of one worker, as an immutable state. Times are seconds of one clock.

    `failures`: in a row. `closed_at`: the worker is avoided until then. `trial_at`: the start of the running
    trial, if any.
    """

    failures: int = 0
    pause_s: float = 0.0
    closed_at: float = 0.0
    trial_at: float | None = None

    def allows(self, now: float) -> bool:
        """Whether the worker may get requests like any other."""
        if not self.pause_s:
            return True
        on_trial = self.trial_at is not None and now < self.trial_at + TRIAL_S
        return now >= self.closed_at and not on_trial

    def sent(self, now: float) -> CircuitBreaker:
        """The state after a request was sent: it starts the trial if one is due."""
        if not self.pause_s or not self.allows(now):
            return self
        return CircuitBreaker(self.failures, self.pause_s, self.closed_at, trial_at=now)

    def failed(self, now: float) -> CircuitBreaker:
        """The state after a failed request. While the worker is avoided only the trial prolongs the pause."""
        failures = self.failures + 1
        if failures < FAILURES or (self.pause_s and self.trial_at is None):
            return CircuitBreaker(failures, self.pause_s, self.closed_at, self.trial_at)
        pause = min(2 * self.pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
        return CircuitBreaker(failures, pause, now + pause)

    def succeeded(self) -> CircuitBreaker:
        """The state after a successful request."""
        return CircuitBreaker()


class WorkerBreakers:
    """The breakers of all workers, by worker and epoch: a restarted worker has no failures."""

    def __init__(self) -> None:
        self._breakers: dict[str, tuple[int, CircuitBreaker]] = {}

    def of(self, worker: str, epoch: int) -> CircuitBreaker:
        """Returns the breaker of this engine."""
        known = self._breakers.get(worker)
        return known[1] if known is not None and known[0] == epoch else CircuitBreaker()

    def note(self, worker: str, epoch: int, breaker: CircuitBreaker) -> None:
        """Stores the new state of a worker; the initial state is not stored."""
        if breaker == CircuitBreaker():
            self._breakers.pop(worker, None)
        else:
            self._breakers[worker] = epoch, breaker

    def forget(self, worker: str) -> None:
        """Drops a worker that has left."""
        self._breakers.pop(worker, None)
