"""The search for a worker that can serve a request: one that serves now, or one that is expected.

`router` chooses the worker, and `generate` decides what happens then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from eyas.common.errors import Unavailable
from gateway.routing import router
from gateway.routing.cluster import Cluster
from gateway.routing.holdings import PromptPages
from gateway.routing.router import RouterCandidate

PATIENCE_S = 4.0  # how long a search goes on while no suitable worker serves or is expected

Choice = TypeVar("Choice")


class WorkerSearch:
    """Searches for one request; `pause` waits between two tries, and `continues` says whether to go on.

    `turn` comes before a choice is used, and says whether that took time.

    `lacks`: what the running search is missing, as half a sentence; empty after a success.
    """

    def __init__(
        self,
        cluster: Cluster,
        prefix: PromptPages,
        turn: Callable[[], Awaitable[bool]],
        pause: Callable[[], Awaitable[None]],
        continues: Callable[[], bool],
    ) -> None:
        self._cluster = cluster
        self._prefix = prefix
        self._turn = turn
        self._pause = pause
        self._continues = continues
        self._clock = asyncio.get_running_loop().time
        self.lacks = ""

    async def find(self, choose: Callable[[Sequence[RouterCandidate]], Choice | None]) -> Choice | None:
        """Returns the choice of `choose` when the request's turn has come; None once the request has ended.

        Raises Unavailable after `PATIENCE_S` in which no suitable worker served or was expected: meanwhile a
        connection may come back.
        """
        choice = await self._first(choose)
        if choice is not None and await self._turn():
            choice = await self._first(choose)  # the worker may have left meanwhile
        return choice

    async def _first(self, choose: Callable[[Sequence[RouterCandidate]], Choice | None]) -> Choice | None:
        expected_at = self._clock()
        while self._continues():
            workers = self._cluster.candidates(self._prefix)
            if (choice := choose(workers)) is not None:
                self.lacks = ""
                return choice
            self.lacks = router.missing(workers)
            if choose([*workers, *self._cluster.returning()]) is not None:
                expected_at = self._clock()
            elif self._clock() - expected_at >= PATIENCE_S:
                raise Unavailable(f"no worker can serve the request: {self.lacks}")
            await self._pause()
        return None
