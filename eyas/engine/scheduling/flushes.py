"""Flushes of the prefix cache: each waits until nothing runs, empties the cache, or is refused in time.

The scheduler empties the cache (`Scheduler.flush`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from eyas.common.errors import Busy
from eyas.common.wire.message import WireFailure
from eyas.engine.ipc.messages import CacheFlushed, FlushCache
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.scheduling.ranked import Schedulers


@dataclass
class CacheFlushes:
    """`work` says what the engine still has, as "2 requests"; empty: nothing. `forget`: whatever else it
    knows of answers goes as well.
    """

    scheduler: Schedulers
    outbox: EventOutbox
    work: Callable[[], str]
    forget: Callable[[], None]
    _waiting: list[tuple[int, float]] = field(default_factory=list)  # (call, monotonic seconds)

    def begin(self, command: FlushCache) -> None:
        """Queues a flush; one `CacheFlushed` follows."""
        self._waiting.append((command.call, time.monotonic() + command.wait_s))

    def flush(self) -> int | None:
        """Empties the cache, and forgets answers, while nothing runs; returns how many pages it had.

        None: a page is in use, or being copied, and nothing has changed.
        """
        pages = self.scheduler.flush()
        if pages is not None:
            self.forget()
        return pages

    @property
    def waits(self) -> bool:
        """Whether a flush waits for the end of what runs."""
        return bool(self._waiting)

    def poll(self, now: float) -> None:
        """Runs once a loop: flushes if nothing runs, and refuses calls that have waited long enough."""
        if not self._waiting:
            return
        work = self.work()
        pages = None if work else self.flush()
        if pages is not None:
            self.outbox.add(*(CacheFlushed(call, pages) for call, _ in self._waiting))
            self._waiting.clear()
            return
        overdue = [call for call, until in self._waiting if now >= until]
        self._waiting = [(call, until) for call, until in self._waiting if now < until]
        refusal = WireFailure.of(Busy(f"it still has {work or 'pages that are being copied'}"))
        self.outbox.add(*(CacheFlushed(call, failure=refusal) for call in overdue))
