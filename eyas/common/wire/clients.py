"""Typed clients of a worker's services, as the gateway calls them: nouns in, nouns out, errors as EyasError.

They hide protobuf and gRPC from their callers. They hold no retries, no routing, and no state beyond the open
call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
import msgspec

from eyas.common.errors import Unavailable
from eyas.common.page_names import CacheNews
from eyas.common.types import Adapter, AdapterRoster, FirstToken, GenerationRequest, KvHandle, WorkerInfo
from eyas.common.wire import convert, rpc
from eyas.common.wire.convert_step import step_from_pb
from eyas.common.wire.links import PageLink, link_from_pb
from eyas.common.wire.message import (
    PagesLost,
    PrefillDone,
    PrefillStarted,
    RequestAdmitted,
    RequestFailed,
    RequestRejected,
    StepReply,
    WireFailure,
)
from protos import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

FLUSH_S = 15.0  # for a flush beyond its wait: an engine may be in the middle of a long step

CANCEL_S = 2.0  # for a prompt to be cancelled
ADAPTER_S = 120.0  # for an adapter to be read


class Heartbeat(msgspec.Struct, frozen=True):
    """A worker's load, as it says every second. Sequences and pages."""

    running: int
    waiting: int
    pages_used: int
    pages_total: int
    draining: bool = False
    stalled: bool = False


Reply = RequestAdmitted | RequestRejected | PagesLost | RequestFailed
SessionEvent = Reply | Heartbeat | StepReply
PrefillEvent = RequestAdmitted | PrefillStarted | PrefillDone


class DecodeSession:
    """One open `DecodeService.Session`. Sending never waits; iteration ends only by raising EyasError."""

    def __init__(self, stub: decode_pb2_grpc.DecodeServiceStub, worker: str) -> None:
        self._worker = worker
        # None: nothing more
        self._up: asyncio.Queue[decode_pb2.DecodeServiceSessionRequest | None] = asyncio.Queue()
        self._call = stub.Session(self._requests())

    def submit(self, request: GenerationRequest, attempt: int, attach: bool) -> None:
        """Queue a request: `attach` waits for its pages, else the worker computes what is missing."""
        message = decode_pb2.DecodeServiceSessionRequest()
        message.submit.attempt = attempt
        message.submit.source = decode_pb2.SOURCE_ATTACH if attach else decode_pb2.SOURCE_LOCAL
        convert.fill_request(message.submit.request, request)
        self._up.put_nowait(message)

    def attach(
        self, id: str, attempt: int, handles: tuple[KvHandle, ...], first_tokens: tuple[FirstToken, ...]
    ) -> None:
        """Sends the places of a waiting request's pages; without handles the worker computes the prompt."""
        attach = decode_pb2.Attach(
            id=id,
            attempt=attempt,
            handles=[convert.handle_to_pb(handle) for handle in handles],
            first_tokens=[convert.first_token_to_pb(first) for first in first_tokens],
        )
        self._up.put_nowait(decode_pb2.DecodeServiceSessionRequest(attach=attach))

    def cancel(self, id: str, choice: int | None = None) -> None:
        """End a choice, or the whole request. Unknown ids are no-ops."""
        self._up.put_nowait(
            decode_pb2.DecodeServiceSessionRequest(cancel=decode_pb2.Cancel(id=id, choice=choice))
        )

    async def __aiter__(self) -> AsyncIterator[SessionEvent]:
        try:
            async for message in self._call:
                event = _session_event(message)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        raise rpc.peer_lost(self._worker)

    def close(self) -> None:
        """End the stream; the worker cancels what it still holds of it."""
        self._call.cancel()
        self._up.put_nowait(None)  # gRPC reads on for a dead call, for ever

    async def _requests(self) -> AsyncIterator[decode_pb2.DecodeServiceSessionRequest]:
        while (message := await self._up.get()) is not None:
            yield message


def _session_event(message: decode_pb2.DecodeServiceSessionResponse) -> SessionEvent | None:
    """Converts a session's message; None for a kind of a newer version."""
    match message.WhichOneof("message"):
        case "step":
            return StepReply(step_from_pb(message.step))
        case "heartbeat":
            beat = message.heartbeat
            load = beat.running, beat.waiting, beat.pages_used, beat.pages_total
            return Heartbeat(*load, draining=beat.draining, stalled=beat.late)
        case "admitted":
            return RequestAdmitted(message.admitted.id, message.admitted.attempt)
        case "rejected":
            rejected = message.rejected
            return RequestRejected(rejected.id, rejected.attempt, _failure(rejected.status))
        case "lost":
            return PagesLost(message.lost.id, message.lost.attempt)
        case "failed":
            failed = message.failed
            choice = failed.choice if failed.HasField("choice") else None
            return RequestFailed(failed.id, failed.attempt, _failure(failed.status), choice)
    return None


