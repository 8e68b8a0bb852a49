"""The front's part of KV pulls, and of probes of the links to other workers.

A pull opens a Watch on the worker that owns the pages. The engine's events `OpenPull`, `ReleasePull`,
`ReleaseHandle` and `ClosePull` become calls, and the owner's answers become `Pull*` commands. The layouts are
compared before the first pull from an owner. The engine chooses the owners, pages, deadlines and transports.

A probe measures how pages get here from an owner. The front does the handshake and the copies that only
fronts can make; the engine decides what is measured, and how.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import TypeAlias

from eyas.common.errors import ConfigError, EyasError, TransferFailed, Unavailable
from eyas.common.types import KvHandle, KvKind
from eyas.common.wire import rpc
from eyas.common.wire.buffer import StreamBuffer
from eyas.common.wire.links import PageLink
from eyas.common.wire.pool import PoolInfo
from eyas.common.wire.transfer import TransferClient, WatchReady
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import (
    ClosePull,
    CopyPages,
    CopyRead,
    CopyStopped,
    EngineStopped,
    LinkProbed,
    OpenPull,
    ProbeLink,
    PullDone,
    PullFailed,
    PullMet,
    PullReady,
    PullReleased,
    ReleaseHandle,
    ReleasePull,
    StageCopy,
    StopCopy,
    WireFailure,
)
from eyas.worker.fetches import FetchTasks, OpenStagings
from kv_transfer.layout import check_compatible

_log = logging.getLogger("eyas.pulls")
ANSWER_S = 8.0  # an engine answers within 5 s, after its current step
ProbeNumber: TypeAlias = int
"""In copies of a probe, it takes the place of the number of a pull; it is negative."""


@dataclass(eq=False)
class _OpenPull:
    number: int
    handle: KvHandle
    attempt: int
    known: bool  # whether our engine has compared its layout with the owner's
    address: str = ""  # of the owner, once it is resolved
    releasing: bool = False  # Release has been called: an end of the Watch is no failure any more


class KvPuller:
    """Owner of the open Watches and fetches, and of their channels; created before the engine sends events.

    `find` resolves a worker's name in a handle to its address. It raises EyasError unless the worker is a
    member of this cluster, so no handle makes this worker dial another host.
    """

    def __init__(
        self, engine: EngineClient, find: Callable[[str], Awaitable[str]], dial: rpc.Dial = rpc.channel
    ) -> None:
        self._engine = engine
        self._find = find
        self._channels = rpc.ChannelPool(dial)
        self._clients: dict[str, TransferClient] = {}
        self._fetches = FetchTasks(engine)
        self._stagings = OpenStagings(engine)
        self.probes = LinkProbes(engine, find, self._fetches, self._stagings, dial)
        self._watches: dict[int, tuple[_OpenPull, asyncio.Task[None]]] = {}
        self._releases: set[asyncio.Task[None]] = set()
        engine.on(OpenPull, self._open)
        engine.on(ReleasePull, self._release_pull)
        engine.on(ReleaseHandle, self._release_handle)
        engine.on(ClosePull, self._close)
        engine.on(CopyPages, self._copy)
        engine.on(StageCopy, self._stage)
        engine.on(CopyRead, self._stagings.read)
        engine.on(StopCopy, self._stop)

    async def close(self) -> None:
        """Cancels all Watches, releases and fetches, then closes the channels."""
        tasks = [task for _, task in self._watches.values()] + list(self._releases)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self._fetches.close(), self._stagings.close(), return_exceptions=True)
        await self._channels.close()

    async def follow(self, members: Collection[str]) -> None:
        """Closes the channels to workers at other addresses, unless pages are being pulled from them."""
        in_use = {*members, *(pull.address for pull, _ in self._watches.values())}
        unused = [address for address in self._channels if address not in in_use]
        for address in unused:
            self._clients.pop(address, None)
        await self._channels.drop(*unused)

    # --- events -----------------------------------------------------------------------------------------

    def _open(self, event: OpenPull) -> None:
        pull = _OpenPull(event.pull, event.handle, event.attempt, event.known)
        self._watches[pull.number] = (pull, asyncio.create_task(self._watch(pull)))

    def _release_pull(self, event: ReleasePull) -> None:
        if event.pull not in self._watches:  # the pull failed before this event arrived
            self._engine.send(PullReleased(event.pull, valid=False))
            return
        pull, _ = self._watches[event.pull]
        pull.releasing = True
        self._spawn(self._finish_pull(pull))

    def _release_handle(self, event: ReleaseHandle) -> None:
        self._spawn(self._return_pages(event.handle, event.attempt))

    def _spawn(self, release: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(release)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def _close(self, event: ClosePull) -> None:
        self._fetches.stop(event.pull)
        self._stagings.stop(event.pull)
        _, watch = self._watches.pop(event.pull, (None, None))
        if watch is not None:
            watch.cancel()

    def _copy(self, event: CopyPages) -> None:
        if event.pull < 0:
            self.probes.copy(event)
            return
        pull = self._pull_of(event)
        if pull is None:
            return
        owner = self._client(pull.address)
        if event.proof:
            chunks = owner.fetch_proof(pull.handle.group, pull.handle.epoch, event.pages, event.share)
        else:
            chunks = owner.fetch(pull.handle, pull.attempt, event.pages, event.share)
        self._fetches.start(event, pull.handle.group, chunks)

    def _stage(self, event: StageCopy) -> None:
        if event.pull < 0:
            self.probes.stage(event)
            return
        pull = self._pull_of(event)
        if pull is None:
            return
        owner = self._client(pull.address)
        if event.proof:
            staging = owner.stage_proof(pull.handle.group, pull.handle.epoch, event.pages, event.share)
        else:
            staging = owner.stage(pull.handle, pull.attempt, event.pages, event.share)
        self._stagings.start(event, staging)

    def _pull_of(self, event: CopyPages | StageCopy) -> _OpenPull | None:
        """The pull of a copy. If it failed before this event arrived: None, and the copy is reported
        failed.
        """
        if event.pull in self._watches:
            return self._watches[event.pull][0]
        failure = WireFailure.of(TransferFailed("the Watch of this pull has ended"))
        self._engine.send(CopyStopped(event.pull, event.number, 0, 0.0, failure))
        return None

    def _stop(self, event: StopCopy) -> None:
        self._fetches.stop(event.pull, event.number)
        self._stagings.stop(event.pull, event.number)

    # --- calls ------------------------------------------------------------------------------------------

    async def _watch(self, pull: _OpenPull) -> None:
        try:
            owner = await self._owner(pull)
            if not pull.known:
                self._engine.send(PullMet(pull.number, await self._handshake(pull.handle, owner)))
            async with contextlib.aclosing(owner.watch(pull.handle, pull.attempt)) as updates:
                async for update in updates:
                    if isinstance(update, WatchReady):
                        self._engine.send(PullReady(pull.number, update.tokens))
                    else:
                        self._engine.send(PullDone(pull.number, update.choices, update.last_feature))
        except Exception as error:
            if not pull.releasing:
                self._watches.pop(pull.number, None)
                known = rpc.as_eyas(error, f"the Watch of handle {pull.handle.id}")
                self._engine.send(PullFailed(pull.number, WireFailure.of(known)))

    async def _finish_pull(self, pull: _OpenPull) -> None:
        """Releases the handle and reports whether its pages were valid until then."""
        try:
            valid = await (await self._owner(pull)).release(pull.handle, pull.attempt)
        except EyasError as error:
            _log.warning("release of handle %d at %s: %s", pull.handle.id, pull.handle.worker, error)
            valid = False
        self._close(ClosePull(pull.number))
        self._engine.send(PullReleased(pull.number, valid))

    async def _return_pages(self, handle: KvHandle, attempt: int) -> None:
        """Returns the pages to their owner. If that fails, the owner frees them when the lease expires."""
        try:
            await self._client(await self._find(handle.worker)).give_back(handle, attempt)
        except EyasError as error:
            _log.info("worker %s keeps pages until their lease ends: %s", handle.worker, error)

    async def _owner(self, pull: _OpenPull) -> TransferClient:
        pull.address = pull.address or await self._find(pull.handle.worker)
        return self._client(pull.address)

    def _client(self, address: str) -> TransferClient:
        """The client of the open channel to a worker; a new channel gets a new client."""
        channel, known = self._channels.get(address), self._clients.get(address)
        if known is None or known.channel is not channel:
            known = self._clients[address] = TransferClient(channel, address)
        return known

    async def _handshake(self, handle: KvHandle, owner: TransferClient) -> PoolInfo:
        """The owner's pool. Raises EyasError unless its layout is compatible with ours, and the owner is
        still the process that offered the handle.
        """
        ours = self._engine.ready.pools.get(handle.group)
        if ours is None:
            raise ConfigError(f"this worker has no {handle.group} pages to pull into", param="group")
        theirs = await owner.handshake(handle.group, ours.layout_hash)
        check_compatible(ours, theirs)
        if (theirs.epoch, theirs.layout_hash) != (handle.epoch, handle.layout):
            raise TransferFailed(f"worker {handle.worker} restarted after it offered handle {handle.id}")
        return theirs


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
        self._turn = asyncio.Lock()  # links measured at the same time would share their bandwidth

    async def probe(self, name: str) -> list[PageLink]:
        """Measures the links over which pages of the worker `name` get here, one per rank of it.

        Raises EyasError if the owner cannot be reached, or its pages are not compatible with ours.
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
        """Makes a copy that the engine of a probe cannot make itself."""
        owner = self._owner(job)
        if owner is not None:
            chunks = owner.client.fetch_proof(owner.group, owner.pool.epoch, job.pages, job.share)
            self._fetches.start(job, owner.group, chunks)

    def stage(self, job: StageCopy) -> None:
        """Stages pages at the owner, where the engine of a probe reads them."""
        owner = self._owner(job)
        if owner is not None:
            staging = owner.client.stage_proof(owner.group, owner.pool.epoch, job.pages, job.share)
            self._stagings.start(job, staging)

    def _owner(self, job: CopyPages | StageCopy) -> _PageOwner | None:
        """The owner that is probed. If the probe ended before this event arrived: None, and the copy is
        reported failed.
        """
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
