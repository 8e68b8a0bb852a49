"""Measurements of the ways that KV pages take to this worker, seen from its front.

It meets the owner, asks the engine, and makes the copies that only fronts can. What is measured, and how, is
the engine's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from eyas.common.errors import ConfigError, TransferFailed, Unavailable
from eyas.common.types import KvKind
from eyas.common.wire import rpc
from eyas.common.wire.buffer import StreamBuffer
from eyas.common.wire.links import PageLink
from eyas.common.wire.pool import PoolInfo
from eyas.common.wire.watch import TransferClient
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import (
    CopyPages,
    CopyStopped,
    EngineStopped,
    LinkProbed,
    ProbeLink,
    StageCopy,
    WireFailure,
)
from eyas.worker.fetches import FetchTasks, OpenStagings
from kv_transfer.layout import check_compatible

ANSWER_S = 8.0  # an engine answers within 5 s, and what it is in the middle of

ProbeNumber: TypeAlias = int
"""Copies of a probe have it where others have the number of a pull; it is negative."""


@dataclass(frozen=True)
class _PageOwner:
    """The owner of the copied pages."""

    client: TransferClient
    group: KvKind
    pool: PoolInfo


class LinkProbes:
    """Owner of the running probes. `find` as for `eyas.worker.kv_puller.KvPuller`."""

    def __init__(
        self,
        engine: EngineClient,
        find: Callable[[str], Awaitable[str]],
        fetches: FetchTasks,
        stagings: OpenStagings,
        dial: rpc.Dial,
    ) -> None:
        self._engine = engine
        self._find = find
        self._fetches = fetches
        self._stagings = stagings
        self._dial = dial
        self._owners: dict[ProbeNumber, _PageOwner] = {}
        self._turn = asyncio.Lock()  # links that are measured together share what they have

    async def probe(self, name: str) -> list[PageLink]:
        """How the pages of the worker `name` come here, by its ranks.

        Raises EyasError: why the owner cannot be asked, or its pages are no pages of ours.
        """
        self._engine.check()
        pools = self._engine.ready.pools
        group = KvKind.TARGET if KvKind.TARGET in pools else KvKind.DRAFT
        if group not in pools:
            raise ConfigError("this worker's KV stays: no pages come here", param="transfer")
        address = await self._find(name)
        async with self._dial(address) as channel:
            client = TransferClient(channel, address)
            theirs = await client.handshake(group, pools[group].layout_hash)
            check_compatible(pools[group], theirs)
            async with self._turn:
                owner = _PageOwner(client, group, theirs)
                return [await self._measure(name, owner, rank.rank) for rank in theirs.ranks]

    def copy(self, job: CopyPages) -> None:
        """Make a copy that the engine of a probe cannot make itself."""
        owner = self._owner(job)
        if owner is not None:
            chunks = owner.client.fetch_proof(owner.group, owner.pool.epoch, job.pages)
            self._fetches.start(job, owner.group, chunks)

    def stage(self, job: StageCopy) -> None:
        """Have the owner stage what the engine of a probe reads there."""
        owner = self._owner(job)
        if owner is not None:
            staging = owner.client.stage_proof(owner.group, owner.pool.epoch, job.pages)
            self._stagings.start(job, staging)

    def _owner(self, job: CopyPages | StageCopy) -> _PageOwner | None:
        """None, which is told, if the probe ended while this event was under way."""
        owner = self._owners.get(job.pull)
        if owner is None:
            failure = WireFailure.of(TransferFailed("this probe has ended"))
            self._engine.send(CopyStopped(job.pull, job.number, 0, 0.0, failure))
        return owner

    async def _measure(self, name: str, owner: _PageOwner, rank: int) -> PageLink:
        deadline = asyncio.get_running_loop().time() + ANSWER_S
        answer: StreamBuffer[LinkProbed | EngineStopped] = StreamBuffer(2, deadline)
        call = self._engine.open(answer.put)
        self._owners[-call] = owner
        try:
            self._engine.send(ProbeLink(call, name, owner.group, rank, owner.pool))
            match await answer.get():
                case LinkProbed(link=link):
                    return link
                case EngineStopped(failure=WireFailure() as failure):
                    raise failure.error()
            raise Unavailable("the engine has left")
        finally:
            del self._owners[-call]
            self._fetches.stop(-call)
            self._stagings.stop(-call)
            self._engine.close(call)
