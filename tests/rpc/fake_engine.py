"""An engine without a model: a deterministic script behind the real front, over either link.

The first id of a prompt says what happens: REFUSE, STALL and WEDGE (until `go_on` is set), DIE, else tokens
that are a function of (prompt, choice, index). `heard` lists every command in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from eyas.common.config import EngineConfig, WorkerConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import (
    EngineTimings,
    FinishCause,
    FirstToken,
    GenerationRequest,
    KvHandle,
    KvKind,
    RankPages,
    RequestChoice,
    Role,
    TokenEntry,
)
from eyas.common.wire.pool import PoolGeometry, PoolInfo, RankPool
from eyas.engine.ipc.adapter_messages import (
    AdapterCounts,
    AdapterLoaded,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from eyas.engine.ipc.link import EngineLink
from eyas.engine.ipc.messages import (
    AttachKv,
    CancelGeneration,
    ClosePull,
    DraftDown,
    DraftProposal,
    DraftUp,
    DrainEngine,
    EngineLoad,
    EngineReady,
    EngineStopped,
    Event,
    LeaseReleased,
    OpenPull,
    PagesLost,
    PrefillDone,
    PrefillPrompt,
    PrefillStarted,
    PullDone,
    PullFailed,
    PullReleased,
    ReleaseLease,
    ReleasePull,
    RequestAdmitted,
    RequestFailed,
    RequestRejected,
    ShutdownEngine,
    StepReply,
    SubmitGeneration,
    WatchOpened,
    WatchUpdate,
    WireFailure,
)
from eyas.worker.front import WorkerFront
from tests.rpc.local_link import LocalEngine, LocalFront

REFUSE, STALL, DIE, SLOW, WEDGE = 900, 901, 902, 903, 904
STALL_S = 30.0  # at most
FEATURE = b"\x00\x01\xff\x7f" * 3


def token(prompt: tuple[int, ...], choice: int, index: int) -> int:
    return (sum(prompt) + 10 * choice + index) % 1000


def request(*prompt: int, id: str = "r", tokens: int = 3, choices: int = 1) -> GenerationRequest:
    params = SamplingParams(max_tokens=tokens, seed=7)
    return GenerationRequest(
        id, prompt, params, tuple(RequestChoice(i) for i in range(choices)), timeout_s=10.0
    )


@dataclass
class Traits:
    """What differs between one fake worker and another."""

    layout_hashes: dict[str, str] = field(default_factory=lambda: {"target": "t", "draft": "d"})
    page_size: int = 16
    lease_valid: bool = True
    epoch: int = 5
    offered_epoch: int = 5
    synthetic: bool = False
    arithmetic: str = "fast"
    fingerprint: str = "f"
    draft_fingerprint: str = "g"


class FakeEngine:
    def __init__(self, config: EngineConfig, link: EngineLink, traits: Traits | None = None) -> None:
        self._config = config
        self._link = link
        self.traits = traits or Traits()
        self.go_on = threading.Event()
        self.heard: list[Any] = []
        self.post: list[Event] = []  # what a test wants said next
        self._jobs: dict[str, SubmitGeneration] = {}
        self._at: dict[tuple[str, int], int] = {}
        self._attempts: dict[str, int] = {}
        self._pulls: dict[int, str] = {}
        self._first: dict[int, tuple[FirstToken, ...]] = {}
        self.adapters: set[str] = set()

    def run(self) -> None:
        self._link.send([self._ready()])
        progress = 0
        while True:
            commands = self._link.recv(0.005)
            self.heard += commands
            if any(isinstance(command, ShutdownEngine) for command in commands):
                break
            if self.of(DrainEngine) and not self._at:
                break
            events, self.post = self.post, []
            for command in commands:
                events += self._answer(command)
            events += self._step()
            progress += 1
            busy = bool(self._at)
            load = EngineLoad(progress, busy, len(self._at), len(self._jobs), 2 * len(self._at))
            slots = AdapterCounts(tuple(sorted(self.adapters)[:1]))  # there is room for one
            events.append(msgspec.structs.replace(load, heard=len(self.heard), adapters=slots))
            self._link.send(events)
        self._link.send([EngineStopped()])

    def of(self, kind: type) -> list[Any]:
        return [command for command in self.heard if isinstance(command, kind)]

    def _ready(self) -> EngineReady:
        geometry = PoolGeometry(8, self.traits.page_size, layers=1, kv_heads=1, head_dim=4, dtype="float32")
        rank = RankPool(0, 0, {"grpc": {}})
        return EngineReady(
            epoch=self.traits.epoch,
            model="fake",
            fingerprint=self.traits.fingerprint,
            draft_fingerprint=self.traits.draft_fingerprint,
            context_length=128,
            vocab_size=1000,
            pages_total=8,
            pools={g: PoolInfo(5, h, geometry, (rank,)) for g, h in self.traits.layout_hashes.items()},
            files={},
            slowest_step_s=0.1,
            synthetic=self.traits.synthetic,
            arithmetic=self.traits.arithmetic,
        )

    # --- commands -----------------------------------------------------------------------------------------

    def _answer(self, command: Any) -> list[Event]:
        match command:
            case SubmitGeneration(request, attempt) | PrefillPrompt(request, attempt) if self.of(DrainEngine):
                return [
                    RequestRejected(request.id, attempt, WireFailure("unavailable", "the worker is draining"))
                ]
            case SubmitGeneration(request, attempt) | PrefillPrompt(request, attempt) if (
                request.prompt_ids[0] == REFUSE
            ):
                return [RequestRejected(request.id, attempt, WireFailure("overloaded", "the queue is full"))]
            case SubmitGeneration(request, attempt) | PrefillPrompt(request, attempt) if (
                request.adapter and request.adapter not in self.adapters
            ):
                failure = WireFailure("model_not_found", f"the adapter {request.adapter} is not loaded")
                return [RequestRejected(request.id, attempt, failure)]
            case LoadAdapter(call, path, _, id):
                return [self._load(call, Path(path) / "adapter_config.json", id)]
            case UnloadAdapter(call, id):
                self.adapters.discard(id)
                return [AdapterUnloaded(call)]
            case SubmitGeneration(request, attempt, attach):
                self._jobs[request.id], self._attempts[request.id] = command, attempt
                if not attach:
                    self._begin(request, 0)
                return [RequestAdmitted(request.id, attempt)]
            case PrefillPrompt(request, attempt):
                return self._prefill(request, attempt)
            case AttachKv(id, attempt, handles):
                self._attempts[id] = attempt
                self._pulls[attempt] = id
                return [OpenPull(attempt, handle, attempt) for handle in handles]
            case CancelGeneration(id):
                self._forget(id)
            case WatchOpened(watch, handle):
                return [WatchUpdate(watch, tokens=2), self._watch_end(watch, handle.id)]
            case ReleaseLease(call):
                return [LeaseReleased(call, self.traits.lease_valid)]
            case PullDone(pull):
                return [ReleasePull(pull)]
            case PullFailed(pull):
                return [self._lost(pull)]
            case PullReleased(pull, valid):
                if not valid:
                    return [self._lost(pull)]
                self._begin(self._jobs[self._pulls[pull]].request, 0)  # token 0 is repeated
                return [ClosePull(pull)]
            case DraftUp(peer=peer):
                return [DraftDown(tuple(_proposal(c) for c in command.commits), peer=peer)]
        return []

    def _load(self, call: int, file: Path, wanted: str) -> AdapterLoaded:
        """An adapter's file is its content, and one that says "bad" is refused."""
        text = file.read_text() if file.exists() else "bad"
        id = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        if text == "bad" or wanted not in ("", id):
            return AdapterLoaded(call, failure=WireFailure("invalid_request", f"it is {text}", "lora_path"))
        self.adapters.add(id)
        return AdapterLoaded(call, id, rank=8, host_bytes=len(text))

    def _prefill(self, request: GenerationRequest, attempt: int) -> list[Event]:
        events: list[Event] = [RequestAdmitted(request.id, attempt)]
        if request.prompt_ids[0] == SLOW:
            return events
        if request.prompt_ids[0] == DIE:
            return [*events, RequestFailed(request.id, attempt, WireFailure("deadline_exceeded", "too late"))]
        first = tuple(FirstToken(c.index, token(request.prompt_ids, c.index, 0)) for c in request.choices)
        handle = KvHandle(
            self._config.worker,
            self.traits.offered_epoch,
            0,
            len(self._first) + 1,
            KvKind.TARGET,
            "t",
            len(request.prompt_ids),
            (RankPages(0, (1,)),),
        )
        self._first[handle.id] = first
        events.append(PrefillStarted(request.id, attempt, (handle,)))
        events.append(PrefillDone(request.id, attempt, first, EngineTimings(prefill_ms=1.5)))
        return events

    def _watch_end(self, watch: int, handle: int) -> WatchUpdate:
        if handle not in self._first:
            return WatchUpdate(watch, failure=WireFailure("transfer_failed", "no such handle"))
        return WatchUpdate(watch, done=True, choices=self._first[handle], last_feature=FEATURE)

    def _lost(self, pull: int) -> PagesLost:
        return PagesLost(self._pulls[pull], self._attempts[self._pulls[pull]])

    # --- steps --------------------------------------------------------------------------------------------

    def _begin(self, request: GenerationRequest, at: int) -> None:
        if request.prompt_ids[0] == STALL:
            self._link.send([EngineLoad(1, True, 1, 0, 0)])
            self.go_on.wait(STALL_S)
        if request.prompt_ids[0] == WEDGE:  # no command before it: an idle load was on its way when it came
            self._link.send([EngineLoad(1, False, 0, 0, 0)])
            self.go_on.wait(STALL_S)
        if request.prompt_ids[0] == DIE:
            os._exit(3)
        self._at.update({(request.id, choice.index): at for choice in request.choices})

    def _forget(self, id: str) -> None:
        self._jobs.pop(id, None)
        self._at = {key: at for key, at in self._at.items() if key[0] != id}

    def _step(self) -> list[Event]:
        entries = []
        for (id, choice), at in list(self._at.items()):
            request = self._jobs[id].request
            last = at + 1 == request.params.max_tokens
            entries.append(
                TokenEntry(
                    id=id,
                    attempt=self._attempts[id],
                    choice=choice,
                    index=at,
                    tokens=(token(request.prompt_ids, choice, at),),
                    finish=FinishCause.LENGTH if last else None,
                    accepted=1,
                    offered=2,
                )
            )
            self._at[id, choice] = at + 1
            if last:
                del self._at[id, choice]
        return [StepReply(tuple(entries))] if entries else []


