"""The search for a worker that can serve a request: one that serves now, or one that starts or returns.

It knows who is there and who is expected. It refuses to know requests and legs: who is chosen is the
router's decision, what happens then is `generate`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from eyas.common.errors import Unavailable
from gateway import router
from gateway.cluster import Cluster
from gateway.prefixes import Prefix
from gateway.router import Candidate

PATIENCE_S = 4.0  # how long a search goes on although no worker is known to start or to return

Found = TypeVar("Found")


class Search:
    """`pause` waits a moment between two looks; searches go on while they are `wanted`.

    `lacks` says what is missing meanwhile.
    """

    def __init__(
        self,
        cluster: Cluster,
        prefix: Prefix,
        pause: Callable[[], Awaitable[None]],
        wanted: Callable[[], bool],
    ) -> None:
        self._cluster = cluster
        self._prefix = prefix
        self._pause = pause
        self._wanted = wanted
        self._clock = asyncio.get_running_loop().time
        self.lacks = ""

    async def find(self, choose: Callable[[Sequence[Candidate]], Found | None]) -> Found | None:
        """What `choose` finds, as soon as it finds something; None once it is not wanted any more.

        Raises Unavailable if no worker is expected that would be chosen, after a moment in which a line may
        be opened again or an engine move on.
        """
        hoped_at = self._clock()
        while self._wanted():
            workers = self._cluster.candidates(self._prefix)
            if (found := choose(workers)) is not None:
                self.lacks = ""
                return found
            self.lacks = router.missing(workers)
            if choose([*workers, *self._cluster.returning()]) is not None:
                hoped_at = self._clock()
            elif self._clock() - hoped_at >= PATIENCE_S:
                raise Unavailable(f"no worker can serve the request: {self.lacks}")
            await self._pause()
        return None
