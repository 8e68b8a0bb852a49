"""Both links carry the same batches, in order, and neither end waits for the other."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from fake_engine import request

from eyas.common.types import FinishCause, FirstToken, KvHandle, KvKind, RankPages, TokenEntry, TokenLogprob
from eyas.engine.ipc.messages import (
    AttachKv,
    CancelGeneration,
    DraftCommit,
    DraftUp,
    EngineLoad,
    PullDone,
    RequestFailed,
    ShutdownEngine,
    StepReply,
    SubmitGeneration,
    WatchUpdate,
    WireFailure,
)
from eyas.worker.link import ZmqEngine, ZmqFront, new_endpoint
from tests.rpc.local_link import LocalEngine, LocalFront

HANDLE = KvHandle("h:1", 2**64 - 1, 0, 9, KvKind.DRAFT, "l", 5, (RankPages(0, (3, 4)),))
COMMANDS = [
    SubmitGeneration(request(1, 2, choices=2), 3, True),
    AttachKv("r", 4, (HANDLE,), (FirstToken(0, 7, TokenLogprob(-0.5, ((1, -1.0),)), FinishCause.STOP),)),
    CancelGeneration("r"),
    PullDone(3, (), b"\x00\xff" * 100),
    DraftUp(commits=(DraftCommit(1, 2, 3, (4,), b"\x01\x00", 5),), peer=8),
    ShutdownEngine(),
]
EVENTS = [
    StepReply((TokenEntry("r", 1, 0, 2, (3, 4), (TokenLogprob(-1.0),) * 2, FinishCause.LENGTH, 1, 2),)),
    RequestFailed("r", 1, WireFailure("overloaded", "full"), choice=0),
    WatchUpdate(1, failure=WireFailure("transfer_failed", "gone")),
    EngineLoad(1, True, 2, 3, 4),
]


@pytest.fixture(params=["local", "zmq"])
async def ends(request: pytest.FixtureRequest) -> Any:
    if request.param == "local":
        front: Any = LocalFront()
        yield front, LocalEngine(front)
        return
    endpoint = new_endpoint()
    front, engine = ZmqFront(endpoint), ZmqEngine(endpoint)
    yield front, engine
    engine.close()
    front.close()


async def test_every_message_arrives_equal_and_in_order(ends: Any) -> None:
    front, engine = ends
    front.send(COMMANDS)
    front.send([CancelGeneration("x", 0)])
    got: list[Any] = []
    while len(got) <= len(COMMANDS):
        got += await asyncio.to_thread(engine.recv, 2.0)
    assert got == [*COMMANDS, CancelGeneration("x", 0)]
    engine.send(EVENTS)
    engine.send([])  # nothing to say is no message
    engine.send(EVENTS[:1])
    assert await asyncio.wait_for(front.recv(), 20) == EVENTS
    assert await asyncio.wait_for(front.recv(), 20) == EVENTS[:1]


async def test_recv_drains_all_and_waits_only_as_long_as_told(ends: Any) -> None:
    front, engine = ends
    began = time.monotonic()
    assert engine.recv(0.1) == []
    assert 0.09 < time.monotonic() - began < 20.0
    assert engine.recv(0.0) == []
    for i in range(50):
        front.send([CancelGeneration(str(i))])
    await asyncio.sleep(0.2)
    assert [c.id for c in await asyncio.to_thread(engine.recv, 1.0)] == [str(i) for i in range(50)]


async def test_a_front_nobody_reads_does_not_wait(ends: Any) -> None:
    front, engine = ends
    began = time.monotonic()
    for _ in range(3000):
        front.send(COMMANDS[:1])
        engine.send(EVENTS)
    assert time.monotonic() - began < 20.0


async def test_what_is_sent_before_there_is_an_engine_waits_for_it() -> None:
    endpoint = new_endpoint()
    front = ZmqFront(endpoint)
    front.send(COMMANDS)
    front.send([CancelGeneration("x")])
    await asyncio.sleep(0.05)
    engine = ZmqEngine(endpoint)
    got: list[Any] = []
    while len(got) <= len(COMMANDS):
        got += await asyncio.to_thread(engine.recv, 2.0)
    assert got == [*COMMANDS, CancelGeneration("x")]
    engine.close()
    front.close()


STRANGER = """
import os, sys, time
from eyas.engine.ipc.messages import EngineStopped
from eyas.worker.link import ZmqEngine
os.setgid(65534), os.setuid(65534)
ZmqEngine(sys.argv[1]).send([EngineStopped()])
time.sleep(1.0)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
async def test_another_user_is_not_heard() -> None:
    endpoint = new_endpoint()
    front = ZmqFront(endpoint)
    stranger = subprocess.Popen([sys.executable, "-c", STRANGER, endpoint])
    assert await asyncio.to_thread(stranger.wait, 20) == 0, "it could connect, and say what it wanted"
    engine = ZmqEngine(endpoint)
    engine.send(EVENTS)
    assert await asyncio.wait_for(front.recv(), 30) == EVENTS
    engine.close()
    front.close()
