"""The prompts of one call: admitted together, told in order, refused as one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_backend import ScriptedBackend, each, nano_tokenizer
from scripted_cluster import DECODE, PREFILL, gateway, nothing_in_flight, until
from scripted_worker import workers

from eyas.common.config import GatewayConfig
from eyas.common.errors import Overloaded
from eyas.common.types import GenerationRequest
from gateway.backends.admission import served_model
from gateway.backends.answer import admitted
from gateway.formats.openai_request import ApiCall, text_call
from gateway.formats.schema import TextBody

CONFIG = GatewayConfig()


class Slow(ScriptedBackend):
    """Admits a request once `admits` says so; `refuses` says which ones it refuses then."""

    waiting = 0
    left = 0
    admits: asyncio.Event
    refuses: frozenset[int] = frozenset()

    async def start(self, request: GenerationRequest) -> Any:
        place, self.waiting = self.waiting, self.waiting + 1
        try:
            await self.admits.wait()
            if place in self.refuses:
                raise Overloaded(f"no place for {place}")
            if self.refuses and place > min(self.refuses):
                await asyncio.Event().wait()  # still asking when another is refused
        except asyncio.CancelledError:
            self.left += 1
            raise
        return await super().start(request)


@pytest.fixture
def backend() -> Slow:
    slow = Slow(nano_tokenizer())
    slow.says = lambda request, choice: slow.tokenizer.decode(request.prompt_ids)
    slow.admits = asyncio.Event()
    return slow


async def call_of(backend: ScriptedBackend, prompts: int) -> ApiCall:
    names = [f"prompt {i}" for i in range(prompts)]
    body = TextBody.model_validate({"model": CONFIG.served_model, "prompt": names, "max_tokens": 20})
    return await text_call(CONFIG, served_model(CONFIG, await backend.models()), backend.tokenizer, body)


async def test_prompts_are_admitted_together_and_answered_in_order(backend: Slow) -> None:
    texts = [""] * 64
    call = await call_of(backend, 64)
    opening = asyncio.create_task(until(lambda: backend.waiting == 64))
    opening.add_done_callback(lambda _: backend.admits.set())
    async with asyncio.timeout(30), admitted(backend, backend.tokenizer, call) as answer:
        await opening
        async for delta in each(answer):
            texts[delta.choice] += delta.text
    assert texts == [f"prompt {i}" for i in range(64)]
    assert all(stream.closed.is_set() for stream in backend.streams)


async def test_a_refused_prompt_cancels_those_still_being_admitted(backend: Slow) -> None:
    backend.refuses = frozenset({5})
    backend.admits.set()
    with pytest.raises(Overloaded, match="no place for 5"):
        async with asyncio.timeout(30), admitted(backend, backend.tokenizer, await call_of(backend, 64)):
            raise AssertionError("it was refused")
    assert (len(backend.streams), backend.left) == (5, 58)
    assert all(stream.closed.is_set() for stream in backend.streams)


async def test_a_caller_that_disconnects_cancels_all_prompts(backend: Slow) -> None:
    async def ask() -> None:
        async with admitted(backend, backend.tokenizer, await call_of(backend, 8)):
            raise AssertionError("no request was admitted")

    asking = asyncio.create_task(ask())
    await until(lambda: backend.waiting == 8)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (backend.waiting, backend.left, backend.streams) == (8, 8, [])


async def test_prompts_submitted_together_go_to_different_workers(backend: Slow) -> None:
    async with workers(PREFILL, PREFILL, DECODE, DECODE) as started, gateway(started) as (cluster, lines):
        call = await call_of(backend, 8)
        async with asyncio.timeout(30), admitted(cluster, backend.tokenizer, call) as answer:
            assert [delta.choice async for delta in each(answer)]
        assert [len(w.of("prefill") + w.of("submit")) for w in started] == [4, 4, 4, 4]
        await until(lambda: nothing_in_flight(lines))
