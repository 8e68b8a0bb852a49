"""The decode engine's stream to a draft worker: what goes up, what comes down, what is dropped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fake_engine import FakeWorker, worker

from decode_svc.drafts import MAX_QUEUED, DraftStreams
from eyas.common.params import SamplingParams
from eyas.common.types import KvHandle, KvKind, RankPages, Role
from eyas.engine.ipc.client import EngineClient
from eyas.engine.ipc.messages import (
    DraftChannel,
    DraftClose,
    DraftCommit,
    DraftDown,
    DraftOpen,
    DraftPeerGone,
    DraftUp,
)
from tests.rpc.draft_commits import COMMIT, until_up

HANDLE = KvHandle("h:1", 5, 0, 9, KvKind.DRAFT, "l", 5, (RankPages(0, (3, 4)),))
OPEN = DraftOpen(1, 2, 2, SamplingParams(seed=2**63, temperature=0.5), 1, HANDLE, 4)
MAILED = DraftOpen(4, 3, 0, SamplingParams(), 0, place=0)
CLOSE = DraftClose(3, 1)


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    async with worker(Role.DRAFT) as draft:
        async with worker(Role.DECODE, registry=f"static:{draft.address}") as decode:
            await until_up(decode, draft.address)
            yield decode, draft


async def test_batches_go_up_whole_and_proposals_come_down() -> None:
    async with pair() as (decode, draft):
        before = len(draft.engine.of(DraftUp))
        decode.engine.post = [DraftUp((OPEN, MAILED), (COMMIT,), (CLOSE,), worker=draft.address)]
        up = (await draft.heard(DraftUp, before + 1))[-1]
        assert (up.opens, up.commits, up.closes) == ((OPEN, MAILED), (COMMIT,), (CLOSE,))
        down = decode.engine.of(DraftDown)[-1]
        (proposal,) = [d for d in decode.engine.of(DraftDown) if d.proposals][-1].proposals
        assert (proposal.seq, proposal.generation, proposal.base_len) == (1, 2, 3)
        assert proposal.tokens == (8, 9, 0x80 + 0xFF) and proposal.parents == (-1, 0, 1)
        assert down.worker == draft.address


async def test_a_channel_is_offered_by_the_stream_and_refused_by_it() -> None:
    offer = DraftChannel(
        {"path": b"/dev/shm/x", "identity": b"host/1/2"}, 4096, 60, 512, 32, b"gpu", "bfloat16"
    )
    async with pair() as (decode, draft):
        before = len(draft.engine.of(DraftUp))
        decode.engine.post = [DraftUp(channel=offer, worker=draft.address)]
        up = (await draft.heard(DraftUp, before + 1))[-1]
        assert up.channel == offer and not up.commits
        draft.engine.post = [DraftDown(no_channel="another host", peer=up.peer)]
        async with asyncio.timeout(30):
            while decode.engine.of(DraftDown)[-1].no_channel != "another host":
                await asyncio.sleep(0.01)


async def test_the_end_of_the_decode_side_is_told() -> None:
    async with worker(Role.DRAFT) as draft:
        async with worker(Role.DECODE, registry=f"static:{draft.address}") as decode:
            await until_up(decode, draft.address)
        peers = {up.peer for up in draft.engine.of(DraftUp)}
        assert {gone.peer for gone in await draft.heard(DraftPeerGone)} == peers


async def test_while_the_drafter_is_down_everything_is_dropped_and_reported() -> None:
    commands: list[Any] = []
    engine = EngineClient(commands.extend)
    streams = DraftStreams(engine)
    streams.follow(["127.0.0.1:1"])
    engine.dispatch([DraftUp((OPEN,), (COMMIT,), worker="127.0.0.1:1")])
    (closed,) = commands[0].closed
    assert (closed.seq, closed.generation, closed.reason) == (1, 2, "the draft worker is down")
    await streams.close()


async def test_a_fall_closes_everything_once_and_the_stream_comes_back() -> None:
    async with worker(Role.DRAFT) as draft:
        async with worker(Role.DECODE, registry=f"static:{draft.address}") as decode:
            await until_up(decode, draft.address)
            await draft.front._server.stop(None)  # the process dies
            async with asyncio.timeout(30):
                while not any(c.seq == 0 for d in decode.engine.of(DraftDown) for c in d.closed):
                    await asyncio.sleep(0.01)
            decode.engine.heard.clear()
            async with worker(Role.DRAFT, port=draft.port) as revived:
                await until_up(decode, draft.address)
                assert revived.engine.of(DraftUp)[-1].commits == (COMMIT,)
                falls = [c for d in decode.engine.of(DraftDown) for c in d.closed if c.seq == 0]
                assert falls == []  # said once, before


async def test_a_drafter_that_does_not_read_loses_batches_not_closes() -> None:
    commands: list[Any] = []
    async with pair() as (decode, draft):
        stream = next(iter(decode.front._drafts._streams.values()))
        stream._engine = EngineClient(commands.extend)
        for seq in range(MAX_QUEUED + 3):  # without a turn of the loop, in which they would be read
            commit = DraftCommit(seq, 1, 0, (1,), b"", 5)
            stream.post(DraftUp(commits=(commit,), closes=(DraftClose(1000 + seq, 1),)))
        dropped = [closed.seq for down in commands for closed in down.closed]
        assert dropped == [MAX_QUEUED, MAX_QUEUED + 1, MAX_QUEUED + 2]
        await asyncio.sleep(0.5)
        stream.post(DraftUp(closes=(CLOSE,)))
        closes: set[int] = set()
        async with asyncio.timeout(30):
            while 3 not in closes:
                closes |= {c.seq for up in draft.engine.of(DraftUp) for c in up.closes}
                await asyncio.sleep(0.01)
        # Those whose commits were dropped too: their engine has heard that they are over.
        assert closes == {3, *dropped, *range(1000, 1000 + MAX_QUEUED + 3)}
