"""Pages of a prompt that no decode worker will pull go back to their owner before their lease ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from scripted_backend import first
from scripted_cluster import DECODE, PREFILL, collect, gateway, make_request, until
from scripted_worker import workers

from eyas.common.cluster import roster
from eyas.common.errors import Overloaded, Unavailable
from eyas.common.wire import clients
from gateway.backends import retries
from gateway.routing import cluster


async def test_pages_that_decode_was_not_told_of_go_back() -> None:
    """The caller leaves when the prompt is computed and decode has not answered yet."""
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        decode.script.silent = True
        asking = asyncio.create_task(backend.start(make_request()))
        await until(lambda: len(prefill.of("prefill")) == 1 and len(decode.of("submit")) == 1)
        await asyncio.sleep(0.2)
        asking.cancel()
        await until(lambda: len(decode.of("cancel")) == 1 and len(prefill.of("release")) == 1)
        assert [kind for kind, _ in decode.heard] == ["submit", "cancel"]
        (release,) = prefill.of("release")
        assert (release.epoch, release.id, release.attempt) == (1, 1, 1)


async def test_pages_whose_handles_were_on_their_way_when_the_caller_left_go_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompt was done: there was no stream any more that could be cancelled."""
    said, prefill_call = asyncio.Event(), clients.PrefillClient.prefill

    async def late(self: clients.PrefillClient, *given: Any) -> AsyncIterator[clients.PrefillEvent]:
        async for event in prefill_call(self, *given):
            await said.wait()
            yield event

    monkeypatch.setattr(clients.PrefillClient, "prefill", late)
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, _ = started
        asking = asyncio.create_task(backend.start(make_request()))
        await until(lambda: prefill.prefills_done == 1)
        asking.cancel()
        await asyncio.wait([asking])
        said.set()
        await until(lambda: len(prefill.of("release")) == 1, 5)
        assert not prefill.prefills_cancelled


@pytest.mark.parametrize("phase", ["admitted", "started"])
async def test_a_worker_hears_at_once_that_a_caller_has_left(phase: str) -> None:
    """By the request's id: what it had said is read, its call is not cancelled before."""
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        prefill.script.hold_prefill_at, decode.script.silent = phase, True
        asking = asyncio.create_task(backend.start(make_request("left")))
        await until(lambda: len(prefill.of("prefill")) == 1)
        await asyncio.sleep(0.2)
        asking.cancel()
        if phase == "started":  # the gateway has its handles, and gives them back
            await until(lambda: len(prefill.of("release")) == 1 and prefill.prefills_cancelled == 1)
            assert not prefill.of("cancel_prompt")
            return
        await until(lambda: len(prefill.of("cancel_prompt")) == 1)
        (cancel,) = prefill.of("cancel_prompt")
        assert (cancel.id, cancel.attempt) == ("left", 1) and not prefill.prefills_cancelled
        prefill.script.released.set()  # the handles were on their way
        await until(lambda: len(prefill.of("release")) == 1)


async def test_pages_of_a_refused_request_go_back() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        decode.script.refuse_submit, decode.script.refuse_after_s = Overloaded("full"), 0.3
        with pytest.raises(Overloaded, match="full"):
            await backend.start(make_request())
        await until(lambda: len(prefill.of("release")) == 1)


@pytest.mark.parametrize("leaves", [True, False])
async def test_pages_go_back_where_no_decode_worker_is_left(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is done, its decode worker is lost, and no other comes before the caller leaves, or ever."""
    for module, name in ((cluster, "PATIENCE_S"), (roster, "RETURN_S"), (roster, "POLL_S")):
        monkeypatch.setattr(module, name, 0.5)
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        decode.script.stop_at = 0
        stream = await backend.start(make_request())
        await first(stream, 1)
        await decode.kill()
        if leaves:
            await until(lambda: stream._decode is None)
            assert not prefill.of("release")
            await stream.aclose()
        else:
            with pytest.raises(Unavailable):
                await asyncio.wait_for(collect(stream), 30)
        await until(lambda: len(prefill.of("release")) == 1)


async def test_pages_go_back_where_a_lost_decode_worker_was_the_last_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retries, "MAX_RETRIES", 0)
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        decode.script.stop_at = 0
        stream = await backend.start(make_request())
        await until(lambda: len(decode.of("attach")) == 1)
        await decode.kill()
        with pytest.raises(Unavailable, match="was lost"):
            await asyncio.wait_for(collect(stream), 30)
        await until(lambda: len(prefill.of("release")) == 1)


async def test_pages_that_decode_lost_at_the_last_try_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "MAX_RETRIES", 0)
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        decode.script.lose, decode.script.lose_after_s = 1, 0.2
        with pytest.raises(Unavailable, match="could not be transferred"):
            await asyncio.wait_for(collect(await backend.start(make_request())), 30)
        await until(lambda: len(prefill.of("release")) == 1)


async def test_pages_that_decode_pulls_are_its_own_to_give_back() -> None:
    async with workers(PREFILL, DECODE) as started, gateway(started) as (backend, _):
        prefill, decode = started
        await collect(await backend.start(make_request()))
        decode.script.stop_at = 2
        stream = await backend.start(make_request("left", tokens=40))
        await first(stream, 1)
        await until(lambda: len(decode.of("attach")) == 2)  # the first token may come before decode admits
        await stream.aclose()
        await until(lambda: len(decode.of("cancel")) == 1)
        await asyncio.sleep(0.2)
        assert not prefill.of("release")
