"""Manages the adapters of a cluster: one roster, which every worker reports and every gateway reads.

A change is made on all workers or on none: all load the adapter's folder, and only then are all given a
roster of the next revision. Gateways need no state of their own and do not communicate: the roster of the
greatest revision counts, and the first gateway that sees a worker with an older one updates it.
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
MOST_TRIES = 20  # of a change that collides with changes of other gateways
PAUSE_S = 0.1  # the longest random pause between two tries, which keeps gateways from colliding again
_log = logging.getLogger("eyas.gateway")


def newest(rosters: Iterable[AdapterRoster]) -> AdapterRoster:
    """The roster of the greatest revision. Different rosters of that revision are merged into the next one;
    of two adapters with one name the one with the lower id stays.
    """
    rosters = list(rosters)
    top = max((roster.revision for roster in rosters), default=0)
    highest = [roster for roster in rosters if roster.revision == top]
    if len({roster.content for roster in highest}) <= 1:
        return next(iter(highest), AdapterRoster())
    merged: dict[str, Adapter] = {}
    adapters = (adapter for roster in highest for adapter in roster.adapters)
    for adapter in sorted(adapters, key=lambda adapter: (adapter.id, adapter.path)):
        merged.setdefault(adapter.name, adapter)
    return AdapterRoster(top + 1, tuple(merged[name] for name in sorted(merged)))


class ClusterAdapters:
    """Implements `AdapterControl` (`gateway.backends.base`). Its owner calls `follow` periodically."""

    def __init__(self, targets: TargetWorkers) -> None:
        self._targets = targets
        self.roster = AdapterRoster()  # what every worker has, or will have soon
        self._newest = AdapterRoster()  # of all that any worker has reported
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
        """Replaces the current roster by the one that `change` returns; returns the adapter of the change."""
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
        """Updates `roster` from all workers: another gateway may have changed it."""
        if any(info.adapters is not None for info in self._targets.infos()):
            await self._targets.look()
            self._count()

    def follow(self) -> None:
        """Updates `roster` from the last reports, and starts to update the workers with an older one."""
        infos = self._count()
        content = self.roster.content
        for info in infos:
            if info.adapters is not None and info.serving and info.adapters.content != content:
                self._repairs.begin(info.worker, partial(self._repair, info.worker, self.roster))

    def forget(self, worker: str) -> None:
        """Drops the state of a worker that has left."""
        self._repairs.forget(worker)
        self._reported = {(name, problem) for name, problem in self._reported if name != worker}

    async def aclose(self) -> None:
        """Ends the repairs."""
        await self._repairs.aclose()

    # --- the workers ------------------------------------------------------------------------------------

    def _count(self) -> list[WorkerInfo]:
        """Updates `roster` from the last reports of the workers, which it returns. A roster that callers have
        changed outlives the workers that report it.
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
        """The workers to change. Raises Unavailable without any, InvalidRequest if one loads no adapters."""
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
        """Has every worker load the adapter; if one cannot, the others unload it again."""
        workers = self._serving()
        read = await self._targets.ask(workers, lambda worker: self._client(worker).load_adapter(adapter))
        loaded = list(read.answers.values())
        if len({known.id for known in loaded}) == 1 and not read.failed:
            return msgspec.structs.replace(loaded[0], path=adapter.path)
        if loaded:
            await self._take(AdapterRoster(self.roster.revision + 1, self.roster.adapters))
        for worker, error in read.failed.items():
            where = f"worker {worker}: " if len(workers) > 1 else ""
            raise type(error)(f"{where}{error.message}", param=error.param or "lora_path")
        raise InvalidRequest("its folder has another content on other workers", param="lora_path")

    async def _take(self, roster: AdapterRoster) -> bool:
        """Sends every worker the roster; False if another gateway has sent a newer one meanwhile.

        The first worker refuses one of two concurrent changes, before any other worker is changed. A worker
        that is lost meanwhile is updated when it is back.
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
    """All adapters of the roster but the one of this name."""
    return tuple(adapter for adapter in roster.adapters if adapter.name != name)