def _failure(status: common_pb2.Status) -> WireFailure:
    return WireFailure.of(convert.error_from_pb(status))


# --- the clients ---------------------------------------------------------------------------------------


class DecodeSessionClient:
    """Opens Sessions on one worker's channel (which stays the caller's)."""

    def __init__(self, channel: grpc.aio.Channel, worker: str) -> None:
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._worker = worker

    def open(self) -> DecodeSession:
        """Opens a Session. It connects in the background; the caller closes it."""
        return DecodeSession(self._stub, self._worker)


class PrefillClient:
    """`PrefillService` of one worker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)

    async def prefill(
        self, request: GenerationRequest, attempt: int, offer_draft: bool
    ) -> AsyncIterator[PrefillEvent]:
        """The life of one prompt, within `request.timeout_s`; leaving the iterator cancels it.

        Raises what the worker refused or failed with; Unavailable if it went away.
        """
        message = prefill_pb2.PrefillRequest(attempt=attempt, offer_draft=offer_draft)
        convert.fill_request(message.request, request)
        call = self._stub.Prefill(message, timeout=request.timeout_s)
        try:
            async for event in call:
                match event.WhichOneof("event"):
                    case "admitted":
                        yield RequestAdmitted(request.id, attempt)
                    case "started":
                        handles = convert.handles_from_pb(event.started.handles)
                        yield PrefillStarted(request.id, attempt, handles)
                    case "done":
                        first = convert.first_tokens_from_pb(event.done.choices)
                        timings = convert.timings_from_pb(event.done.timings)
                        yield PrefillDone(request.id, attempt, first, timings)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        finally:
            call.cancel()

    async def cancel(self, id: str, attempt: int) -> None:
        """Ends a prompt: its `prefill` gives what the worker has said already, then raises Cancelled.

        Raises Unavailable if the worker cannot be asked, DeadlineExceeded if it takes too long.
        """
        try:
            await self._stub.Cancel(prefill_pb2.CancelRequest(id=id, attempt=attempt), timeout=CANCEL_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error


class InfoClient:
    """`WorkerService` of one worker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)

    async def info(self, timeout_s: float, known_epoch: int = 0) -> WorkerInfo:
        """Returns the worker's description, without its step rates if it is still at `known_epoch`.

        Raises EyasError: Unavailable if no worker answers there, DeadlineExceeded if it takes too long."""
        try:
            reply = await self._stub.Info(worker_pb2.InfoRequest(known_epoch=known_epoch), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        return convert.info_from_pb(reply)

    async def cached(self) -> AsyncGenerator[CacheNews, None]:
        """Streams the worker's prefix cache and its changes. Ends only by raising EyasError."""
        call = self._stub.Cached(worker_pb2.CachedRequest())
        try:
            async for message in call:
                yield convert.news_from_pb(message)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        finally:
            call.cancel()
        raise Unavailable("the worker says no more of its cache")

    async def probe_links(self, owner: str, timeout_s: float) -> list[PageLink]:
        """How pages of the worker at `owner` come to this one, by its ranks; measured now.

        Raises EyasError: what keeps this worker from asking the owner; Unavailable, DeadlineExceeded."""
        try:
            reply = await self._stub.ProbeLinks(worker_pb2.ProbeLinksRequest(owner=owner), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        return [link_from_pb(link) for link in reply.links]

    async def flush_cache(self, wait_s: float) -> int:
        """How many pages its prefix cache had, which is empty now.

        Raises EyasError: Busy if requests still run after `wait_s`; Unavailable, DeadlineExceeded."""
        try:
            request = worker_pb2.FlushCacheRequest(wait_s=wait_s)
            reply = await self._stub.FlushCache(request, timeout=wait_s + FLUSH_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        return int(reply.pages)

    async def load_adapter(self, adapter: Adapter) -> Adapter:
        """Has the worker read an adapter, which no request can have before `set_adapters`.

        Returns it with its id and rank. Raises EyasError: what is wrong with it; Unavailable,
        DeadlineExceeded.
        """
        try:
            request = worker_pb2.LoadAdapterRequest(adapter=convert.adapter_to_pb(adapter))
            reply = await self._stub.LoadAdapter(request, timeout=ADAPTER_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
        return convert.adapter_from_pb(reply.adapter)

    async def set_adapters(self, roster: AdapterRoster) -> None:
        """Has the worker load all of the roster and nothing else.

        Raises EyasError: Busy if the worker has a newer one, what is wrong with an adapter that it lacks;
        Unavailable, DeadlineExceeded.
        """
        try:
            request = worker_pb2.SetAdaptersRequest(adapters=convert.roster_to_pb(roster))
            await self._stub.SetAdapters(request, timeout=ADAPTER_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.map_rpc_error(error) from error
