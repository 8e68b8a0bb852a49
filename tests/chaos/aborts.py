"""Requests that are given up at a random moment, in every way that a caller has."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import httpx
import msgspec

from eyas.common.errors import DeadlineExceeded, Overloaded
from eyas.common.types import GenerationRequest
from tests.chaos.rig import Rig
from tests.chaos.streams import COME_BACK_S, call_options

WIDTH = 12
LONGEST_S = 1.5  # from the question to giving up: from the queue to deep in the answer
TOKENS = 400  # more than can come in that time
WAYS = ("disconnect", "cancel", "deadline")


@dataclass(frozen=True)
class Aborts:
    """`told` hears of every request that is over."""

    rig: Rig
    requests: list[GenerationRequest]
    seed: int
    told: Callable[[], None]

    async def run(self, count: int) -> Counter[str]:
        """Gives up `count` requests; how many in each way, and "finished": those that were faster."""
        rng = random.Random(f"aborts/{self.seed}")
        plans = [
            (rng.choice(self.requests), WAYS[i % len(WAYS)], LONGEST_S * rng.random() ** 2)
            for i in range(count)
        ]
        outcomes: Counter[str] = Counter()
        places = asyncio.Semaphore(WIDTH)
        async with httpx.AsyncClient(base_url=self.rig.processes.url, timeout=60, trust_env=False) as http:

            async def one(request: GenerationRequest, way: str, after_s: float) -> None:
                async with places:
                    while (finished := await self._give_up(http, _long(request), way, after_s)) is None:
                        await asyncio.sleep(COME_BACK_S)
                outcomes["finished" if finished else way] += 1
                self.told()

            await asyncio.gather(*(one(*plan) for plan in plans))
        return outcomes

    async def _give_up(
        self, http: httpx.AsyncClient, request: GenerationRequest, way: str, after_s: float
    ) -> bool | None:
        """Whether the answer was faster; None if there was no place for the request."""
        options = call_options(request)
        try:
            if way == "disconnect":
                return await _in_time(self._read_http(http, request), after_s)
            if way == "cancel":
                async with self.rig.client.generate_stream(request.prompt_ids, **options) as stream:
                    return await _in_time(stream.completion(), after_s)
            await self.rig.client.generate(request.prompt_ids, timeout_s=after_s, **options)
        except DeadlineExceeded:
            return False
        except Overloaded:
            return None
        return True

    async def _read_http(self, http: httpx.AsyncClient, request: GenerationRequest) -> None:
        """A streamed completion; cancelled, it closes its connection."""
        params = request.params
        body = {
            "model": request.adapter or self.rig.processes.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "ignore_eos": True,
            "stream": True,
        }
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code == Overloaded.http_status:
                raise Overloaded("there is no place")
            reply.raise_for_status()
            async for _ in reply.aiter_lines():
                pass


def _long(request: GenerationRequest) -> GenerationRequest:
    """The request, with an answer that lasts."""
    params = msgspec.structs.replace(request.params, max_tokens=TOKENS, ignore_eos=True)
    return msgspec.structs.replace(request, params=params)


async def _in_time(work: Coroutine[object, object, object], after_s: float) -> bool:
    try:
        async with asyncio.timeout(after_s):
            await work
    except TimeoutError:
        return False
    return True
