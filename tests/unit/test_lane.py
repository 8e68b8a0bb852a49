"""The lane against the reader's way, entry by entry: the same bytes and counts, however the reader pauses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from eyas.common.errors import EyasError, Unavailable
from eyas.common.params import SamplingParams
from eyas.common.types import (
    EngineTimings,
    FinishCause,
    GenerationRequest,
    PromptTokenLogprobs,
    RequestChoice,
    Role,
    TokenEntry,
    TokenLogprob,
)
from gateway.backends.answer import BodyParts, EntryLane, TextEvent, lane_of
from gateway.backends.base import GenerationStream, Lanes
from gateway.backends.delivery import OutputBuffer
from gateway.observe.metrics import CallMeter, GatewayMetrics
from gateway.text.entries import TextDelta, TextRules, TextStream
from gateway.text.tokenizer import Tokenizer
from tests.unit.byte_tokenizers import byte_fallback, byte_level

COUNTED = ("eyas_inter_token_latency_seconds_count", "eyas_time_to_first_token_seconds_count")

entry_of = st.fixed_dictionaries(
    {
        "choice": st.integers(0, 2),
        "tokens": st.lists(st.integers(-1, 400), max_size=4),
        "again": st.sampled_from([0, 0, 0, 0, 1, 2, 9]),  # tokens before them that the worker repeats
        "drafts": st.integers(0, 3),
        "tells": st.sampled_from([None] * 6 + ["timings", "prompt"]),
        "finish": st.sampled_from([None] * 12 + list(FinishCause)),
    }
)
moves = st.one_of(
    entry_of,
    entry_of,
    st.sampled_from(["turn", "turn", "pause", "go", "block", "read"]),
    st.sampled_from([None] * 9 + ["skip", "fail", "cancel"]),
)


class Body(BodyParts):
    """What left, in order. A client that is `blocked` reads again when it is told to."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.blocked = False
        self._reads = asyncio.Event()
        self.go()

    def block(self) -> None:
        self.blocked = True
        self._reads.clear()

    def go(self) -> None:
        self.blocked = False
        self._reads.set()

    def write(self, part: bytes) -> None:
        self.sent.append(part)

    def flush(self) -> None: ...

    async def drain(self) -> None:
        await self._reads.wait()


class Stream(GenerationStream):
    """A delivery and nothing behind it."""

    def __init__(self, delivery: OutputBuffer) -> None:
        self._delivery = delivery

    def take(self) -> Awaitable[Sequence[TokenEntry]]:
        return self._delivery.take()

    def use_lanes(self, lanes: Lanes | None) -> None:
        self._delivery.use_lanes(lanes)

    async def cancel(self, choice: int | None = None) -> None:
        if choice is None:
            self._delivery.end()
        else:
            self._delivery.close(choice)

    def fail(self, error: EyasError) -> None:
        self._delivery.end(error)

    async def aclose(self) -> None:
        self._delivery.end()


def text_event(choice: int, text: str) -> bytes:
    return f'data: {{"choice":{choice},"text":{json.dumps(text, ensure_ascii=False)}}}\n\n'.encode()


class Plain:
    """Events of text alone."""

    text_event: TextEvent | None = staticmethod(text_event)

    def event(self, delta: TextDelta) -> bytes:
        if delta.finish is not None:
            return repr((delta.choice, delta.text, delta.finish)).encode()
        return text_event(delta.choice, delta.text) if delta.text else b""


class Full(Plain):
    """Events that say all of a delta, and how many came before it."""

    text_event = None

    def __init__(self) -> None:
        self._told = 0

    def event(self, delta: TextDelta) -> bytes:
        self._told += 1
        return f"{self._told} {delta}\n".encode()


