"""Streams of good callers: each asks again and again, and must get what was recorded, without long pauses.

Two of four are chats over HTTP, one asks for token ids there, one goes through gRPC; every eighth has a
grammar. It knows answers and gaps. It refuses to know what else the server does meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from eyas.client import AsyncClient
from eyas.common.errors import EyasError
from tests.e2e.attacks.attack import Target
from tools.nano.heldout import heldout_prompts

SEED = 15
COME_BACK_S = 0.5  # after a refusal for load
ANSWER_S = 300.0  # on a busy machine
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "count": {"type": "integer"}},
    "required": ["name", "count"],
}


class Refused(Exception):
    """429: the stream may come back."""


@dataclass(frozen=True)
class Request:
    """A seeded chat. `door`: how it is asked."""

    door: str
    messages: list[Any]
    options: dict[str, Any]


def requests(count: int) -> list[Request]:
    """Distinct held-out chats."""
    rng, made = random.Random(SEED), []
    for i, chat in enumerate(heldout_prompts(count, SEED)):
        options: dict[str, Any] = {
            "max_tokens": rng.choice((60, 90, 140)),
            "temperature": 0.0 if i % 3 == 0 else 0.8,
            "seed": rng.getrandbits(63),
        }
        if i % 8 == 4:
            options["json_schema"] = SCHEMA
        else:
            options["ignore_eos"] = True
        made.append(Request(("http", "http", "ids", "grpc")[i % 4], list(chat), options))
    return made


@dataclass
class Window:
    """What the streams had in a span of time: `gaps` in seconds, from one event to the next.

    `first_s`: the longest from a question to its first event, which may have to wait for a place.
    """

    gaps: list[float] = field(default_factory=list)
    first_s: float = 0.0
    answers: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def worst_s(self) -> float:
        return max(self.gaps, default=0.0)

    def at(self, part: float) -> float:
        """The gap that this part of all gaps does not exceed."""
        ordered = sorted(self.gaps)
        return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class GoodStreams:
    """`width` streams at a time, from `start` to `finish`."""

    def __init__(self, target: Target, width: int) -> None:
        self._target = target
        self._requests = requests(width)
        self._expected: list[str] = []
        self._window = Window()
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting_since: dict[int, float] = {}  # by stream
        self._ending = False

    async def record(self, http: httpx.AsyncClient, grpc: AsyncClient) -> None:
        """Asks each request once: what it answers is right from now on."""
        self._http, self._grpc = http, grpc
        asked = (self._ask(number, request) for number, request in enumerate(self._requests))
        self._expected = await asyncio.gather(*asked)

    def start(self) -> None:
        """Begins to ask; a window begins, too."""
        self._tasks = [asyncio.create_task(self._ask_on(number)) for number in range(len(self._requests))]
        self.turn()

    def turn(self) -> Window:
        """Ends a window, with the gaps that are still open in it, and begins the next one."""
        now, ended = time.monotonic(), self._window
        ended.gaps += [now - since for since in self._waiting_since.values()]
        self._window = Window()
        return ended

    async def finish(self) -> None:
        """Every running stream comes to its end."""
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def _ask_on(self, number: int) -> None:
        request = self._requests[number]
        while not self._ending:
            try:
                answer = await self._ask(number, request)
                self._window.answers += 1
                if answer != self._expected[number]:
                    self._window.problems.append(f"stream {number} ({request.door}) has another answer")
            except Refused:
                self._window.refused += 1
                await asyncio.sleep(COME_BACK_S)
            except (httpx.HTTPError, EyasError, TimeoutError, ValueError) as error:
                self._window.problems.append(
                    f"stream {number} ({request.door}): {type(error).__name__} {error}"
                )
                await asyncio.sleep(COME_BACK_S)

    async def _ask(self, number: int, request: Request) -> str:
        """The whole answer. Every piece of it but the first ends a gap."""
        said = {"http": self._by_http, "ids": self._by_http, "grpc": self._by_grpc}[request.door](request)
        pieces: list[str] = []
        asked = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_S):
                async for piece in said:
                    now = time.monotonic()
                    if number in self._waiting_since:
                        self._window.gaps.append(now - self._waiting_since[number])
                    else:
                        self._window.first_s = max(self._window.first_s, now - asked)
                    self._waiting_since[number] = now
                    pieces.append(piece)
        finally:
            self._waiting_since.pop(number, None)
        return "".join(pieces)

    async def _by_http(self, request: Request) -> AsyncIterator[str]:
        body = {"model": "eyas-nano", "messages": request.messages, "stream": True, **request.options}
        ids = request.door == "ids"
        async with self._http.stream(
            "POST", "/v1/chat/completions", json=body | {"return_token_ids": ids}
        ) as reply:
            if reply.status_code == 429:
                raise Refused
            if reply.status_code != 200:
                raise ValueError(f"{reply.status_code} {(await reply.aread())[:200]!r}")
            ended = False
            async for line in reply.aiter_lines():
                ended = ended or line == "data: [DONE]"
                for event in _events(line):
                    yield "".join(_shown(choice, ids) for choice in event["choices"])
        if not ended:
            raise ValueError("the stream broke off")

    async def _by_grpc(self, request: Request) -> AsyncIterator[str]:
        options = dict(request.options)
        if (schema := options.pop("json_schema", None)) is not None:
            options["json_schema"] = json.dumps(schema)
        async with self._grpc.chat_stream(request.messages, timeout_s=ANSWER_S, **options) as stream:
            async for delta in stream:
                yield delta.text


def _events(line: str) -> Iterator[Any]:
    if line.startswith("data: {"):
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise ValueError(str(event["error"])[:200])
        yield event


def _shown(choice: dict[str, Any], ids: bool) -> str:
    """A choice's piece: its token ids, or its text."""
    if ids:
        return "".join(f"{id} " for id in choice.get("token_ids") or ())
    return choice["delta"].get("content") or ""
