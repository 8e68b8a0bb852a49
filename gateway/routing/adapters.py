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
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import msgspec

from eyas.common.errors import Busy, EyasError, InvalidRequest, ModelNotFound, Unavailable
from eyas.common.types import Adapter, AdapterRoster, WorkerInfo
from eyas.common.wire.clients import InfoClient
from gateway.routing.targets import TargetWorkers, WorkerRepairs

MOST_ADAPTERS = 512
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


class ClusterAdapters:
    """Satisfies `AdapterControl` (`gateway.backends.base`). Its owner calls `follow` now and then."""

    def __init__(self, targets: TargetWorkers) -> None:
        self._targets = targets
        self.roster = AdapterRoster()  # what every worker has, or will have soon
        self._newest = AdapterRoster()  # that a worker had, however many have left since
        self._change = asyncio.Lock()
        self._repairs = WorkerRepairs("adapters")
        self._reported: set[tuple[str, str]] = set()  # (worker, problem) in the log

    async def load(self, adapter: Adapter, *, replace: bool) -> Adapter:
        """See `AdapterControl.load`."""
        loaded: Adapter | None = None

        async def change(roster: AdapterRoster) -> tuple[Adapter, AdapterRoster]:
            nonlocal loaded
            known = roster.named(adapter.name)
            own = loaded is not None and known is not None and known.id == loaded.id
            if not (replace or own or known is None):
                raise InvalidRequest(f"the adapter {adapter.name!r} is loaded already", param="lora_name")
            others = _without(roster, adapter.name)
            if len(others) >= MOST_ADAPTERS:
                raise InvalidRequest(f"{MOST_ADAPTERS} adapters are loaded", param="lora_name")
            loaded = await self._read(adapter)
            return loaded, AdapterRoster(roster.revision + 1, (*others, loaded))

        return await self._try(change)

    async def unload(self, name: str, id: str = "") -> Adapter:
        """See `AdapterControl.unload`."""

        async def change(roster: AdapterRoster) -> tuple[Adapter, AdapterRoster]:
            adapter = roster.named(name)
            if adapter is None:
                raise ModelNotFound(f"the adapter {name[:200]!r} is not loaded", param="lora_name")
            if id not in ("", adapter.id):
                raise InvalidRequest(f"the adapter {name!r} has the id {adapter.id}", param="lora_id")
            return adapter, AdapterRoster(roster.revision + 1, _without(roster, name))

        return await self._try(change)

    async def _try(
        self, change: Callable[[AdapterRoster], Awaitable[tuple[Adapter, AdapterRoster]]]
    ) -> Adapter:
        """Makes the roster of now what `change` makes of it, and returns the adapter of that."""
        async with self._change:
            for _ in range(MOST_TRIES):
                await self._targets.refresh()
                self._count()
                adapter, roster = await change(self.roster)
                if await self._take(roster):
                    return adapter
                await asyncio.sleep(random.uniform(0.0, PAUSE_S))
        raise Busy("the adapters of this cluster are being changed by others", param="lora_name")

    async def look(self) -> None:
        """Asks all workers anew what they have, so that what another gateway changed is known here."""
        if any(info.adapters is not None for info in self._targets.infos()):
            await self._targets.look()
            self._count()

    def follow(self) -> None:
        """Takes what workers said of late, and begins to bring those up to date that are behind."""
        infos = self._count()
        content = self.roster.content
        for info in infos:
            if info.adapters is not None and info.serving and info.adapters.content != content:
                self._repairs.begin(info.worker, partial(self._repair, info.worker, self.roster))

    def forget(self, worker: str) -> None:
        """Drops what is known of a worker that is gone for good."""
        self._repairs.forget(worker)
        self._reported = {(name, problem) for name, problem in self._reported if name != worker}

    async def aclose(self) -> None:
        """Ends the repairs."""
        await self._repairs.aclose()

    # --- the workers ------------------------------------------------------------------------------------

    def _count(self) -> list[WorkerInfo]:
        """Takes what workers said of late: their descriptions. Which roster counts follows from it; one that
        callers changed outlives the workers that have it.
        """
        infos = self._targets.infos()
        rosters = [info.adapters for info in infos if info.adapters is not None]
        changed = [roster for roster in (self._newest, *rosters) if roster.revision]
        self._newest = max(changed, key=lambda roster: roster.revision, default=self._newest)
        self.roster = newest([*rosters, self._newest] if self._newest.revision else rosters)
        return infos

    def _client(self, worker: str) -> InfoClient:
        return InfoClient(self._targets.channel(worker))

    def _serving(self) -> list[str]:
        """The workers that a change is made on. Raises Unavailable without any, InvalidRequest where one
        loads no adapters.
        """
        infos = self._targets.infos()
        serving = [info for info in infos if info.serving]
        if not serving:
            asleep = any(info.released for info in infos)
            why = "workers sleep (/resume_memory_occupation)" if asleep else "no worker is serving the model"
            raise Unavailable(why)
        without = next((info.worker for info in serving if info.adapters is None), None)
        if without is not None:
            raise InvalidRequest(f"worker {without} loads no adapters (--max-loras)", param="lora_name")
        return [info.worker for info in serving]

    async def _read(self, adapter: Adapter) -> Adapter:
        """Has every worker read the adapter; where one cannot, the others drop it again."""
        workers = self._serving()
        read = await self._targets.ask(workers, lambda worker: self._client(worker).load_adapter(adapter))
        loaded = list(read.answers.values())
        if len({one.id for one in loaded}) == 1 and not read.failed:
            return msgspec.structs.replace(loaded[0], path=adapter.path)
        if loaded:
            await self._take(AdapterRoster(self.roster.revision + 1, self.roster.adapters))
        for worker, error in read.failed.items():
            where = f"worker {worker}: " if len(workers) > 1 else ""
            raise type(error)(f"{where}{error.message}", param=error.param or "lora_path")
        raise InvalidRequest("its folder has another content on other workers", param="lora_path")

    async def _take(self, roster: AdapterRoster) -> bool:
        """Gives every worker the roster; False if another gateway gave them a newer one meanwhile.

        Of two changes at once the first worker refuses one, before any of it is done elsewhere. A worker that
        is lost meanwhile is brought up to the others when it is back.
        """
        first, *others = sorted(self._serving())
        try:
            await self._client(first).set_adapters(roster)
        except Busy:
            return False
        self._newest = max(self._newest, roster, key=lambda roster: roster.revision)
        given = await self._targets.ask(others, lambda worker: self._client(worker).set_adapters(roster))
        for worker, failure in given.failed.items():
            if not isinstance(failure, Busy):  # it has a newer one
                _log.warning("worker %s does not have the adapters of the others: %s", worker, failure)
        await self._targets.refresh()
        self._count()
        return True

    async def _repair(self, worker: str, roster: AdapterRoster) -> None:
        try:
            await self._client(worker).set_adapters(roster)
            _log.info("worker %s has the adapters of the others: %d", worker, len(roster.adapters))
            await self._targets.refresh()
        except EyasError as error:
            if (worker, error.message) not in self._reported:
                self._reported.add((worker, error.message))
                _log.warning("worker %s lacks adapters of others: %s", worker, error.message)


def _without(roster: AdapterRoster, name: str) -> tuple[Adapter, ...]:
    """All of its adapters but the one of this name."""
    return tuple(one for one in roster.adapters if one.name != name)
