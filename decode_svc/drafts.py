"""The decode engine's streams to its draft workers: one `DraftService.Session` each, kept open.

Batches go up and proposals come down; no call waits. Sequences whose batch cannot be sent are reported to the
engine as closed, and it may open them again: losing a draft worker costs speed only. An empty `DraftDown`
reports to the engine that a draft worker is connected. Messages over a direct channel between the engines do
not pass through this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable

import grpc
import msgspec

from eyas.common.wire import convert, rpc
from eyas.common.wire.convert import params_to_pb
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import (
    DraftChannel,
    DraftClose,
    DraftClosed,
    DraftCommit,
    DraftDown,
    DraftOpen,
    DraftProposal,
    DraftUp,
)
from protos import draft_pb2, draft_pb2_grpc

MAX_QUEUED = 64  # batches: about as many steps
CONNECT_S = 5.0
BACKOFF_S = 0.2  # the first one; each further one doubles, up to MAX_BACKOFF_S
MAX_BACKOFF_S = 1.0
_log = logging.getLogger("eyas.drafts")


class DraftStreams:
    """Relays the engine's `DraftUp` events to the draft workers that they name, and the answers back."""

    def __init__(self, engine: EngineClient, dial: rpc.Dial = rpc.channel) -> None:
        self._engine = engine
        self._dial = dial
        self._streams: dict[str, _DraftStream] = {}
        self._ending: set[asyncio.Task[None]] = set()
        engine.on(DraftUp, self._post)

    def follow(self, workers: Iterable[str]) -> None:
        """Opens a stream to each of these draft workers, and ends all others."""
        targets = set(workers)
        for worker in self._streams.keys() - targets:
            self._end(self._streams.pop(worker))
        for worker in targets - self._streams.keys():
            self._streams[worker] = _DraftStream(self._engine, worker, self._dial)

    async def close(self) -> None:
        """Ends all streams and waits until they have ended."""
        self.follow(())
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _post(self, up: DraftUp) -> None:
        if stream := self._streams.get(up.worker):  # else the stream's end is reported to the engine
            stream.post(up)

    def _end(self, stream: _DraftStream) -> None:
        stream.task.cancel()
        self._ending.add(stream.task)
        stream.task.add_done_callback(self._ending.discard)