class World:
    """One request: workers that tell entries, and a client that reads them, by a lane or without."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: TextRules,
        choices: int,
        logprobs: bool,
        events: Plain,
        by_lane: bool,
    ) -> None:
        asked = tuple(RequestChoice(index) for index in range(choices))
        request = GenerationRequest("r", (5, 6), SamplingParams(max_tokens=1000), asked)
        self.delivery = OutputBuffer(asked)
        self.text = TextStream(Stream(self.delivery), request, tokenizer, rules)
        self.registry = CollectorRegistry()
        self.body, self.goes = Body(), asyncio.Event()
        self.goes.set()
        self._logprobs = logprobs
        self._events = events
        self._meter = CallMeter(GatewayMetrics(self.registry))
        self._told: dict[int, list[int]] = {index: [] for index in range(3)}
        if by_lane:
            self.text.use_lanes(partial(lane_of, self.text, events, self._meter, self.body))

    async def read(self) -> None:
        try:
            while deltas := await self.text.take():
                self._meter.deltas(deltas)
                for delta in deltas:
                    self.body.write(self._events.event(delta))
                await self.goes.wait()
                await self.body.drain()
        except EyasError as error:
            self.body.write(repr(error).encode())

    def tell(self, choice: int, tokens: list[int], again: int, drafts: int, tells: Any, finish: Any) -> None:
        told = self._told[choice]
        start = max(len(told) - again, 0)
        news = [*told[start:], *tokens]
        told += tokens
        self._hand_out(
            TokenEntry(
                *("r", 1, choice, start, tuple(news)),
                logprobs=tuple(TokenLogprob(-1.0) for _ in news) if self._logprobs else (),
                finish=finish,
                accepted=min(drafts, max(len(tokens) - 1, 0)),
                offered=drafts,
                timings=EngineTimings(worker="w", role=Role.DECODE) if tells == "timings" else None,
                prompt=PromptTokenLogprobs(1) if tells == "prompt" else None,
            )
        )

    def _hand_out(self, entry: TokenEntry) -> None:
        """As a session does once a worker has spoken."""
        lane = self.delivery.lane
        if lane is None or not lane.offer(entry, time.monotonic()):
            self.delivery.push(entry)

    def skip(self) -> None:
        """A worker leaves out a token."""
        self.delivery.push(TokenEntry("r", 1, 0, len(self._told[0]) + 1, (1,)))

    async def move(self, move: Any) -> None:
        match move:
            case dict():
                self.tell(**move)
            case "turn":
                for _ in range(5):
                    await asyncio.sleep(0)
            case "pause":
                self.goes.clear()
            case "go":
                self.goes.set()
            case "block":
                self.body.block()
            case "read":
                self.body.go()
            case "skip":
                self.skip()
            case "fail":
                self.delivery.end(Unavailable("the worker is gone"))
            case "cancel":
                self.delivery.close(2)

    async def run(self, played: Sequence[Any]) -> dict[str, Any]:
        with self._meter:
            reading = asyncio.create_task(self.read())
            for move in played:
                await self.move(move)
            self.goes.set()
            self.body.go()
            self.delivery.end(Unavailable("all is told"))
            await asyncio.wait_for(reading, 30)
        page = generate_latest(self.registry).decode()
        return {
            "body": b"".join(self.body.sent),
            "usage": self.text.usage,
            "legs": self.text.trace.legs,
            "counted": [line for line in page.splitlines() if line.startswith(COUNTED)],
            "pace": (self.delivery.token_times.steps, self.delivery.token_times.tokens),
            "open": self.delivery.unfinished(),
        }


async def both(
    tokenizer: Tokenizer,
    rules: TextRules,
    played: Sequence[Any],
    choices: int = 3,
    logprobs: bool = False,
    events: type[Plain] = Plain,
) -> tuple[dict[str, Any], dict[str, Any]]:
    quick = World(tokenizer, rules, choices, logprobs, events(), by_lane=True)
    plain = World(tokenizer, rules, choices, logprobs, events(), by_lane=False)
    return await quick.run(played), await plain.run(played)


@settings(max_examples=60, deadline=None)
@given(
    played=st.lists(moves, max_size=60),
    fallback=st.booleans(),
    choices=st.sampled_from([1, 1, 3]),  # workers that tell of other choices are not believed
    logprobs=st.sampled_from([False, False, False, True]),
    rules=st.sampled_from(
        [
            TextRules(),
            TextRules(skip_special_tokens=False),
            TextRules(stops=("a", "é")),
            TextRules(offsets=True),
        ]
    ),
    events=st.sampled_from([Plain, Full]),
)
def test_a_lane_changes_nothing(
    played: list[Any], fallback: bool, choices: int, logprobs: bool, rules: TextRules, events: type[Plain]
) -> None:
    tokenizer = Tokenizer(byte_fallback() if fallback else byte_level())
    quick, plain = asyncio.run(both(tokenizer, rules, played, choices, logprobs, events))
    assert quick == plain


@pytest.mark.parametrize("events", [Plain, Full])
@pytest.mark.parametrize(
    ("before", "after", "by_lane"),
    [([], [], 4), ([], ["block"], 1), (["pause"], [], 1)],
    ids=["waits", "is blocked", "is busy"],
)
async def test_a_lane_takes_what_comes_while_the_reader_waits(
    before: list[str], after: list[str], by_lane: int, events: type[Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, offer = list[bool](), EntryLane.offer

    def told(self: EntryLane, entry: TokenEntry, now: float) -> bool:
        answers.append(offer(self, entry, now))
        return answers[-1]

    monkeypatch.setattr(EntryLane, "offer", told)
    one = {"choice": 1, "tokens": [70, 71], "again": 0, "drafts": 1, "tells": None, "finish": None}
    played = [*before, one, "turn", *after, one, "turn", one, one, "turn", "go", "read", "turn", one]
    quick, plain = await both(Tokenizer(byte_level()), TextRules(), played, events=events)
    assert quick == plain and quick["usage"].completion_tokens == 10
    assert answers.count(True) == by_lane


async def test_half_a_character_that_the_reader_showed_is_before_what_the_lane_shows() -> None:
    def entry(*tokens: int) -> dict[str, Any]:
        return {"choice": 0, "tokens": [*tokens], "again": 0, "drafts": 0, "tells": None, "finish": None}

    letter, half = 258, 1 + 0xC3  # "a", and a byte that only another byte completes
    begun = [entry(letter, letter), "turn", entry(letter), "turn"]
    played = [*begun, "block", entry(half), "turn", "read", "turn", entry(letter), "turn"]
    quick, plain = await both(Tokenizer(byte_fallback()), TextRules(), played, choices=1)
    assert quick == plain and "\ufffda" in quick["body"].decode()