def _proposal(commit: Any) -> DraftProposal:
    """Echoes the commit, and proves that the features came through untouched."""
    ids = (*commit.tokens, sum(commit.features))
    return DraftProposal(commit.seq, commit.generation, commit.base_len, ids, tuple(range(-1, len(ids) - 1)))


def main(config: EngineConfig, endpoint: str) -> None:
    """The engine process of test workers."""
    from eyas.worker import engine_main

    engine_main.serve(lambda link: FakeEngine(config, link).run(), endpoint)


def refuse(config: EngineConfig, endpoint: str) -> None:
    """An engine process whose model is bad."""
    from eyas.worker import engine_main

    def load(link: EngineLink) -> None:
        raise ConfigError(f"model {config.model} cannot be read")

    engine_main.serve(load, endpoint)


class FakeWorker:
    """A real front around a fake engine on a thread; `changes` are those of its front's config."""

    def __init__(
        self,
        roles: tuple[Role, ...],
        traits: Traits | None = None,
        max_loras: int = 0,
        **changes: Any,
    ) -> None:
        self._config = WorkerConfig(engine=EngineConfig(roles=roles, max_loras=max_loras), **changes)
        self._traits = traits or Traits()

    async def start(self) -> FakeWorker:
        link = LocalFront()
        self.front = WorkerFront(self._config, link)
        self.address = await self.front.start()
        config = dataclasses.replace(self._config.engine, worker=self.address)
        self.link = LocalEngine(link)
        self.engine = FakeEngine(config, self.link, self._traits)
        self._thread = threading.Thread(target=self.engine.run, daemon=True)
        self._thread.start()
        self._running = asyncio.create_task(self.front.run())
        await asyncio.wait_for(asyncio.shield(self.front.ready), 30)
        return self

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def stop(self) -> None:
        await self.front.stop()
        await asyncio.wait_for(self._running, 30)
        self._thread.join(5)

    async def heard(self, kind: type, count: int = 1) -> list[Any]:
        """The commands of a kind, once there are `count` of them."""
        async with asyncio.timeout(30):
            while len(self.engine.of(kind)) < count:
                await asyncio.sleep(0.005)
        return self.engine.of(kind)


@contextlib.asynccontextmanager
async def worker(*roles: Role, traits: Traits | None = None, **changes: Any) -> AsyncIterator[FakeWorker]:
    started = await FakeWorker(roles, traits, **changes).start()
    try:
        yield started
    finally:
        await started.stop()
