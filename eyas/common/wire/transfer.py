"""`TransferService` on the wire: its client, which is a puller of KV pages, and its messages.

The client asks and relays, bytes of pages too, in plain values. The puller's engine decides what an answer
means for a request. Every failure is an EyasError. Messages say what a worker has of KV pages;
`FetchResponse` is made by hand, for protobuf would copy every byte of a page twice more at each end. Its
bytes are those of the message in protos/transfer.proto; any gRPC client can read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import grpc
import msgspec

from eyas.common.errors import ConfigError, TransferFailed
from eyas.common.types import ALL_OF_RANK_0, FirstToken, KvHandle, KvKind, PageShare
from eyas.common.wire import convert, rpc
from eyas.common.wire.pool import PoolGeometry, PoolInfo, RankPool
from protos import transfer_pb2, transfer_pb2_grpc

HANDSHAKE_S = 5.0
RELEASE_S = 5.0
RESTS_S = 0.5  # a call that rested longer is not used again: its owner ends it after 2 s
_TAG = b"\x0a"  # field 1, length-delimited


class WatchReady(msgspec.Struct, frozen=True):
    """Rows below `tokens` can be read now."""

    tokens: int


class WatchDone(msgspec.Struct, frozen=True):
    """The prompt is complete. `last_feature`: float32 bytes for the drafter, empty without one."""

    choices: tuple[FirstToken, ...]
    last_feature: bytes


class StagedSlots(NamedTuple):
    """Copies that an owner holds for us. `read`: says that we have them; raises unless they were held."""

    slots: tuple[int, ...]
    read: Callable[[], Awaitable[None]]


Staging: TypeAlias = contextlib.AbstractAsyncContextManager[StagedSlots]
"""The slots are reserved until it is left."""


class _RestingCalls:
    """Calls to Stage whose window is over: the next one goes by them. To make a call costs both ends twice
    what is said by it.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[float, grpc.aio.StreamStreamCall]] = []  # since when, the latest last

    def take(self) -> grpc.aio.StreamStreamCall | None:
        """One that rests, and not for long: the owner hangs up on those that do."""
        oldest = asyncio.get_running_loop().time() - RESTS_S
        while self._calls and self._calls[0][0] < oldest:
            self._calls.pop(0)[1].cancel()
        while self._calls:
            call = self._calls.pop()[1]
            if not call.done():
                return call
        return None

    def give(self, call: grpc.aio.StreamStreamCall) -> None:
        """It rests from now on."""
        self._calls.append((asyncio.get_running_loop().time(), call))


