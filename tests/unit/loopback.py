"""Engines on threads, joined without a wire: what their fronts would relay is handed over directly.

For tests of everything between the engines: prefill -> transfer -> decode -> draft, in one process.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from eyas.common.config import EngineConfig
from eyas.common.types import FinishCause, GenerationRequest, KvHandle, Role, TokenEntry
from eyas.common.weights import WeightsCommand, WeightsReply
from eyas.common.wire.control import ControlCommand
from eyas.engine.ipc.adapter_messages import AdapterLoaded, AdapterUnloaded, LoadAdapter
from eyas.engine.ipc.messages import (
    AttachKv,
    ClosePull,
    Command,
    ControlEngine,
    DraftDown,
    DraftUp,
    EngineControlled,
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
    PullMet,
    PullReady,
    PullReleased,
    ReleaseHandle,
    ReleaseLease,
    ReleasePull,
    RequestFailed,
    RequestRejected,
    ShutdownEngine,
    StepReply,
    SubmitGeneration,
    WatchClosed,
    WatchOpened,
    WatchUpdate,
    WeightsAnswer,
    WeightsCall,
)
from eyas.engine.loading.build import build_engine
from tests.unit.unwarmed import unwarmed

LOOK_S = 0.001


class QueueLink:
    """`EngineLink` over queues; events go to a callback on the engine's thread."""

    def __init__(self, deliver) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._deliver = deliver

    def recv(self, timeout_s: float, bells: Sequence[int] = ()) -> list[Command]:
        timeout_s = min(timeout_s, LOOK_S) if bells else timeout_s  # a queue has no descriptor
        found: list[Command] = []
        try:
            found.append(
                self.commands.get(timeout=timeout_s) if timeout_s > 0 else self.commands.get_nowait()
            )
            while True:
                found.append(self.commands.get_nowait())
        except queue.Empty:
            return found

    def send(self, events: Sequence[Event]) -> None:
        for event in events:
            self._deliver(event)


@dataclass
class Result:
    """What became of one request: output ids and entries by choice, or a failure."""

    wanted: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    entries: list[TokenEntry] = field(default_factory=list)
    finishes: dict[int, FinishCause] = field(default_factory=dict)
    failure: str | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def add(self, entry: TokenEntry) -> None:
        """Each output index once, in order; a repeated one must repeat the same token."""
        self.entries.append(entry)
        have = self.tokens.setdefault(entry.choice, [])
        assert entry.index <= len(have), f"gap before index {entry.index}"
        for i, token in enumerate(entry.tokens, start=entry.index):
            if i < len(have):
                assert have[i] == token
            else:
                have.append(token)
        if entry.finish is not None:
            self.finishes[entry.choice] = entry.finish
        if len(self.finishes) == self.wanted:
            self.done.set()


class Worker:
    """One engine on a thread, under the address that its handles carry."""

    def __init__(self, cluster: Loopback, config: EngineConfig) -> None:
        self.address = config.worker
        self.link = QueueLink(lambda event: cluster.event(self, event))
        self.ready: EngineReady | None = None
        self.load: EngineLoad | None = None
        self._answers: queue.SimpleQueue[EngineControlled] = queue.SimpleQueue()
        self._calls = itertools.count(1)
        self.changed: dict[int, queue.SimpleQueue[WeightsReply]] = {}
        self.pulls: dict[int, tuple[KvHandle, int]] = {}
        with unwarmed():
            self.engine = build_engine(config, self.link)
        self.thread = threading.Thread(target=self.engine.run, name=self.address, daemon=True)
        self.thread.start()

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.link.commands.put(command)

    def control(self, command: ControlCommand, within_s: float = 60.0) -> EngineControlled:
        """Asks the engine as an operator does."""
        call = next(self._calls)
        self.send(ControlEngine(call, command))
        answer = self._answers.get(timeout=within_s)
        assert answer.call == call
        return answer

    def begin_change(self, command: WeightsCommand) -> int:
        """Sends a command about weights; the number by which `change_ended` waits for its answer."""
        call = next(self._calls)
        self.changed[call] = queue.SimpleQueue()
        self.send(WeightsCall(call, command))
        return call

    def change_ended(self, call: int, within_s: float = 60.0) -> WeightsReply:
        """The answer."""
        return self.changed[call].get(timeout=within_s)

    def change(self, command: WeightsCommand, within_s: float = 60.0) -> WeightsReply:
        """Both."""
        return self.change_ended(self.begin_change(command), within_s)

    def answer(self, event: EngineControlled) -> None:
        """What the engine answers."""
        self._answers.put(event)


