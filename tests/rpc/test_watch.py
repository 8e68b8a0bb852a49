"""Two fronts and the pages between them: handshake, Watch, Release, and all that can go wrong."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from fake_engine import FEATURE, FakeWorker, Traits, request, token, worker

from eyas.common.errors import TransferFailed
from eyas.common.types import KvHandle, Role
from eyas.common.wire import clients, message, rpc
from eyas.common.wire.transfer import TransferClient, WatchDone, WatchReady
from eyas.engine.ipc.messages import (
    PullDone,
    PullFailed,
    PullReady,
    PullReleased,
    ReleaseHandle,
    ReleaseLease,
    ReleasePull,
    WatchClosed,
    WatchOpened,
)
from tests.rpc.session_events import next_of, tokens_of
from tests.rpc.watched_workers import decoder_of, prefilled


async def attached(decode: FakeWorker, channel: Any, handle: KvHandle) -> Any:
    """A session on `decode` whose one request pulls `handle`, as attempt 2."""
    session = clients.DecodeSessionClient(channel, decode.address).open()
    session.submit(request(4, 5, 6), attempt=1, attach=True)
    session.attach("r", 2, (handle,), ())
    return aiter(session)


async def test_pages_are_watched_released_and_then_decoded() -> None:
    async with worker(Role.PREFILL) as prefill, decoder_of(prefill) as decode:
        handle = await prefilled(prefill)
        async with rpc.channel(decode.address) as channel:
            session = await attached(decode, channel, handle)
            got = await tokens_of(session)
            assert [(e.index, e.tokens[0]) for e in got] == [(i, token((4, 5, 6), 0, i)) for i in range(3)]
        assert decode.engine.of(PullReady) == [PullReady(2, tokens=2)]
        (done,) = decode.engine.of(PullDone)
        assert done.last_feature == FEATURE and done.choices[0].token == token((4, 5, 6), 0, 0)
        assert decode.engine.of(PullReleased) == [PullReleased(2, valid=True)]
        (opened,) = prefill.engine.of(WatchOpened)
        assert (opened.handle, opened.attempt) == (handle, 2)
        assert [r.attempt for r in prefill.engine.of(ReleaseLease)] == [2]
        assert await prefill.heard(WatchClosed) == [WatchClosed(opened.watch)]


async def test_a_broken_lease_is_reported() -> None:
    traits = Traits(lease_valid=False)
    async with worker(Role.PREFILL, traits=traits) as prefill, decoder_of(prefill) as decode:
        async with rpc.channel(decode.address) as channel:
            session = await attached(decode, channel, await prefilled(prefill))
            lost = await next_of(session, message.PagesLost)
            assert (lost.id, lost.attempt) == ("r", 2)
        assert decode.engine.of(PullReleased) == [PullReleased(2, valid=False)]


@pytest.mark.parametrize(
    "traits, sentence",
    [
        (Traits(layout_hashes={"target": "other"}), "hash of meaning differs"),
        (Traits(page_size=32), "page_size is 16 here and 32"),
        (Traits(offered_epoch=4), "restarted after it offered"),
        (Traits(layout_hashes={}), "no pages of the target group"),
    ],
)
async def test_pages_that_do_not_fit_are_refused_before_a_watch_opens(traits: Traits, sentence: str) -> None:
    async with worker(Role.PREFILL, traits=traits) as prefill, decoder_of(prefill) as decode:
        async with rpc.channel(decode.address) as channel:
            session = await attached(decode, channel, await prefilled(prefill))
            await next_of(session, message.PagesLost)
        (failed,) = decode.engine.of(PullFailed)
        assert sentence in failed.failure.message
        assert prefill.engine.of(WatchOpened) == []


async def test_the_owner_says_failed() -> None:
    async with worker(Role.PREFILL) as prefill, rpc.channel(prefill.address) as channel:
        handle = msgspec.structs.replace(await prefilled(prefill), id=99)
        updates = TransferClient(channel, prefill.address).watch(handle, 1)
        assert await anext(updates) == WatchReady(2)
        with pytest.raises(TransferFailed, match="no such handle"):
            await anext(updates)


async def test_a_watch_stays_open_after_done_until_the_puller_leaves() -> None:
    async with worker(Role.PREFILL) as prefill, rpc.channel(prefill.address) as channel:
        updates = TransferClient(channel, prefill.address).watch(await prefilled(prefill), 1)
        assert await anext(updates) == WatchReady(2)
        assert isinstance(await anext(updates), WatchDone)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(anext(updates))), 0.3)
        assert prefill.engine.of(WatchClosed) == []
        await channel.close()
        await prefill.heard(WatchClosed)


async def test_an_owner_that_goes_away_fails_the_pull() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with worker(Role.PREFILL) as prefill:
            handle = await prefilled(prefill)
            decode = await stack.enter_async_context(decoder_of(prefill))
        async with rpc.channel(decode.address) as channel:
            session = await attached(decode, channel, handle)
            await next_of(session, message.PagesLost)
        (failed,) = decode.engine.of(PullFailed)
        assert failed.failure.code == "unavailable"
        decode.engine.post = [ReleasePull(failed.pull)]
        assert await decode.heard(PullReleased) == [PullReleased(failed.pull, valid=False)]


async def test_a_release_whose_verdict_is_known_is_answered_by_nobody() -> None:
    async with worker(Role.PREFILL) as prefill, decoder_of(prefill) as decode:
        handle = await prefilled(prefill)
        decode.engine.post = [ReleaseHandle(handle, 3)]
        (release,) = await prefill.heard(ReleaseLease)
        assert release == ReleaseLease(0, handle.id, handle.epoch, 3)
        assert decode.engine.of(PullReleased) == [] and prefill.engine.of(WatchOpened) == []
