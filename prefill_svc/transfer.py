"""`TransferService`: reports to pullers which pages of this worker are ready, and sends pages to remote ones.

The engine owns the leases; this module relays. It reads the engine's pools. The engine copies pages that
cannot be read here to staging, one window at a time. Release decides whether reads were in time, not this
module.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from eyas.common.errors import (
    DeadlineExceeded,
    EyasError,
    InvalidRequest,
    NotFound,
    RequestTimeout,
    TransferFailed,
    Unavailable,
)
from eyas.common.types import KvHandle, KvKind, PageShare
from eyas.common.wire import convert, transfer
from eyas.common.wire.buffer import StreamBuffer
from eyas.common.wire.message import WireFailure
from eyas.common.wire.pool import PoolInfo
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import EngineReady, EngineStopped, PagesStaged, StagePages, UnstagePages
from eyas.engine.ipc.transfer_messages import (
    LeaseReleased,
    ReleaseLease,
    WatchClosed,
    WatchOpened,
    WatchUpdate,
)
from kv_transfer.area import Pages
from kv_transfer.backends.stream import chunks
from kv_transfer.layout import PROBE_WINDOWS, parts_in_slot, window_pages
from protos import transfer_pb2, transfer_pb2_grpc

SERVICE = "eyas.internal.v1.TransferService"
MAX_BUFFERED = 1024  # updates; one per prefill step
RELEASE_S = 4.0
REQUEST_S = 5.0  # from the start of a Stage call until its first pages are named
REST_S = 2.0  # from the end of one window until the next pages are named, else the call ends

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
AHEAD = 3  # windows of one stream that are staged at a time: while one is sent, the next ones are copied
SLOT_LEASE_S = 20.0  # for a puller that reads slots itself; its READs time out before that
STAGED_S = 5.0  # for the engine to copy a window
TAKEN_S = 3.0  # for a puller to take a chunk; then its slots are freed for other pullers


@dataclass
class _OpenWatch:
    """An open Watch: the handle as it was offered, the pages that it names, and the attempt that reads it.

    `accepted`: by the engine.
    """

    handle: KvHandle
    pages: frozenset[int]
    attempt: int
    accepted: bool = False


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):  # type: ignore[misc]
    """The service over one engine and its pools. It owns neither."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._watches: dict[int, _OpenWatch] = {}  # by stream number: neither released nor failed

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to `server`."""
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(self, server)
        fetch = grpc.unary_stream_rpc_method_handler(
            self.Fetch, transfer_pb2.FetchRequest.FromString, transfer.encode
        )
        server.add_registered_method_handlers(SERVICE, {"Fetch": fetch})  # in place of the generated one

    async def Handshake(
        self, request: transfer_pb2.HandshakeRequest, context: Context
    ) -> transfer_pb2.HandshakeResponse:
        """Returns the layout hash and geometry of a group's pages, for the puller to compare with its own.

        Raises NotFound if this worker has no such pages, Unavailable while its engine cannot serve.
        """
        return transfer.pool_to_pb(self._info(convert.group_from_pb(request.group)))

    async def Watch(
        self, request: transfer_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[transfer_pb2.WatchResponse]:
        """Streams the rows of the handle that become readable; its lease is renewed while the stream is open.

        The stream stays open after `done`. It ends after `failed`. Raises the engine's error if it stops.
        """
        handle = convert.handle_from_pb(request.handle)
        offered = frozenset(page for shard in handle.shards for page in shard.pages)
        watch = _OpenWatch(handle, offered, request.attempt)
        buffer: StreamBuffer[WatchUpdate | EngineStopped] = StreamBuffer(MAX_BUFFERED)

        def on_event(event: WatchUpdate | EngineStopped) -> None:
            self._update(number, event)
            buffer.put(event)

        number = self._engine.open(on_event)
        self._watches[number] = watch
        self._engine.send(WatchOpened(number, watch.handle, watch.attempt))
        try:
            while True:
                update = _alive(await buffer.get())
                for message in _to_pb(update):
                    yield message
                if update.failure is not None:
                    return
        finally:
            self._watches.pop(number, None)
            self._engine.close(number)
            self._engine.send(WatchClosed(number))

    async def Release(
        self, request: transfer_pb2.ReleaseRequest, context: Context
    ) -> transfer_pb2.ReleaseResponse:
        """Releases a lease; returns whether it never lapsed. A one-way call gets no verdict.

        Raises DeadlineExceeded if the engine does not answer in time.
        """
        self._forget(request)
        if request.one_way:
            self._engine.check()
            self._engine.send(ReleaseLease(0, request.id, request.epoch, request.attempt))
            return transfer_pb2.ReleaseResponse()
        deadline = asyncio.get_running_loop().time() + RELEASE_S
        buffer: StreamBuffer[LeaseReleased | EngineStopped] = StreamBuffer(2, deadline)
        number = self._engine.open(buffer.put)
        try:
            self._engine.send(ReleaseLease(number, request.id, request.epoch, request.attempt))
            event = await buffer.get()
        finally:
            self._engine.close(number)
        return transfer_pb2.ReleaseResponse(valid=isinstance(event, LeaseReleased) and event.valid)

    async def Fetch(self, request: transfer_pb2.FetchRequest, context: Context) -> AsyncIterator[bytes]:
        """Streams the current bytes of pages of a handle with an open Watch; Release decides if they are
        valid.

        Bytes that were read after the end of the Watch, or after a Release, are not sent: they may be another
        request's KV. The proof page needs no handle, and may be named several times. Raises InvalidRequest
        for pages that the handle does not name, TransferFailed without a Watch.
        """
        group = self._check(request)
        async with contextlib.aclosing(self._bytes(group, request, context)) as data:
            async for part in data:
                self._check_watched(request)
                yield part

    async def Stage(
        self, requests: AsyncIterator[transfer_pb2.StageRequest], context: Context
    ) -> AsyncIterator[transfer_pb2.StageResponse]:
        """Copies pages to slots, which are reserved until the caller has read them, for SLOT_LEASE_S at most;
        then continues with the next pages, if the caller names them within REST_S.

        The rules of Fetch apply to the pages. Raises InvalidRequest for steps out of order, RequestTimeout
        for a caller that names no pages, and TransferFailed if this worker does not stage pages, without a
        Watch, or for a caller that reads too slowly.
        """
        error = RequestTimeout(f"the pages to stage were not named within {REQUEST_S:g} s")
        request = await _step(requests, "pages", REQUEST_S, error)
        while request is not None:
            async with contextlib.aclosing(self._window(request.pages, requests, context)) as answers:
                async for answer in answers:
                    yield answer
            request = await self._another(requests)

    async def _window(
        self,
        request: transfer_pb2.FetchRequest,
        requests: AsyncIterator[transfer_pb2.StageRequest],
        context: Context,
    ) -> AsyncGenerator[transfer_pb2.StageResponse, None]:
        """Stages one window of pages, and confirms that they stayed valid until they were read."""
        group = self._check(request)
        if not self._ready().staged:
            raise TransferFailed("this worker's pages are read where they lie")
        source = self._staged(group, request, context)
        geometry = self._info(group).geometry
        most = window_pages(geometry.page_bytes) * parts_in_slot(geometry, source.share)
        if not 0 < len(request.pages) <= most:
            raise InvalidRequest(f"pages must be 1 to {most} pages", param="pages")
        window = StagedWindow(source, tuple(request.pages))
        try:
            slots = await window.staged()
            self._check_watched(request)
            yield transfer_pb2.StageResponse(slots=transfer_pb2.StageSlots(slots=slots))
            slow = TransferFailed(f"the puller has not read its slots within {SLOT_LEASE_S:g} s")
            await _step(requests, "read", SLOT_LEASE_S, slow)
            self._check_watched(request)
            yield transfer_pb2.StageResponse(held=transfer_pb2.StageHeld())
        finally:
            window.end()

    async def _another(
        self, requests: AsyncIterator[transfer_pb2.StageRequest]
    ) -> transfer_pb2.StageRequest | None:
        """The next pages of a Stage; None if the caller has no more or is too slow, or the engine stops."""
        rest = asyncio.timeout(REST_S)
        with contextlib.suppress(TimeoutError, Unavailable):
            number = self._engine.open(lambda _: _end_now(rest))
            try:
                return await _next_message(requests, "pages", rest)
            finally:
                self._engine.close(number)
        return None

    def _ready(self) -> EngineReady:
        """Returns the engine's `EngineReady`. Raises Unavailable while it cannot serve."""
        self._engine.check()
        assert self._engine.ready is not None
        return self._engine.ready

    def _forget(self, release: transfer_pb2.ReleaseRequest) -> None:
        """Forgets released Watches before the engine receives the release and may write to the pages."""
        for number, watch in list(self._watches.items()):
            matches = (watch.handle.id, watch.handle.epoch) == (release.id, release.epoch)
            if matches and watch.attempt <= release.attempt:
                del self._watches[number]

    def _update(self, number: int, event: WatchUpdate | EngineStopped) -> None:
        """Handles an update before its stream does, since the pages of a failed Watch may be overwritten."""
        if isinstance(event, EngineStopped) or event.failure is not None:
            self._watches.pop(number, None)
        elif number in self._watches:
            self._watches[number].accepted = True

    def _watched(self, request: transfer_pb2.FetchRequest) -> _OpenWatch:
        """The open Watch of the handle whose pages are requested. Raises TransferFailed if there is none."""
        key = (request.id, request.epoch, convert.group_from_pb(request.group), request.attempt)
        for watch in self._watches.values():
            handle = watch.handle
            if watch.accepted and (handle.id, handle.epoch, handle.group, watch.attempt) == key:
                return watch
        raise TransferFailed(f"no Watch of handle {request.id} by attempt {request.attempt} is open here")

    def _check(self, request: transfer_pb2.FetchRequest) -> KvKind:
        """Checks that the caller may read the requested pages; returns their group."""
        self._ready()
        group = convert.group_from_pb(request.group)
        if request.id == 0:
            self._check_proof(request, group)
        else:
            self._check_offered(request)
        return group

    def _check_watched(self, request: transfer_pb2.FetchRequest) -> None:
        if request.id != 0:  # the proof page needs no Watch
            self._watched(request)

    def _check_offered(self, request: transfer_pb2.FetchRequest) -> None:
        watch = self._watched(request)
        if len(request.pages) > len(watch.pages) or not watch.pages.issuperset(request.pages):
            named = f"handle {watch.handle.id} of the {watch.handle.group} group"
            raise InvalidRequest(f"pages has numbers that {named} does not name", param="pages")

    def _check_proof(self, request: transfer_pb2.FetchRequest, group: KvKind) -> None:
        info = self._info(group)
        if request.epoch != info.epoch or set(request.pages) != {info.geometry.pages}:
            raise InvalidRequest("pages without a handle may be the proof page only", param="pages")
        if len(request.pages) > (most := PROBE_WINDOWS * window_pages(info.geometry.page_bytes)):
            raise InvalidRequest(f"pages may name the proof page {most} times at most", param="pages")

    async def _bytes(
        self, group: KvKind, request: transfer_pb2.FetchRequest, context: Context
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of pages. Each chunk is read when the previous one was taken, or staged shortly
        before.
        """
        if request.on_device:
            raise InvalidRequest("on_device is for slots that the caller reads", param="on_device")
        if self._ready().staged:
            source = self._staged(group, request, context)
            async with contextlib.aclosing(source.chunks(request.pages)) as staged:
                async for data in staged:
                    yield data
            return
        if request.rank or request.heads:
            raise TransferFailed("this worker's pages are of one rank, and go whole")
        for data in chunks(self._engine.pages(group), request.pages):
            yield data

    def _staged(self, group: KvKind, request: transfer_pb2.FetchRequest, context: Context) -> StagedPages:
        """Raises InvalidRequest for a rank or heads that this worker does not have."""
        info = self._info(group)
        if request.rank >= len(info.ranks):
            raise InvalidRequest(f"rank is one of {len(info.ranks)} ranks", param="rank")
        if request.first_head + request.heads > info.geometry.kv_heads:
            raise InvalidRequest(f"heads are some of {info.geometry.kv_heads}", param="heads")
        first = request.first_head if request.heads else 0
        share = PageShare(request.rank, first, request.heads, request.on_device)
        slots = self._engine.pages(group)[:, : info.geometry.part_bytes(share.heads)]
        return StagedPages(self._engine, slots, group, request.id, share, context.peer())

    def _info(self, group: KvKind) -> PoolInfo:
        pools = self._ready().pools
        if group not in pools:
            raise NotFound(f"this worker has no pages of the {group} group", param="group")
        return pools[group]


async def _step(
    requests: AsyncIterator[transfer_pb2.StageRequest], step: str, within_s: float, error: EyasError
) -> transfer_pb2.StageRequest:
    """The next message of a Stage, which must be this step. Raises `error` if it does not arrive in time."""
    try:
        request = await _next_message(requests, step, asyncio.timeout(within_s))
    except TimeoutError:
        raise error from None
    if request is None:
        raise _out_of_order(step)
    return request


async def _next_message(
    requests: AsyncIterator[transfer_pb2.StageRequest], step: str, within: asyncio.Timeout
) -> transfer_pb2.StageRequest | None:
    """The next message, which must be this step; None at the end of the stream. Raises TimeoutError."""
    async with within:
        request = await anext(aiter(requests), None)
    if request is not None and request.WhichOneof("step") != step:
        raise _out_of_order(step)
    return request


def _end_now(rest: asyncio.Timeout) -> None:
    if not rest.expired():
        rest.reschedule(asyncio.get_running_loop().time())


def _out_of_order(step: str) -> InvalidRequest:
    return InvalidRequest(f"this Stage must say {step} now", param=step)


def _alive(event: WatchUpdate | EngineStopped) -> WatchUpdate:
    """Returns the update. Raises the engine's error, or Unavailable, if it stopped."""
    match event:
        case WatchUpdate():
            return event
        case EngineStopped(failure=WireFailure() as failure):
            raise failure.error()
    raise Unavailable("the engine has left")


def _to_pb(update: WatchUpdate) -> list[transfer_pb2.WatchResponse]:
    messages = []
    if update.tokens:
        ready = transfer_pb2.WatchReady(tokens=update.tokens)
        messages.append(transfer_pb2.WatchResponse(ready=ready))
    if update.done:
        choices = [convert.first_token_to_pb(first) for first in update.choices]
        done = transfer_pb2.WatchDone(choices=choices, last_feature=update.last_feature)
        messages.append(transfer_pb2.WatchResponse(done=done))
    if update.failure is not None:
        failed = transfer_pb2.WatchFailed(status=convert.error_to_pb(update.failure.error()))
        messages.append(transfer_pb2.WatchResponse(failed=failed))
    return messages


@dataclass(frozen=True)
class StagedPages:
    """The pages of one lease, sent by way of staging.

    `slots`: the mapped staging, with the bytes of each slot that `share` needs. `handle` 0: the proof page.
    `puller`: the address of the caller's connection.
    """

    engine: EngineClient
    slots: Pages
    group: KvKind
    handle: int
    share: PageShare
    puller: str

    async def chunks(self, pages: Sequence[int]) -> AsyncGenerator[bytes, None]:
        """The bytes of `pages`, in order. All slots are freed, however the generator ends.

        Raises TransferFailed if the engine does not copy them, or the caller is too slow; Unavailable.
        """
        size = window_pages(self.slots.shape[1])
        later = asyncio.get_running_loop().call_later
        batches = (tuple(pages[i : i + size]) for i in range(0, len(pages), size))
        windows: deque[StagedWindow] = deque()
        try:
            while True:
                while len(windows) < AHEAD and (batch := next(batches, None)):
                    windows.append(StagedWindow(self, batch))
                if not windows:
                    return
                for data in chunks(self.slots, await windows[0].staged()):
                    slow = later(TAKEN_S, _end, windows)
                    try:
                        yield data
                    finally:
                        slow.cancel()
                    if windows[0].ended:
                        raise TransferFailed(f"the puller took nothing for {TAKEN_S:g} s")
                windows.popleft().end()
        finally:
            _end(windows)


class StagedWindow:
    """A window of pages of a lease, from the request to copy them until `end`."""

    def __init__(self, source: StagedPages, pages: tuple[int, ...]) -> None:
        self.ended = False
        self._engine = source.engine
        deadline = asyncio.get_running_loop().time() + STAGED_S
        self._answer: StreamBuffer[PagesStaged | EngineStopped] = StreamBuffer(2, deadline)
        self._call = source.engine.open(self._answer.put)
        handle, puller = source.handle, source.puller
        source.engine.send(StagePages(self._call, source.group, handle, pages, puller, source.share))

    async def staged(self) -> tuple[int, ...]:
        """The slots with the copies."""
        try:
            answer = await self._answer.get()
        except DeadlineExceeded:
            raise TransferFailed(f"the engine staged no pages within {STAGED_S:g} s") from None
        match answer:
            case PagesStaged(failure=None, slots=slots):
                return slots
            case PagesStaged(failure=failure) | EngineStopped(failure=failure) if failure is not None:
                raise failure.error()
        raise Unavailable("the engine has left")

    def end(self) -> None:
        """Frees the slots, also if the engine has yet to name them."""
        if not self.ended:
            self.ended = True
            self._engine.close(self._call)
            self._engine.send(UnstagePages(self._call))


def _end(windows: Iterable[StagedWindow]) -> None:
    for window in windows:
        window.end()