class Loopback:
    """A cluster: `submit` plays the gateway. Without a prefill worker requests are LOCAL."""

    def __init__(self, *configs: EngineConfig) -> None:
        self.results: dict[str, Result] = {}
        self.adapters: queue.SimpleQueue[AdapterLoaded | AdapterUnloaded] = queue.SimpleQueue()
        self._numbers = 0
        self._watches: dict[int, tuple[Worker, int]] = {}  # watch -> (puller, pull)
        self._calls: dict[int, tuple[Worker, int]] = {}
        self._peers: dict[int, Worker] = {}
        self._lock = threading.Lock()
        self.workers = {config.worker: Worker(self, config) for config in configs}
        self.by_role = {
            role: w for config in configs for role in config.roles for w in [self.workers[config.worker]]
        }
        for config in configs:
            if config.roles == (Role.DRAFT,):  # as a front greets for a draft worker that it has found
                self.by_role["decode"].send(DraftDown(worker=config.worker))

    def submit(self, request: GenerationRequest, *, split: bool, at: str | None = None) -> Result:
        """`at`: the worker that decodes it; None: the last one that can."""
        begun = {choice.index: list(choice.output_ids) for choice in request.choices if choice.output_ids}
        result = self.results[request.id] = Result(len(request.choices), begun)
        decode = self.by_role["decode"] if at is None else self.workers[at]
        prefill = self.by_role.get("prefill")
        decode.send(SubmitGeneration(request, attempt=1, attach=split))
        if split:
            assert prefill is not None
            prefill.send(
                PrefillPrompt(request, attempt=1, offer_draft=request.speculative and "draft" in self.by_role)
            )
        return result

    def load_adapter(self, folder: Path, *, pinned: bool = False) -> AdapterLoaded:
        """Loads an adapter into every worker that computes with it; the last answer."""
        workers = {id(worker): worker for role, worker in self.by_role.items() if role is not Role.DRAFT}
        for worker in workers.values():
            worker.send(LoadAdapter(0, str(folder), folder.name, pinned=pinned))
        for _ in workers:
            answer = self.adapters.get(timeout=20)
        assert isinstance(answer, AdapterLoaded) and answer.failure is None, answer
        return answer

    def close(self) -> None:
        for worker in self.workers.values():
            worker.send(ShutdownEngine())
        for worker in self.workers.values():
            worker.thread.join(10)
            assert not worker.thread.is_alive()

    def event(self, worker: Worker, event: Event) -> None:
        """Called on the engines' threads."""
        with self._lock:
            self._handle(worker, event)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _handle(self, worker: Worker, event: Event) -> None:
        match event:
            case EngineReady():
                worker.ready = event
            case EngineLoad():
                worker.load = event
            case WeightsAnswer(call, reply):
                worker.changed[call].put(reply)
            case EngineControlled():
                worker.answer(event)
            case StepReply(entries):
                for entry in entries:
                    self.results[entry.id].add(entry)
            case PrefillStarted():
                self.by_role["decode"].send(AttachKv(event.id, event.attempt, event.handles))
            case RequestRejected() | RequestFailed():
                self._fail(event.id, event.failure.message)
            case PagesLost():
                self._fail(event.id, "lost")
            case OpenPull(pull, handle, attempt, known):
                watch = self._number()
                worker.pulls[pull] = (handle, attempt)
                self._watches[watch] = (worker, pull)
                owner = self.workers[handle.worker]
                assert owner.ready is not None
                if not known:
                    worker.send(PullMet(pull, owner.ready.pools[handle.group]))
                owner.send(WatchOpened(watch, handle, attempt))
            case ReleasePull(pull):
                handle, attempt = worker.pulls[pull]
                call = self._number()
                self._calls[call] = (worker, pull)
                self.workers[handle.worker].send(ReleaseLease(call, handle.id, handle.epoch, attempt))
            case ReleaseHandle(handle, attempt):
                self.workers[handle.worker].send(ReleaseLease(0, handle.id, handle.epoch, attempt))
            case ClosePull(pull):
                for watch, puller in list(self._watches.items()):
                    if puller == (worker, pull):
                        del self._watches[watch]
                        self.workers[worker.pulls[pull][0].worker].send(WatchClosed(watch))
            case LeaseReleased(call, valid):
                puller, pull = self._calls.pop(call)
                puller.send(PullReleased(pull, valid))
            case WatchUpdate():
                self._update(event)
            case DraftUp():
                peer = id(worker)
                self._peers[peer] = worker
                self.workers[event.worker].send(msgspec.structs.replace(event, peer=peer))
            case DraftDown():
                self._peers[event.peer].send(msgspec.structs.replace(event, worker=worker.address))
            case AdapterLoaded() | AdapterUnloaded():
                self.adapters.put(event)
            case PrefillDone() | EngineStopped():
                pass

    def _update(self, update: WatchUpdate) -> None:
        if update.watch not in self._watches:
            return
        puller, pull = self._watches[update.watch]
        if update.failure is not None:
            puller.send(PullFailed(pull, update.failure))
            return
        if update.tokens:
            puller.send(PullReady(pull, update.tokens))
        if update.done:
            puller.send(PullDone(pull, update.choices, update.last_feature))

    def _fail(self, request_id: str, message: str) -> None:
        if request_id in self.results:
            self.results[request_id].failure = message
            self.results[request_id].done.set()


def split_configs(config: EngineConfig) -> tuple[EngineConfig, EngineConfig, EngineConfig]:
    """Prefill, decode and draft engines of one cluster."""
    return (
        replace(config, roles=(Role.PREFILL,), worker="prefill"),
        replace(config, roles=(Role.DECODE,), worker="decode"),
        replace(config, roles=(Role.DRAFT,), worker="draft"),
    )


def wait_all(results: Sequence[Result], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for result in results:
        assert result.done.wait(max(0.0, deadline - time.monotonic())), "a request did not end"
        assert result.failure is None, result.failure
