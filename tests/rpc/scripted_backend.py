"""A backend that says what it is told to, and remembers what was asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from eyas.common.config import NANO
from eyas.common.errors import EyasError, ModelNotFound
from eyas.common.types import (
    Adapter,
    AdapterRoster,
    EngineTimings,
    FinishCause,
    GenerationRequest,
    PromptTokenLogprobs,
    Role,
    TokenEntry,
    TokenLogprob,
    WeightsInfo,
    WorkerInfo,
)
from eyas.common.wire import convert
from gateway.backends.base import BackendHealth, Lanes
from gateway.routing.router import RouterCandidate
from gateway.text.tokenizer import Tokenizer
from protos import common_pb2

EOS = 2
INFO = WorkerInfo(
    worker="127.0.0.1:1",
    roles=(Role.PREFILL, Role.DECODE),
    epoch=1,
    model="eyas-nano",
    fingerprint="0123456789abcdef",
    draft_fingerprint="",
    context_length=128,
    vocab_size=4096,
    pages_total=100,
)


@cache
def nano_tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO)


async def each(stream: Any) -> AsyncIterator[Any]:
    """What a stream of entries, or of deltas, gives, one by one."""
    while taken := await stream.take():
        for one in taken:
            yield one


async def first(stream: Any, count: int) -> list[TokenEntry]:
    """What a stream of entries gives first, at least `count` of them."""
    entries: list[TokenEntry] = []
    while len(entries) < count:
        entries += await stream.take()
    return entries


@dataclass
class ScriptedAdapters:
    """Adapters that are there at once. `looks`: how often it was asked for those of now."""

    roster: AdapterRoster = AdapterRoster()
    coming: AdapterRoster | None = None  # what the next look finds
    looks: int = 0
    loads: list[tuple[Adapter, bool]] = field(default_factory=list)

    async def look(self) -> None:
        self.looks += 1
        self.roster, self.coming = self.coming or self.roster, None

    async def load(self, adapter: Adapter, *, replace: bool) -> Adapter:
        self.loads.append((adapter, replace))
        loaded = msgspec.structs.replace(adapter, id=f"{len(self.loads):016x}", rank=4)
        self.roster = AdapterRoster(self.roster.revision + 1, (*self.roster.adapters, loaded))
        return loaded

    async def unload(self, name: str, id: str = "") -> Adapter:
        adapter = self.roster.named(name)
        if adapter is None:
            raise ModelNotFound(f"the adapter {name!r} is not loaded", param="lora_name")
        others = tuple(one for one in self.roster.adapters if one is not adapter)
        self.roster = AdapterRoster(self.roster.revision + 1, others)
        return adapter


@dataclass
class ScriptedWeights:
    """Weights that never change."""

    newest: WeightsInfo = WeightsInfo()


@dataclass
class ScriptedBackend:
    """`says(request, choice)` is the text of a choice; it is told in steps of `stride` tokens, then EOS."""

    tokenizer: Tokenizer
    says: Callable[[GenerationRequest, int], str] = lambda request, choice: "Hello, world!"
    stride: int = 2
    pause_s: float = 0.0
    refusal: EyasError | None = None  # raised by start
    breaks_with: Exception | None = None  # raised after the first round of entries
    infos: list[WorkerInfo] = field(default_factory=lambda: [INFO])
    is_healthy: bool = True
    timings: EngineTimings | None = None  # told with the first entry, as `prompt` is to those who ask for it
    prompt: PromptTokenLogprobs | None = None
    scores: Callable[[int], float] = lambda choice: -0.5  # the log-probability of a choice's tokens
    requests: list[GenerationRequest] = field(default_factory=list)
    flushes: list[float] = field(default_factory=list)  # how long each would wait
    streams: list[ScriptedStream] = field(default_factory=list)
    adapters: ScriptedAdapters = field(default_factory=ScriptedAdapters)
    weights: ScriptedWeights = field(default_factory=ScriptedWeights)

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        pass

    async def start(self, request: GenerationRequest) -> ScriptedStream:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        self.streams.append(ScriptedStream(self, request))
        return self.streams[-1]

    async def models(self) -> list[WorkerInfo]:
        return self.infos

    def links(self) -> list[RouterCandidate]:
        return [RouterCandidate(info) for info in self.infos]

    async def flush(self, wait_s: float) -> dict[str, int]:
        self.flushes.append(wait_s)
        if self.refusal is not None:
            raise self.refusal
        return {info.worker: 7 for info in self.infos}

    def health(self) -> BackendHealth:
        return BackendHealth() if self.is_healthy else BackendHealth("no worker is serving")


class ScriptedStream:
    weight_version = "default"

    def __init__(self, backend: ScriptedBackend, request: GenerationRequest) -> None:
        self.request = request
        self.cancelled: list[int | None] = []
        self.closed = asyncio.Event()
        self.told = 0  # rounds of entries
        self.tokens = 0
        self._backend = backend
        self._failure: EyasError | None = None
        self._entries = self.entries()
        self._outputs: dict[int, tuple[int, ...]] = {}
        for choice in request.choices:
            ids = backend.tokenizer.encode(backend.says(request, choice.index), special=False)
            self._outputs[choice.index] = (*ids, EOS)

    async def take(self) -> Sequence[TokenEntry]:
        entry = await anext(self._entries, None)
        self.tokens += 0 if entry is None else len(entry.tokens)
        return () if entry is None else (entry,)

    def use_lanes(self, lanes: Lanes | None) -> None: ...

    async def entries(self) -> AsyncGenerator[TokenEntry, None]:
        start = 0
        while self._outputs:
            for choice in list(self._outputs):
                yield self._entry(choice, start)
            start += self._backend.stride
            self.told += 1
            if self._backend.breaks_with is not None:
                raise self._backend.breaks_with
            await asyncio.sleep(self._backend.pause_s)
            if self._failure is not None:
                raise self._failure

    def _entry(self, choice: int, start: int) -> TokenEntry:
        params = self.request.params
        output = self._outputs[choice]
        end = min(start + self._backend.stride, params.max_tokens)
        tokens = output[start:end]
        finish = None
        if end >= len(output):
            finish = FinishCause.STOP
        elif end == params.max_tokens:
            finish = FinishCause.LENGTH
        if finish is not None:
            del self._outputs[choice]
        logprobs: tuple[TokenLogprob, ...] = ()
        if params.logprobs is not None:
            score = self._backend.scores(choice)
            best = [(score, None), (-1.5, 7), (-2.5, 8)][: params.logprobs]
            logprobs = tuple(
                TokenLogprob(score, tuple((t if other is None else other, p) for p, other in best))
                for t in tokens
            )
        drafted = self._backend.stride if start else 0
        accepted = min(len(tokens), max(drafted - 1, 0))
        entry = TokenEntry(self.request.id, 1, choice, start, tokens, logprobs, finish, accepted, drafted)
        if start or choice:
            return entry
        prompt = None if params.prompt_logprobs is None else self._backend.prompt
        return msgspec.structs.replace(entry, timings=self._backend.timings, prompt=prompt)

    async def cancel(self, choice: int | None = None) -> None:
        self.cancelled.append(choice)
        if choice is None:
            self._outputs.clear()
        else:
            self._outputs.pop(choice, None)

    def fail(self, error: EyasError) -> None:
        self._failure = error

    async def aclose(self) -> None:
        self.closed.set()


class WireBackend(ScriptedBackend):
    """Sends nothing, but makes the messages."""

    async def start(self, request: GenerationRequest) -> ScriptedStream:
        convert.fill_request(common_pb2.GenerationRequest(), request)
        return await super().start(request)
