"""What engines say and move: messages to their fronts, steps of an answer, prompt tokens computed, KV bytes.

The embedded model answers fixed prompts. A unified engine runs on the caller's thread, so nothing depends on
time; engines of a split cluster run on threads, one request after the other. It knows no wire.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from eyas.common.config import NANO, EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.engine.ipc.messages import Command, DrainEngine, EngineLoad, Event, StepReply, SubmitGeneration
from eyas.engine.loading.build import build_engine
from eyas.engine.loop import engine as engine_loop
from gateway.text.tokenizer import Tokenizer
from tests.unit.loopback import Loopback, wait_all

TOKENS = 20
PATIENCE_S = 60.0
TEXTS = (
    "A farmer has twelve hens. Each hen lays five eggs in a week. The farmer sells half of the eggs on the "
    "market and gives ten of them to a friend. Then two hens leave the farm. How many eggs are left?",
    "The sun rises in the east and sets in the west. The moon",
    "What is 17 + 25?",
    "Write the numbers from one to ten:",
)


@dataclass
class HandLink:
    """An `EngineLink` whose commands are all there from the beginning; it keeps what the engine says."""

    commands: list[Command]
    messages: list[list[Event]] = field(default_factory=list)

    def recv(self, timeout_s: float, bells: Sequence[int] = ()) -> list[Command]:
        found, self.commands = self.commands, []
        return found

    def send(self, events: Sequence[Event]) -> None:
        if events:
            self.messages.append(list(events))

    def steps(self) -> list[StepReply]:
        return [event for message in self.messages for event in message if isinstance(event, StepReply)]

    def last_load(self) -> EngineLoad:
        return [event for message in self.messages for event in message if isinstance(event, EngineLoad)][-1]


def counts(folder: Path) -> dict[str, int | float]:
    """Of a unified and a split layout; pools lie in `folder`."""
    config = plain(folder)
    return {
        **_unified("unified, plain", config, requests()),
        **_unified("unified, drafted", replace(config, draft=EngineConfig.draft), requests()),
        **_unified("unified, one prompt twice", replace(config, max_running=1), _twice()),
        **_split("split", config),
    }


def plain(folder: Path) -> EngineConfig:
    """The embedded model's, without its head."""
    return EngineConfig(draft=None, num_pages=160, chunk_tokens=64, max_running=8, pool_dir=str(folder))


def requests() -> list[GenerationRequest]:
    """One of each text."""
    tokenizer = Tokenizer.load(NANO)
    return [_request(f"r{i}", tokenizer.encode(text, special=True)) for i, text in enumerate(TEXTS)]


def _unified(name: str, config: EngineConfig, asked: Sequence[GenerationRequest]) -> dict[str, int | float]:
    link = run(config, asked)
    steps, load = link.steps(), link.last_load()
    return {
        f"{name}: messages to the front": len(link.messages),
        f"{name}: steps with tokens": len(steps),
        f"{name}: bytes of the steps after the first": sum(map(_size, steps[1:])),
        f"{name}: prompt tokens computed": load.prompt_tokens - load.cached_tokens,
        f"{name}: drafts verified": load.nodes_verified,
        f"{name}: tokens": sum(len(entry.tokens) for step in steps for entry in step.entries),
    }


def run(config: EngineConfig, asked: Sequence[GenerationRequest]) -> HandLink:
    """An engine that gets all requests at once, and leaves when it has answered them."""
    link = HandLink([*(SubmitGeneration(request, 1, False) for request in asked), DrainEngine()])
    with patch.object(engine_loop, "LOAD_S", math.inf):  # no message because time has passed
        build_engine(config, link).run()
    return link


def _size(step: StepReply) -> int:
    """Bytes on the way to the front, timings left out."""
    entries = tuple(msgspec.structs.replace(entry, timings=None) for entry in step.entries)
    return len(msgspec.msgpack.encode(StepReply(entries)))


def _split(name: str, config: EngineConfig) -> dict[str, int | float]:
    """One prompt pulled, then a longer one that begins alike: its common pages stay where they are."""
    first, longer = requests()[0], _longer()
    found: dict[str, int | float] = {}
    with _cluster(config) as (cluster, pulled):
        for label, request in (("a prompt", first), ("a prompt that begins alike", longer)):
            before = pulled()
            result = cluster.submit(request, split=True)
            wait_all([result], PATIENCE_S)
            found[f"{name}: KV bytes pulled for {label}"] = pulled() - before
            found[f"{name}: entries of {label}"] = len(result.entries)
    return found


@contextlib.contextmanager
def _cluster(config: EngineConfig) -> Iterator[tuple[Loopback, Any]]:
    """A prefill and a decode engine, and a function that says how many bytes were pulled so far."""
    cluster = Loopback(
        replace(config, roles=(Role.PREFILL,), worker="prefill"),
        replace(config, roles=(Role.DECODE,), worker="decode"),
    )
    engine: Any = cluster.workers["decode"].engine
    try:
        yield cluster, lambda: sum(moved.bytes for moved in engine._parts.pulls.moved.values())
    finally:
        cluster.close()


def _twice() -> list[GenerationRequest]:
    (first, *_) = requests()
    return [first, msgspec.structs.replace(first, id="again")]


def _longer() -> GenerationRequest:
    text = TEXTS[0] + " Count once more, and say how you found the number of eggs."
    return _request("longer", Tokenizer.load(NANO).encode(text, special=True))


def _request(id: str, ids: Sequence[int]) -> GenerationRequest:
    return GenerationRequest(
        id, tuple(ids), SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    )
