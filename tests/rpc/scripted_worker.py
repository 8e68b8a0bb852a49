"""A worker without an engine: real gRPC services whose tokens are a function of (prompt, choice, index).

Tests script what goes wrong by setting its fields, and read what it was told from `heard`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from eyas.common.errors import EyasError, Unavailable
from eyas.common.types import (
    EngineTimings,
    FinishCause,
    FirstToken,
    GenerationRequest,
    KvHandle,
    KvKind,
    RequestChoice,
    Role,
    TokenEntry,
    WorkerInfo,
)
from eyas.common.wire import convert, rpc
from eyas.common.wire.convert_step import step_to_pb
from eyas.common.wire.links import PageLink, link_to_pb
from protos import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

CONTEXT_LENGTH = 2048


def token(prompt: tuple[int, ...], choice: int, index: int) -> int:
    return (sum(prompt) * 31 + choice * 101 + index * 7) % 997


def expected(request: GenerationRequest, choice: int = 0) -> list[int]:
    return [token(request.prompt_ids, choice, i) for i in range(request.params.max_tokens)]


@dataclass
class Script:
    """What this worker does wrong, and when."""

    starting: bool = False  # it says that its engine still loads, and refuses sessions
    late: bool = False  # it says that its engine is silent, and refuses requests
    stalled: bool = False  # it says that its engine makes no progress, and refuses sessions
    refuse_session: EyasError | None = None
    refuse_submit: EyasError | None = None
    refuse_after_s: float = 0.0
    refuse_prefill: EyasError | None = None
    fail_prefill_after: str = ""  # "admitted", "started": the call then ends with UNAVAILABLE
    silent: bool = False  # what is asked is heard and not answered
    hold_prefill_at: str = ""  # "admitted", "started": the call then waits until it is
    released: asyncio.Event = field(default_factory=asyncio.Event)
    finish_first: tuple[int, ...] = ()  # choices that finish at token 0
    lose: int = 0  # how many Attaches are answered by Lost,
    lose_after_s: float = 0.0  # after this time
    stop_at: int | None = None  # output index at which decode falls silent, as long as it says so
    muted: bool = False  # no heartbeats
    waiting: int = 0  # requests in its queue, as it says
    trouble: str = ""  # what it does without, as it says
    draining: bool = False  # as heartbeats say; it does not serve then
    step_s: float = 0.002
    tokens_a_step: int = 2
    links: list[PageLink] = field(default_factory=list)  # as it measures them, from any owner
    path: str = ""  # how decode says that the pages came, with its first entry; empty: it says nothing


@dataclass
class ScriptedWorker(
    decode_pb2_grpc.DecodeServiceServicer,
    prefill_pb2_grpc.PrefillServiceServicer,
    transfer_pb2_grpc.TransferServiceServicer,
    worker_pb2_grpc.WorkerServiceServicer,
):
    roles: tuple[Role, ...]
    fingerprint: str = "model-a"
    synthetic: bool = False
    arithmetic: str = "fast"
    tokenizer: str = ""
    vocab_size: int = 1000
    context_length: int = CONTEXT_LENGTH
    script: Script = field(default_factory=Script)
    heard: list[tuple[str, Any]] = field(default_factory=list)
    prefills_cancelled: int = 0
    prefills_done: int = 0
    _sessions: list[asyncio.Queue[decode_pb2.DecodeServiceSessionResponse | None]] = field(
        default_factory=list
    )
    address: str = ""

    async def start(self, port: int = 0) -> ScriptedWorker:
        self._server = rpc.server()
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, self._server)
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(self, self._server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        port = rpc.bind(self._server, "127.0.0.1", port)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    def end_sessions(self) -> None:
        for down in self._sessions:
            down.put_nowait(None)

    async def kill(self) -> None:
        await self._server.stop(None)

    def of(self, kind: str) -> list[Any]:
        return [message for name, message in self.heard if name == kind]

    async def Cached(self, request: worker_pb2.CachedRequest, context: Any) -> AsyncIterator[Any]:
        raise Unavailable("it has no cache")
        yield

    async def Info(self, request: worker_pb2.InfoRequest, context: Any) -> worker_pb2.InfoResponse:
        return convert.info_to_pb(
            WorkerInfo(
                self.address,
                self.roles,
                1,
                "m",
                self.fingerprint,
                "d",
                self.context_length,
                self.vocab_size,
                100,
                serving=not (
                    self.script.starting or self.script.stalled or self.script.late or self.script.draining
                ),
                synthetic=self.synthetic,
                arithmetic=self.arithmetic,
                tokenizer=self.tokenizer,
                starting=self.script.starting,
                stalled=self.script.stalled or self.script.late,
                waiting=self.script.waiting,
                trouble=self.script.trouble,
            )
        )

    async def ProbeLinks(
        self, request: worker_pb2.ProbeLinksRequest, context: Any
    ) -> worker_pb2.ProbeLinksResponse:
        return worker_pb2.ProbeLinksResponse(links=map(link_to_pb, self.script.links))

    # --- prefill ---

    async def Prefill(
        self, message: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self.heard.append(("prefill", message))
        request = convert.request_from_pb(message.request, self.context_length)
        if self.script.refuse_prefill:
            raise self.script.refuse_prefill
        try:
            if self.script.silent:
                await asyncio.Event().wait()
            yield prefill_pb2.PrefillResponse(admitted=prefill_pb2.PrefillAdmitted())
            await self._phase("admitted")
            handle = KvHandle(
                self.address, 1, 0, len(self.heard), KvKind.TARGET, "l", len(request.prompt_ids), ()
            )
            started = prefill_pb2.PrefillStarted(handles=[convert.handle_to_pb(handle)])
            yield prefill_pb2.PrefillResponse(started=started)
            await self._phase("started")
            first = [convert.first_token_to_pb(self._first(request, c)) for c in request.choices]
            timings = convert.timings_to_pb(EngineTimings(prefill_ms=1.0))
            yield prefill_pb2.PrefillResponse(done=prefill_pb2.PrefillDone(choices=first, timings=timings))
            self.prefills_done += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.prefills_cancelled += 1
            raise

    async def Cancel(self, request: prefill_pb2.CancelRequest, context: Any) -> prefill_pb2.CancelResponse:
        self.heard.append(("cancel_prompt", request))
        return prefill_pb2.CancelResponse()

    async def Release(
        self, request: transfer_pb2.ReleaseRequest, context: Any
    ) -> transfer_pb2.ReleaseResponse:
        self.heard.append(("release", request))
        return transfer_pb2.ReleaseResponse()

    async def _phase(self, name: str) -> None:
        if self.script.fail_prefill_after == name:
            raise rpc.peer_lost(self.address)
        if self.script.hold_prefill_at == name:
            await self.script.released.wait()

    def _first(self, request: GenerationRequest, choice: RequestChoice) -> FirstToken:
        finish = FinishCause.STOP if choice.index in self.script.finish_first else None
        return FirstToken(choice.index, token(request.prompt_ids, choice.index, 0), finish=finish)

    # --- decode ---

    async def Session(
        self, messages: AsyncIterator[decode_pb2.DecodeServiceSessionRequest], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeServiceSessionResponse]:
        if self.script.starting:
            raise Unavailable("the worker is still loading")
        if self.script.stalled:
            raise Unavailable("the engine made no progress")
        if self.script.refuse_session:
            self.heard.append(("refused", None))
            raise self.script.refuse_session
        down: asyncio.Queue[decode_pb2.DecodeServiceSessionResponse | None] = asyncio.Queue()
        self._sessions.append(down)
        running: dict[str, asyncio.Task[None]] = {}
        helpers = [
            asyncio.create_task(self._read(messages, down, running)),
            asyncio.create_task(self._beat(down)),
        ]
        try:
            while (message := await down.get()) is not None:
                yield message
        finally:
            for task in [*helpers, *running.values()]:
                task.cancel()

    async def _beat(self, down: asyncio.Queue[decode_pb2.DecodeServiceSessionResponse]) -> None:
        while True:
            beat = decode_pb2.Heartbeat(draining=self.script.draining, late=self.script.late)
            if not self.script.muted:
                down.put_nowait(decode_pb2.DecodeServiceSessionResponse(heartbeat=beat))
            await asyncio.sleep(0.2)

    async def _read(
        self,
        messages: AsyncIterator[decode_pb2.DecodeServiceSessionRequest],
        down: asyncio.Queue[decode_pb2.DecodeServiceSessionResponse],
        running: dict[str, asyncio.Task[None]],
    ) -> None:
        waiting: dict[str, GenerationRequest] = {}
        async for up in messages:
            kind = up.WhichOneof("message")
            message = getattr(up, kind)
            self.heard.append((kind, message))
            if self.script.silent:
                continue
            if kind == "submit":
                request = convert.request_from_pb(message.request, self.context_length)
                names = {"id": request.id, "attempt": message.attempt}
                if self.script.refuse_submit:
                    status = convert.error_to_pb(self.script.refuse_submit)
                    rejected = decode_pb2.Rejected(status=status, **names)
                    reply = decode_pb2.DecodeServiceSessionResponse(rejected=rejected)
                    loop = asyncio.get_running_loop()
                    loop.call_later(self.script.refuse_after_s, down.put_nowait, reply)
                    continue
                down.put_nowait(
                    decode_pb2.DecodeServiceSessionResponse(admitted=decode_pb2.Admitted(**names))
                )
                waiting[request.id] = request
                if message.source == decode_pb2.SOURCE_LOCAL:
                    work = self._generate(request, message.attempt, down)
                    running[request.id] = asyncio.create_task(work)
            elif kind == "attach":
                names = {"id": message.id, "attempt": message.attempt}
                if message.handles and self.script.lose:
                    self.script.lose -= 1
                    lost = decode_pb2.DecodeServiceSessionResponse(lost=decode_pb2.Lost(**names))
                    asyncio.get_running_loop().call_later(self.script.lose_after_s, down.put_nowait, lost)
                    continue
                request = waiting[message.id]
                running[message.id] = asyncio.create_task(self._generate(request, message.attempt, down))
            elif kind == "cancel" and not message.HasField("choice"):
                task = running.pop(message.id, None)
                if task:
                    task.cancel()

    async def _generate(
        self,
        request: GenerationRequest,
        attempt: int,
        down: asyncio.Queue[decode_pb2.DecodeServiceSessionResponse],
    ) -> None:
        at = {c.index: len(c.output_ids) for c in request.choices if c.index not in self.script.finish_first}
        end = request.params.max_tokens
        while any(index < end for index in at.values()):
            await asyncio.sleep(self.script.step_s)
            entries = []
            for choice, index in at.items():
                stop = min(index + self.script.tokens_a_step, end)
                while self.script.stop_at is not None and stop > self.script.stop_at:
                    await asyncio.sleep(0.01)
                if index < end:
                    ids = tuple(token(request.prompt_ids, choice, i) for i in range(index, stop))
                    finish = FinishCause.LENGTH if stop == end else None
                    told = index == 0 and self.script.path
                    timings = EngineTimings(transfer_ms=1.0, transfer_path=self.script.path) if told else None
                    entry = TokenEntry(
                        request.id, attempt, choice, index, ids, finish=finish, timings=timings
                    )
                    entries.append(entry)
                    at[choice] = stop
            down.put_nowait(decode_pb2.DecodeServiceSessionResponse(step=step_to_pb(entries)))


@contextlib.asynccontextmanager
async def workers(*roles: tuple[Role, ...]) -> AsyncIterator[list[ScriptedWorker]]:
    """Started workers of these roles, stopped on exit."""
    started = [await ScriptedWorker(r).start() for r in roles]
    try:
        yield started
    finally:
        await asyncio.gather(*(worker.kill() for worker in started))


@contextlib.asynccontextmanager
async def started(*workers: ScriptedWorker) -> AsyncIterator[list[ScriptedWorker]]:
    try:
        yield [await each.start() for each in workers]
    finally:
        await asyncio.gather(*(each.kill() for each in workers))
