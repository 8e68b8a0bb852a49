"""Ends a wait for tokens that do not come: a request has no time limit while they flow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SILENCE_S = 1800.0  # seconds without a token, in a queue or between two, after which a request ends


class SilenceLimit:
    """Watches a count of tokens; where it has not grown for `SILENCE_S`, `limit` expires at once.

    It looks every `SILENCE_S`, so a silence between two tokens may last twice as long: work per look, none
    per token. The wait for the first token is exact.
    """

    def __init__(self, limit: asyncio.Timeout, tokens: Callable[[], int]) -> None:
        self.expired = False
        self._limit = limit
        self._tokens = tokens
        self._seen = tokens()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(SILENCE_S, self._look)

    def stop(self) -> None:
        """Ends the watch. Idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        seen, self._seen = self._seen, self._tokens()
        if self._seen == seen:
            self.expired = True
            self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(SILENCE_S, self._look)
