"""Streams that never stop asking, and what became of each: the tokens it must give, given, or not.

Half of the requests are greedy, half seeded; every fourth stream goes through the gateway process, the others
through the gateway of this process. Knows nothing of faults.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from eyas.common.config import NANO
from eyas.common.errors import EyasError, Overloaded
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, TokenEntry
from gateway.text.tokenizer import Tokenizer
from tests.chaos.rig import ANSWER_S, HEAVY_S, Rig
from tools.nano.heldout import heldout_prompts

LENGTHS = (12, 40, 90, 160)  # output tokens, at most
HEAVY_LENGTHS = (900, 1300, 1600)  # tokens of prompts
PENANCE_S = 1.0  # a stream that failed lets the others run
COME_BACK_S = 0.3  # a stream that found no place asks again

Tokens = tuple[int, ...]


async def make_requests(count: int, seed: int) -> list[GenerationRequest]:
    """Distinct held-out chats; ids say how each is sampled."""
    tokenizer, rng = Tokenizer.load(NANO), random.Random(f"requests/{seed}")
    made = []
    for i, chat in enumerate(heldout_prompts(count, seed)):
        greedy = i % 2 == 0
        params = SamplingParams(
            max_tokens=rng.choice(LENGTHS),
            temperature=0.0 if greedy else 0.8,
            top_p=1.0 if greedy else 0.95,
            seed=rng.getrandbits(64),
            ignore_eos=rng.random() < 0.5,
        )
        ids = await tokenizer.encode_chat(chat)
        made.append(GenerationRequest(f"{i}-{'greedy' if greedy else 'seeded'}", ids, params))
    return made


def heavy_requests(count: int, seed: int, lengths: Sequence[int] = HEAVY_LENGTHS) -> list[GenerationRequest]:
    """Prompts of tokens by chance, as a rule of most of the context, with short answers."""
    made = []
    for i in range(count):
        rng = random.Random(f"heavy/{seed}/{i}")
        ids = tuple(rng.randrange(3, 4096) for _ in range(rng.choice(lengths)))
        params = SamplingParams(
            max_tokens=rng.choice((8, 16, 32)),
            temperature=0.8 if i % 2 else 0.0,
            seed=rng.getrandbits(64),
            ignore_eos=True,
        )
        kind = "seeded" if i % 2 else "greedy"
        made.append(GenerationRequest(f"heavy-{i}-{kind}", ids, params, timeout_s=HEAVY_S))
    return made


@dataclass(frozen=True)
class Outcome:
    """`error` is empty for a stream that gave the right tokens. `refused`: how often it had to come back.

    `differs`: it gave others, as many as it should, where answers need not be the same.
    """

    request: str
    door: str
    began: float  # monotonic seconds
    seconds: float
    tokens: int
    attempts: int  # 0: not known, the outer gateway keeps that to itself
    refused: int
    error: str
    differs: bool = False


class Refused(Exception):
    """The cluster is full: nothing was answered yet, and the stream may come back."""


class Streams:
    """`width` streams at a time, from `start` to `finish`; `told` hears of every outcome.

    `exact`: answers must be the `expected` ones; if not, they must have a length that they may have. One that
    takes longer than `answer_s` has failed.
    """

    def __init__(
        self,
        rig: Rig,
        expected: Mapping[str, Tokens],
        told: Callable[[Outcome], None],
        exact: bool = True,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._rig = rig
        self._expected = expected
        self._exact = exact
        self._answer_s = answer_s
        self._told = told
        self._tasks: list[asyncio.Task[None]] = []
        self._may_ask = asyncio.Event()
        self._ending = False
        self._running = 0

    def start(self, requests: list[GenerationRequest], width: int, seed: int) -> None:
        self._may_ask.set()
        self._tasks = [
            asyncio.create_task(self._ask_on(requests, number, random.Random(f"stream/{seed}/{number}")))
            for number in range(width)
        ]

    async def idle(self) -> None:
        """No stream begins until `go_on`; returns when none runs."""
        self._may_ask.clear()
        while self._running:
            await asyncio.sleep(0.02)

    def go_on(self) -> None:
        self._may_ask.set()

    async def finish(self) -> None:
        """Every running stream comes to its end, and no other begins."""
        self._ending = True
        self._may_ask.set()
        await asyncio.gather(*self._tasks)

    async def _ask_on(self, requests: list[GenerationRequest], number: int, rng: random.Random) -> None:
        for count in range(1_000_000):
            await self._may_ask.wait()
            if self._ending:
                return
            request = rng.choice(requests)
            door = "outer" if number % 4 == 3 else "inner"
            self._running += 1
            try:
                outcome = await self._ask(request, door, f"{request.id}/{number}/{count}")
            finally:
                self._running -= 1
            self._told(outcome)
            if outcome.error:
                await asyncio.sleep(PENANCE_S)

    async def _ask(self, request: GenerationRequest, door: str, id: str) -> Outcome:
        began, error, attempts = time.monotonic(), "", 0
        tokens: Tokens = ()
        refused = itertools.count()
        try:
            async with asyncio.timeout(self._answer_s):
                tokens, attempts = await self._in_the_end(request, door, id, refused)
        except TimeoutError:
            error = f"no end within {self._answer_s:g} s"
        except EyasError as caught:
            error = f"{type(caught).__name__}: {caught.message}"
        expected = self._expected[request.id]
        differs = not error and tokens != expected
        if differs and (self._exact or not complete(request, tokens)):
            pairs = zip(tokens, expected, strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            error = f"{len(tokens)} tokens for {len(expected)}, the first {same} the same"
        seconds = time.monotonic() - began
        return Outcome(
            id, door, began, seconds, len(tokens), attempts, next(refused), error, differs and not error
        )

    async def _in_the_end(
        self, request: GenerationRequest, door: str, id: str, refused: Iterator[int]
    ) -> tuple[Tokens, int]:
        """The answer, and in how many attempts; asks again, counting `refused`, while there is no place."""
        while True:
            try:
                if door == "outer":
                    return await through_gateway(self._rig, request, self._answer_s), 0
                return await through_rig(self._rig, msgspec.structs.replace(request, id=id))
            except Refused:
                next(refused)
                await asyncio.sleep(COME_BACK_S)


def complete(request: GenerationRequest, tokens: Tokens) -> bool:
    """Whether an answer has a length that it may have."""
    params = request.params
    return len(tokens) == params.max_tokens or not params.ignore_eos and 0 < len(tokens) < params.max_tokens


def call_options(request: GenerationRequest) -> dict[str, Any]:
    """The options of an SDK's call for it. An adapter's name is its id."""
    named = {"model": request.adapter} if request.adapter else {}
    return {**msgspec.to_builtins(request.params), **named}


async def through_rig(rig: Rig, request: GenerationRequest) -> tuple[Tokens, int]:
    """(the tokens, in how many attempts). Raises Refused."""
    try:
        stream = await rig.start(request)
    except Overloaded as error:
        raise Refused from error
    try:
        entries: list[TokenEntry] = []
        while taken := await stream.take():
            entries += taken
    finally:
        await stream.aclose()
    return tuple(token for entry in entries for token in entry.tokens), stream.attempts


async def through_gateway(rig: Rig, request: GenerationRequest, answer_s: float) -> Tokens:
    """The tokens. Raises Refused."""
    options = call_options(request)
    tokens: list[int] = []
    try:
        async with rig.client.generate_stream(request.prompt_ids, timeout_s=answer_s, **options) as stream:
            async for delta in stream:
                tokens += delta.tokens
    except Overloaded as error:
        if tokens:
            raise
        raise Refused from error
    return tuple(tokens)
