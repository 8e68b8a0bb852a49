"""Workers that fail what they are sent, although they seem well: others are preferred until a trial succeeds.

A worker that fails quickly has no queue, and so would draw every request. After `FAILURES` in a row it is
passed over for a while, then gets one request as a trial: if that fails, it is passed over for twice as long.
It never leaves a request without a worker: one that is passed over is taken if there is no other.
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES = 3  # in a row
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
TRIAL_S = 10.0  # a trial of which nothing was heard for this time counts as lost, and another may begin


@dataclass(frozen=True)
class CircuitBreaker:
    """The failures of one worker. Times are seconds of one clock; every method gives the state after it.

    `failures`: in a row. `closed_at`: until then it is passed over. `trial_at`: when its trial began, if one
    runs.
    """

    failures: int = 0
    pause_s: float = 0.0
    closed_at: float = 0.0
    trial_at: float | None = None

    def allows(self, now: float) -> bool:
        """Whether it may be sent a request like any other worker."""
        if not self.pause_s:
            return True
        on_trial = self.trial_at is not None and now < self.trial_at + TRIAL_S
        return now >= self.closed_at and not on_trial

    def sent(self, now: float) -> CircuitBreaker:
        """Notes a request that is sent to it: its trial, if it is time for one."""
        if not self.pause_s or not self.allows(now):
            return self
        return CircuitBreaker(self.failures, self.pause_s, self.closed_at, trial_at=now)

    def failed(self, now: float) -> CircuitBreaker:
        """Notes a failed request. One that was sent before it was passed over prolongs nothing."""
        failures = self.failures + 1
        if failures < FAILURES or (self.pause_s and self.trial_at is None):
            return CircuitBreaker(failures, self.pause_s, self.closed_at, self.trial_at)
        pause = min(2 * self.pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
        return CircuitBreaker(failures, pause, now + pause)

    def succeeded(self) -> CircuitBreaker:
        """Notes a request that succeeded."""
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
        """Keeps a worker's new state; a sound one takes no memory."""
        if breaker == CircuitBreaker():
            self._breakers.pop(worker, None)
        else:
            self._breakers[worker] = epoch, breaker

    def forget(self, worker: str) -> None:
        """Drops a worker that is gone for good."""
        self._breakers.pop(worker, None)
