"""A worker's place in its cluster: its own entry in the registry, and who drafts for it.

It knows which draft workers fit this worker. How entries are kept is `discovery`'s; what is said to a draft
worker is `decode_svc.drafts`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decode_svc.drafts import DraftStreams
from eyas.common.config import WorkerConfig
from eyas.common.discovery import Presence, RedisRegistry
from eyas.common.types import Role, WorkerInfo

FOLLOW_S = 0.5


class Membership:
    """From `start` to `close` this worker can be found, and its draft streams follow the registry.

    Without a registry it has the draft workers that its command line names, and is found by its address.
    Raises ConfigError for a bad registry.
    """

    def __init__(
        self, config: WorkerConfig, describe: Callable[[], WorkerInfo], drafts: DraftStreams
    ) -> None:
        self._describe = describe
        self._drafts = drafts
        self._named = config.engine.draft_workers if Role.DECODE in config.engine.roles else ()
        self._presence: Presence | None = None
        self._drafters: RedisRegistry | None = None
        self._task: asyncio.Task[None] | None = None
        if config.registry:
            self._presence = Presence(config.registry, describe)
            if config.engine.roles == (Role.DECODE,) and config.engine.draft:
                self._drafters = RedisRegistry(config.registry, self._may_draft)

    async def start(self) -> None:
        self._drafts.follow(self._named)
        if self._presence:
            self._presence.start()
        if self._drafters:
            await self._drafters.start()
            self._task = asyncio.create_task(self._follow(self._drafters), name="drafters")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._presence:
            await self._presence.aclose()
        if self._drafters:
            await self._drafters.aclose()

    async def _follow(self, drafters: RedisRegistry) -> None:
        while True:
            self._drafts.follow((*self._named, *(info.worker for info in drafters.workers())))
            await asyncio.sleep(FOLLOW_S)

    def _may_draft(self, info: WorkerInfo) -> bool:
        """A worker that does nothing else (others draft for themselves alone), with our model and head."""
        own = self._describe()
        models = own.fingerprint, own.draft_fingerprint
        return info.roles == (Role.DRAFT,) and (info.fingerprint, info.draft_fingerprint) == models
