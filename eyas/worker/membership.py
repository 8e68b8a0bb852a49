"""The cluster membership of a worker: its own registry entry, and the other workers that it may dial.

Addresses come only from the registry, which the command line names, and never from a request. This module
selects the draft workers for this worker; `decode_svc.drafts` connects to them, and `kv_puller` to the owners
of pages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from eyas.common.cluster.discovery import WorkerPresence, registry
from eyas.common.cluster.names import is_redis, listed
from eyas.common.config import WorkerConfig
from eyas.common.errors import TransferFailed
from eyas.common.types import Role, WorkerInfo
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient

NEWS_S = 3.0  # after this time, every member knows a new worker
LOOK_S = 0.1
ASK_S = 1.0  # the timeout of a call for the name of the worker at an address

_log = logging.getLogger("eyas.membership")


class ClusterMembership:
    """Registers this worker from `start` to `close`, and follows the other workers if it needs them.

    Raises ConfigError for a bad registry.
    """

    def __init__(self, config: WorkerConfig, describe: Callable[[], WorkerInfo], dial: rpc.Dial) -> None:
        self._config = config
        self._describe = describe
        self._dial = dial
        self._members = registry(config.registry, dial, config.registry_ca, config.cluster)
        self._presence: WorkerPresence | None = None
        if is_redis(config.registry):
            self._presence = WorkerPresence(config.registry, describe, config.registry_ca, config.cluster)

    @property
    def _alone(self) -> bool:
        return self._config.registry == WorkerConfig.registry

    async def start(self) -> None:
        """Publishes this worker (redis only) and starts to follow the other members.

        Call it after the worker's server has started. Warns if the list of members lacks this worker.
        """
        roles = set(self._config.engine.roles)
        if self._presence:
            self._presence.start()
        if roles != {Role.PREFILL}:  # a prefill worker pulls no pages
            await self._members.start()
            if self._alone and Role.PREFILL not in roles:
                _log.warning("no --registry names others: this worker pulls no KV pages, and has no drafter")
        if not self._presence and not self._alone:
            await self._warn_if_unlisted()

    async def _warn_if_unlisted(self) -> None:
        """Warns if the list lacks this worker, which may be listed by another address than its own."""
        own, addresses = self._describe().worker, listed(self._config.registry)
        if own not in addresses and own not in await asyncio.gather(*map(self._name_at, addresses)):
            _log.warning("--registry leaves out this worker, %s: a gateway with this list never asks it", own)

    async def _name_at(self, address: str) -> str:
        """The name that the worker at an address reports; "" if none answers."""
        async with self._dial(address) as channel:
            try:
                return (await InfoClient(channel).info(ASK_S)).worker
            except Exception:  # the follower of the members reports what is wrong with this address
                return ""

    async def close(self) -> None:
        """Withdraws this worker and stops following the others."""
        if self._presence:
            await self._presence.aclose()
        await self._members.aclose()

    def addresses(self) -> set[str]:
        """The addresses of all members that answer."""
        return {info.worker for info in self._members.workers()}

    def drafters(self) -> list[str]:
        """The addresses of the workers that may draft for this one."""
        if self._config.engine.roles != (Role.DECODE,) or not self._config.engine.draft:
            return []
        return [info.worker for info in self._members.workers() if self._may_draft(info)]

    async def find(self, name: str) -> str:
        """The address of the member with the name `name`. Waits up to NEWS_S for a new member.

        Raises TransferFailed if no member has this name.
        """
        if self._alone:
            raise TransferFailed(f"no --registry names worker {name}, so it is not dialled")
        give_up = asyncio.get_running_loop().time() + NEWS_S
        while (address := self._members.find(name)) is None:
            if asyncio.get_running_loop().time() >= give_up:
                raise TransferFailed(f"worker {name} is not found by --registry, so it is not dialled")
            await asyncio.sleep(LOOK_S)
        return address

    def _may_draft(self, info: WorkerInfo) -> bool:
        """Whether the worker is a draft worker (others draft only for themselves) with our model and head."""
        own = self._describe()
        models = own.fingerprint, own.draft_fingerprint
        return not info.runs_target and (info.fingerprint, info.draft_fingerprint) == models
