"""The adapters of a cluster: one roster, which every worker repeats, and every gateway reads from them.

A change is made on all workers or on none: all read the adapter's folder, and once all have, all take a
roster of the next revision. So gateways need no memory of their own and no word to each other: of several
rosters the one of the greatest revision counts, and a worker that is behind, because it began later, is
brought up to it by whichever gateway sees it first.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from eyas.common.errors import Busy, EyasError, InvalidRequest, ModelNotFound, Unavailable
from eyas.common.types import Adapter, AdapterRoster, WorkerInfo
from eyas.common.wire.clients import InfoClient
from eyas.common.wire.rpc import ChannelPool

MOST_ADAPTERS = 512
ASK_S = 1.0
LOOK_EVERY_S = 0.2  # names that nobody has do not make a gateway ask its workers more often
REPAIR_S = 5.0  # from one try to bring a worker up to the others to the next
MOST_TRIES = 20  # of a change, where another gateway made one meanwhile
PAUSE_S = 0.1  # between two tries, at most: those that met are not to meet again
_log = logging.getLogger("eyas.gateway")


def newest(rosters: Iterable[AdapterRoster]) -> AdapterRoster:
    """The roster that counts: that of the greatest revision. Those that differ under one revision are joined
    under the next; of two adapters of one name there the one with the lower id stays.
    """
    rosters = list(rosters)
    top = max((roster.revision for roster in rosters), default=0)
    highest = [roster for roster in rosters if roster.revision == top]
    if len({roster.content for roster in highest}) <= 1:
        return next(iter(highest), AdapterRoster())
    joined: dict[str, Adapter] = {}
    for adapter in sorted(
        (one for some in highest for one in some.adapters), key=lambda one: (one.id, one.path)
    ):
        joined.setdefault(adapter.name, adapter)
    return AdapterRoster(top + 1, tuple(joined[name] for name in sorted(joined)))


@dataclass(frozen=True)
class _NewerRoster:
    """What a worker has since it was last heard of, when its epoch was `known`; it may have begun again."""

    known: int
    epoch: int
    roster: AdapterRoster


class ClusterAdapters:
    """Satisfies `AdapterControl` (`gateway.backends.base`). Its owner calls `follow` now and then.

    `workers`: the routing targets as last heard of. `channels`: to them.
    """

    def __init__(self, workers: Callable[[], Sequence[WorkerInfo]], channels: ChannelPool) -> None:
        self._workers = workers
        self._channels = channels
        self._heard: dict[str, _NewerRoster] = {}  # by worker
        self.roster = AdapterRoster()  # what every worker has, or will have soon
        self._seen = AdapterRoster()  # the newest that a worker had, however many have left since
        self._change = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = 0.0
        self._repairs: dict[str, asyncio.Task[None]] = {}
        self._repaired_at: dict[str, float] = {}
        self._reported: set[tuple[str, str]] = set()  # (worker, problem) in the log

    def seen(self, info: WorkerInfo) -> WorkerInfo:
        """The worker with the roster that it took since it was last heard of."""
        newer = self._heard.get(info.worker)
        if newer is None or info.adapters is None:
            return info
        restarted = newer.epoch != info.epoch
        if newer.known != info.epoch or not (restarted or newer.roster.revision > info.adapters.revision):
            del self._heard[info.worker]
            return info
        return msgspec.structs.replace(info, adapters=newer.roster)

    async def load(self, adapter: Adapter, *, replace: bool) -> Adapter:
        """As `AdapterControl` says."""
        loaded: Adapter | None = None
        async with self._change:
            for _ in range(MOST_TRIES):
                await self._look()
                roster = self.roster
                known = roster.named(adapter.name)
                own = loaded is not None and known is not None and known.id == loaded.id
                if not (replace or own or known is None):
                    raise InvalidRequest(f"the adapter {adapter.name!r} is loaded already", param="lora_name")
                others = tuple(one for one in roster.adapters if one.name != adapter.name)
                if len(others) >= MOST_ADAPTERS:
                    raise InvalidRequest(f"{MOST_ADAPTERS} adapters are loaded", param="lora_name")
                loaded = await self._read(adapter)
                if await self._take(AdapterRoster(roster.revision + 1, (*others, loaded))):
                    return loaded
                await _pause()
        raise Busy("the adapters of this cluster are being changed by others", param="lora_name")

    async def unload(self, name: str, id: str = "") -> Adapter:
        """As `AdapterControl` says."""
        async with self._change:
            for _ in range(MOST_TRIES):
                await self._look()
                roster = self.roster
                adapter = roster.named(name)
                if adapter is None:
                    raise ModelNotFound(f"the adapter {name[:200]!r} is not loaded", param="lora_name")
                if id not in ("", adapter.id):
                    raise InvalidRequest(f"the adapter {name!r} has the id {adapter.id}", param="lora_id")
                others = tuple(one for one in roster.adapters if one.name != name)
                if await self._take(AdapterRoster(roster.revision + 1, others)):
                    return adapter
                await _pause()
        raise Busy("the adapters of this cluster are being changed by others", param="lora_name")

    async def look(self) -> None:
        """Asks all workers anew what they have, so that what another gateway changed is known here."""
        if self._looking is None or self._looking.done():
            if time.monotonic() - self._looked_at < LOOK_EVERY_S:
                return
            self._looking = asyncio.create_task(self._look(), name="look at adapters")
        await asyncio.shield(self._looking)

    def follow(self) -> None:
        """Takes what workers said of late, and begins to bring those up to date that are behind."""
        self._count()
        roster, now = self.roster, time.monotonic()
        for info in self._targets():
            behind = info.adapters is not None and info.adapters.content != roster.content
            busy = info.worker in self._repairs or not info.serving
            if behind and not busy and now - self._repaired_at.get(info.worker, -REPAIR_S) >= REPAIR_S:
                self._repaired_at[info.worker] = now
                task = asyncio.create_task(self._repair(info, roster), name=f"adapters of {info.worker}")
                self._repairs[info.worker] = task
                task.add_done_callback(lambda _, worker=info.worker: self._repairs.pop(worker))  # type: ignore[misc]

    def forget(self, worker: str) -> None:
        """Drops what is known of a worker that is gone for good."""
        self._heard.pop(worker, None)
        self._repaired_at.pop(worker, None)
        self._reported = {(name, problem) for name, problem in self._reported if name != worker}

    async def aclose(self) -> None:
        """Ends what runs."""
        tasks = [*self._repairs.values(), *([] if self._looking is None else [self._looking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the workers ------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Finds out which roster counts. One that callers changed outlives the workers that have it."""
        rosters = [info.adapters for info in self._targets() if info.adapters is not None]
        changed = [roster for roster in (self._seen, *rosters) if roster.revision]
        self._seen = max(changed, key=lambda roster: roster.revision, default=self._seen)
        self.roster = newest([*rosters, self._seen] if self._seen.revision else rosters)

    def _targets(self) -> list[WorkerInfo]:
        return [self.seen(info) for info in self._workers() if info.runs_target and not info.starting]

    def _client(self, worker: str) -> InfoClient:
        return InfoClient(self._channels.get(worker))

    def _serving(self) -> list[WorkerInfo]:
        """The workers that a change is made on. Raises Unavailable without any, InvalidRequest where one
        loads no adapters.
        """
        targets = [info for info in self._targets() if info.serving]
        if not targets:
            raise Unavailable("no worker is serving the model")
        without = next((info.worker for info in targets if info.adapters is None), None)
        if without is not None:
            raise InvalidRequest(f"worker {without} loads no adapters (--max-loras)", param="lora_name")
        return targets

    async def _read(self, adapter: Adapter) -> Adapter:
        """Has every worker read the adapter; where one cannot, the others drop it again."""
        targets = self._serving()
        answers = await asyncio.gather(
            *(self._client(info.worker).load_adapter(adapter) for info in targets), return_exceptions=True
        )
        loaded = [answer for answer in answers if isinstance(answer, Adapter)]
        if len({one.id for one in loaded}) == 1 and len(loaded) == len(targets):
            return msgspec.structs.replace(loaded[0], path=adapter.path)
        if loaded:
            await self._take(AdapterRoster(self.roster.revision + 1, self.roster.adapters))
        for info, answer in zip(targets, answers, strict=True):
            if isinstance(answer, EyasError):
                where = f"worker {info.worker}: " if len(targets) > 1 else ""
                raise type(answer)(f"{where}{answer.message}", param=answer.param or "lora_path")
            if isinstance(answer, BaseException):
                raise answer
        raise InvalidRequest("its folder has another content on other workers", param="lora_path")

    async def _take(self, roster: AdapterRoster) -> bool:
        """Gives every worker the roster; False if another gateway gave them a newer one meanwhile.

        Of two changes at once the first worker refuses one, before any of it is done elsewhere. A worker that
        is lost meanwhile is brought up to the others when it is back.
        """
        first, *others = sorted(self._serving(), key=lambda info: info.worker)
        try:
            await self._give(first, roster)
        except Busy:
            return False
        given = await asyncio.gather(*(self._give(info, roster) for info in others), return_exceptions=True)
        self._count()
        for info, failure in zip(others, given, strict=True):
            if isinstance(failure, BaseException) and not isinstance(failure, Busy):  # it has a newer one
                _log.warning("worker %s does not have the adapters of the others: %s", info.worker, failure)
        return True

    async def _give(self, info: WorkerInfo, roster: AdapterRoster) -> None:
        await self._client(info.worker).set_adapters(roster)
        self._heard[info.worker] = _NewerRoster(info.epoch, info.epoch, roster)

    async def _repair(self, info: WorkerInfo, roster: AdapterRoster) -> None:
        try:
            await self._give(info, roster)
            _log.info("worker %s has the adapters of the others: %d", info.worker, len(roster.adapters))
        except EyasError as error:
            if (info.worker, error.message) not in self._reported:
                self._reported.add((info.worker, error.message))
                _log.warning("worker %s lacks adapters of others: %s", info.worker, error.message)

    async def _look(self) -> None:
        async def one(known: WorkerInfo) -> None:
            info = await self._client(known.worker).info(ASK_S, known.epoch)
            if info.adapters is not None:
                self._heard[known.worker] = _NewerRoster(known.epoch, info.epoch, info.adapters)

        able = [info for info in self._targets() if info.adapters is not None]
        await asyncio.gather(*map(one, able), return_exceptions=True)
        self._looked_at = time.monotonic()
        self._count()


async def _pause() -> None:
    await asyncio.sleep(random.uniform(0.0, PAUSE_S))