class _DraftStream:
    """The stream to one draft worker, which is down until the worker answers, and after each disconnect."""

    def __init__(self, engine: EngineClient, worker: str, dial: rpc.Dial) -> None:
        self._engine = engine
        self._dial = dial
        self._worker = worker
        self._queue: deque[draft_pb2.DraftServiceSessionRequest] = deque()
        self._posted = asyncio.Event()
        self._down = True
        self._unsent_closes: list[DraftClose] = []  # of dropped batches; the next batch carries them
        self._unsent_channel: DraftChannel | None = None  # the engine offers it only once per connection
        self.task = asyncio.create_task(self._run())

    def post(self, up: DraftUp) -> None:
        if self._down:
            self._report(up, "the draft worker is down")
        elif len(self._queue) >= MAX_QUEUED:
            # The engine receives these sequences as closed, so it sends no `DraftClose` for them itself.
            self._unsent_closes += [*up.closes, *(DraftClose(c.seq, c.generation) for c in up.commits)]
            self._unsent_channel = up.channel or self._unsent_channel
            self._report(up, "the draft worker is behind")
        else:
            up = msgspec.structs.replace(up, channel=up.channel or self._unsent_channel)
            self._queue.append(_up_to_pb(up, self._unsent_closes))
            self._unsent_closes, self._unsent_channel = [], None
            self._posted.set()

    def _report(self, up: DraftUp, reason: str) -> None:
        lost = {(o.seq, o.generation) for o in up.opens} | {(c.seq, c.generation) for c in up.commits}
        if lost:
            self._send_down(closed=tuple(DraftClosed(seq, generation, reason) for seq, generation in lost))

    def _send_down(
        self,
        proposals: tuple[DraftProposal, ...] = (),
        closed: tuple[DraftClosed, ...] = (),
        no_channel: str = "",
    ) -> None:
        self._engine.send(DraftDown(proposals, closed, no_channel, worker=self._worker))

    async def _run(self) -> None:
        """Runs until it is cancelled, when the worker is no drafter for this engine any more."""
        async with self._dial(self._worker) as channel:
            try:
                await self._reconnect(channel)
            finally:
                self._mark_down("it has left")

    async def _reconnect(self, channel: grpc.aio.Channel) -> None:
        backoff = BACKOFF_S
        while True:
            try:
                await self._exchange(channel)
                reason = "it ended the stream"
            except TimeoutError:
                reason = "it cannot be reached"
            except grpc.aio.AioRpcError as error:
                reason = rpc.map_rpc_error(error).message
            except Exception as error:
                reason = rpc.as_eyas(error, "a draft stream").message
            backoff = min(2 * backoff, MAX_BACKOFF_S) if self._down else BACKOFF_S
            self._mark_down(reason)
            await asyncio.sleep(backoff)

    def _mark_down(self, reason: str) -> None:
        """Reports the end of the stream, and of all its sequences, once per disconnect."""
        self._queue.clear()
        self._unsent_closes, self._unsent_channel = [], None
        if not self._down:
            _log.warning("draft worker %s: %s", self._worker, reason)
            self._down = True
            self._send_down(closed=(DraftClosed(0, 0, f"draft worker {self._worker}: {reason}"),))

    async def _exchange(self, channel: grpc.aio.Channel) -> None:
        """Runs one stream until it ends. Raises TimeoutError if it cannot be opened, AioRpcError if it
        breaks.
        """
        async with asyncio.timeout(CONNECT_S):
            await channel.channel_ready()
        call = draft_pb2_grpc.DraftServiceStub(channel).Session()
        # Each call has a writer of its own: an iterator that gRPC still reads for an ended call would take
        # batches of the next one.
        writer = asyncio.create_task(self._write_to(call))
        try:
            async with asyncio.timeout(CONNECT_S):
                headers = await call.initial_metadata()
            if rpc.PEER in dict(headers):  # else the worker refused the call, which the loop below raises
                self._down = False
                self._send_down()
            async for pb in call:
                proposals = tuple(_proposal_from_pb(p) for p in pb.proposals)
                closed = tuple(DraftClosed(c.seq, c.generation, c.reason) for c in pb.closed)
                self._send_down(proposals, closed, pb.no_channel)
        finally:
            writer.cancel()
            call.cancel()

    async def _write_to(self, call: grpc.aio.StreamStreamCall) -> None:
        """Writes queued batches until the call ends. A failed write is not reported: the reader gets the same
        error.
        """
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while self._queue:
                    await call.write(self._queue.popleft())
                self._posted.clear()
                await self._posted.wait()


def _up_to_pb(up: DraftUp, unsent_closes: list[DraftClose]) -> draft_pb2.DraftServiceSessionRequest:
    return draft_pb2.DraftServiceSessionRequest(
        opens=[_open_to_pb(o) for o in up.opens],
        commits=[_commit_to_pb(c) for c in up.commits],
        closes=[draft_pb2.DraftClose(**msgspec.structs.asdict(c)) for c in (*unsent_closes, *up.closes)],
        channel=draft_pb2.DraftChannel(**msgspec.structs.asdict(up.channel)) if up.channel else None,
    )


def _open_to_pb(open: DraftOpen) -> draft_pb2.DraftOpen:
    return draft_pb2.DraftOpen(
        seq=open.seq,
        generation=open.generation,
        base_len=open.base_len,
        params=params_to_pb(open.params),
        choice=open.choice,
        handle=convert.handle_to_pb(open.handle) if open.handle is not None else None,
        attempt=open.attempt,
        place=open.place if open.place >= 0 else None,
        steps=open.steps,
    )


def _commit_to_pb(commit: DraftCommit) -> draft_pb2.DraftCommit:
    fields = msgspec.structs.asdict(commit)
    del fields["place"]  # only used for features that are sent over a direct channel
    return draft_pb2.DraftCommit(**fields)


def _proposal_from_pb(pb: draft_pb2.Proposal) -> DraftProposal:
    return DraftProposal(pb.seq, pb.generation, pb.base_len, tuple(pb.tokens), tuple(pb.parents))