class TransferClient:
    """Calls the owner behind `channel`, which stays the caller's."""

    def __init__(self, channel: grpc.aio.Channel, worker: str) -> None:
        self.channel = channel
        self._stub = transfer_pb2_grpc.TransferServiceStub(channel)
        self._fetch = channel.unary_stream(
            "/eyas.internal.v1.TransferService/Fetch",
            request_serializer=transfer_pb2.FetchRequest.SerializeToString,
        )
        self._worker = worker
        self._calls = _RestingCalls()

    async def handshake(self, group: KvKind, layout_hash: str) -> PoolInfo:
        """The owner's pool of this group.

        Raises NotFound if it has none, ConfigError for sizes that no pool has; Unavailable, DeadlineExceeded.
        """
        request = transfer_pb2.HandshakeRequest(group=convert.group_to_pb(group), layout_hash=layout_hash)
        try:
            reply = await self._stub.Handshake(request, timeout=HANDSHAKE_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        return pool_from_pb(reply)

    async def watch(self, handle: KvHandle, attempt: int) -> AsyncGenerator[WatchReady | WatchDone, None]:
        """Reports what becomes readable. The lease lives while this is open; it ends only by raising.

        Raises TransferFailed if the owner closes it, or the error that the owner reports.
        """
        request = transfer_pb2.WatchRequest(handle=convert.handle_to_pb(handle), attempt=attempt)
        call = self._stub.Watch(request)
        try:
            async for message in call:
                match message.WhichOneof("event"):
                    case "ready":
                        yield WatchReady(message.ready.tokens)
                    case "done":
                        choices = convert.first_tokens_from_pb(message.done.choices)
                        yield WatchDone(choices, message.done.last_feature)
                    case "failed":
                        raise convert.error_from_pb(message.failed.status)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        finally:
            call.cancel()
        raise TransferFailed(f"worker {self._worker} closed the Watch of handle {handle.id}")

    async def release(self, handle: KvHandle, attempt: int) -> bool:
        """Gives the pages back. Whether the lease never lapsed, so that what was read may be used."""
        return await self._release(_released(handle, attempt))

    async def give_back(self, handle: KvHandle, attempt: int) -> None:
        """Gives the pages back, one way: the owner's front answers at once, and its engine not at all."""
        request = _released(handle, attempt)
        request.one_way = True
        await self._release(request)

    async def _release(self, request: transfer_pb2.ReleaseRequest) -> bool:
        try:
            reply = await self._stub.Release(request, timeout=RELEASE_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        return bool(reply.valid)

    def fetch(
        self, handle: KvHandle, attempt: int, pages: Sequence[int], share: PageShare = ALL_OF_RANK_0
    ) -> AsyncGenerator[memoryview, None]:
        """The bytes of some of the handle's pages, in order, while its Watch is open.

        Raises TransferFailed if the owner has no such Watch, InvalidRequest for pages that the handle
        does not name, Unavailable if the owner is gone.
        """
        return self._chunks(_of_handle(handle, attempt, pages, share))

    def fetch_proof(
        self, group: KvKind, epoch: int, pages: Sequence[int], share: PageShare = ALL_OF_RANK_0
    ) -> AsyncGenerator[memoryview, None]:
        """The bytes of the proof page of a group, as often as `pages` names it. No Watch is needed."""
        return self._chunks(_of_proof(group, epoch, pages, share))

    def stage(
        self, handle: KvHandle, attempt: int, pages: Sequence[int], share: PageShare = ALL_OF_RANK_0
    ) -> Staging:
        """Copies of some of the handle's pages in the owner's staging. Errors as of `fetch`."""
        return self._staged(_of_handle(handle, attempt, pages, share))

    def stage_proof(
        self, group: KvKind, epoch: int, pages: Sequence[int], share: PageShare = ALL_OF_RANK_0
    ) -> Staging:
        """Copies of the proof page of a group, as often as `pages` names it. No Watch is needed."""
        return self._staged(_of_proof(group, epoch, pages, share))

    @contextlib.asynccontextmanager
    async def _staged(self, request: transfer_pb2.FetchRequest) -> AsyncIterator[StagedSlots]:
        call, pages = self._calls.take() or self._stub.Stage(), transfer_pb2.StageRequest(pages=request)
        held = asyncio.Event()
        try:
            first = await _say(call, pages)
            if first == grpc.aio.EOF:  # it rested, and its owner has ended it just now
                call = self._stub.Stage()
                first = await _say(call, pages)
            slots = self._checked(first, "slots").slots.slots
            yield StagedSlots(tuple(slots), functools.partial(self._read, call, held))
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        finally:
            if held.is_set():
                self._calls.give(call)
            else:
                call.cancel()

    async def _read(self, call: grpc.aio.StreamStreamCall, held: asyncio.Event) -> None:
        answer = await _say(call, transfer_pb2.StageRequest(read=transfer_pb2.StageRead()))
        self._checked(answer, "held")
        held.set()

    def _checked(self, answer: Any, event: str) -> transfer_pb2.StageResponse:
        if answer == grpc.aio.EOF or answer.WhichOneof("event") != event:
            raise TransferFailed(f"worker {self._worker} did not say {event} of the pages that it staged")
        return cast(transfer_pb2.StageResponse, answer)

    async def _chunks(self, request: transfer_pb2.FetchRequest) -> AsyncGenerator[memoryview, None]:
        call = self._fetch(request)
        try:
            async for data in call:
                yield decode(data)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        finally:
            call.cancel()


async def _say(call: grpc.aio.StreamStreamCall, step: transfer_pb2.StageRequest) -> Any:
    """The answer to a step of a Stage; EOF: the call has ended."""
    with contextlib.suppress(asyncio.InvalidStateError):  # its answer says why
        await call.write(step)
    return await call.read()


def _released(handle: KvHandle, attempt: int) -> transfer_pb2.ReleaseRequest:
    return transfer_pb2.ReleaseRequest(epoch=handle.epoch, id=handle.id, attempt=attempt)


def _of_handle(
    handle: KvHandle, attempt: int, pages: Sequence[int], share: PageShare
) -> transfer_pb2.FetchRequest:
    request = _of_proof(handle.group, handle.epoch, pages, share)
    request.id, request.attempt = handle.id, attempt
    return request


def _of_proof(group: KvKind, epoch: int, pages: Sequence[int], share: PageShare) -> transfer_pb2.FetchRequest:
    return transfer_pb2.FetchRequest(
        epoch=epoch,
        pages=pages,
        group=convert.group_to_pb(group),
        rank=share.rank,
        first_head=share.first,
        heads=share.heads,
        on_device=share.on_device,
    )


def pool_to_pb(pool: PoolInfo) -> transfer_pb2.HandshakeResponse:
    """Writes a pool's description for a puller: the answer to its handshake."""
    names = pool.geometry.__struct_fields__
    return transfer_pb2.HandshakeResponse(
        layout_hash=pool.layout_hash,
        epoch=pool.epoch,
        geometry=transfer_pb2.Geometry(**{name: getattr(pool.geometry, name) for name in names}),
        ranks=[
            transfer_pb2.RankPool(
                rank=rank.rank,
                checksum=rank.checksum,
                exports=[transfer_pb2.PoolExport(backend=b, fields=f) for b, f in rank.exports.items()],
            )
            for rank in pool.ranks
        ],
        board=pool.board,
        arithmetic=pool.arithmetic,
    )


def pool_from_pb(pb: transfer_pb2.HandshakeResponse) -> PoolInfo:
    """Raises ConfigError for a geometry that no pool has."""
    try:
        geometry = PoolGeometry(
            **{name: getattr(pb.geometry, name) for name in PoolGeometry.__struct_fields__}
        )
    except ValueError as error:
        raise ConfigError(f"the peer's KV geometry makes no sense: {error}") from error
    ranks = tuple(
        RankPool(rank.rank, rank.checksum, {export.backend: dict(export.fields) for export in rank.exports})
        for rank in pb.ranks
    )
    return PoolInfo(pb.epoch, pb.layout_hash, geometry, ranks, dict(pb.board), pb.arithmetic)


def encode(data: bytes) -> bytes:
    """FetchResponse(data=data), serialized. `data` is not empty."""
    size, length = len(data), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return b"".join((_TAG, length, data))


def decode(message: bytes) -> memoryview:
    """The data of a serialized FetchResponse, not copied. Raises TransferFailed for any other message."""
    size, at, more = 0, 1, message[:1] == _TAG
    while more and at < min(len(message), 6):
        byte = message[at]
        size |= (byte & 0x7F) << 7 * (at - 1)
        at, more = at + 1, byte > 0x7F
    if more or at + size != len(message):
        raise TransferFailed("the owner of the pages sent something that is no chunk of them")
    return memoryview(message)[at:]
