"""A prefill worker and a decode worker that share one GPU: pages move through pinned staging, answers stay.

Two processes take turns on a GPU, so nothing here is timed. bf16 rounds, and a prompt may be computed in
other chunks than where one worker has all roles: answers are equal up to near-ties, by the rule of
`test_engine_on_gpu.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.cluster.plan import worker_argv
from eyas.common.cluster.listening import free_ports
from eyas.common.config import EngineConfig, WorkerConfig, resolve_engine
from eyas.common.errors import EyasError
from eyas.common.types import GenerationRequest, KvHandle, Role
from eyas.common.wire import clients, message, rpc
from tests.gpu.engine_runs import SLACK, Reference, chats
from tests.unit.loopback import Loopback, Result, wait_all

ROOT = Path(__file__).parents[2]
CHATS = 24
START_S, ANSWERS_S = 90.0, 60.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]


def engine(**changes: Any) -> EngineConfig:
    """A worker that takes a small part of the GPU and starts fast."""
    sizes = {"mem_fraction_static": 0.2, "num_pages": 2048, "max_running": 16, "cuda_graph_max_bs": 16}
    backends = {"attention_backend": "triton", "prefill_attention_backend": "triton"}
    return resolve_engine("cuda", **(sizes | backends | {"draft": None, "worker": "alone"} | changes))


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """What one worker with all roles answers."""
    cluster, requests = Loopback(engine()), chats(CHATS)
    try:
        results = [cluster.submit(request, split=False) for request in requests]
        wait_all(results, ANSWERS_S)
    finally:
        cluster.close()
    torch.cuda.empty_cache()
    return {request.id: result.tokens[0] for request, result in zip(requests, results, strict=True)}


@contextlib.contextmanager
def worker(role: Role, port: int, folder: Path, **changes: Any) -> Iterator[str]:
    """A worker as processes, under its address; what it prints goes to a file of `folder`."""
    address = f"127.0.0.1:{port}"
    config = WorkerConfig(engine=engine(roles=(role,), worker=address, pool_dir=str(folder)), port=port)
    members = changes.pop("members", address)
    config = dataclasses.replace(config, registry=f"static:{members}")
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, **changes))
    words = [word for word in worker_argv(config) if word != "--supervised"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    with open(folder / f"{role}.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "eyas.cli", *words], stdout=log, stderr=log, env=env
        )
        try:
            yield address
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def until_serving(address: str, log: Path) -> None:
    async with asyncio.timeout(START_S), rpc.channel(address) as channel:
        while True:
            with contextlib.suppress(EyasError):
                if (await clients.InfoClient(channel).info(2.0)).serving:
                    return
            assert "ConfigError" not in log.read_text(), log.read_text()
            await asyncio.sleep(0.2)


async def handles(channel: Any, request: GenerationRequest) -> tuple[KvHandle, ...]:
    found: tuple[KvHandle, ...] = ()
    async for event in clients.PrefillClient(channel).prefill(request, 1, False):
        if isinstance(event, message.PrefillStarted):
            found = event.handles
    return found


async def answers(
    prefill: str, decode: str, requests: Sequence[GenerationRequest]
) -> tuple[dict[str, list[int]], set[str]]:
    """The tokens of each request, all at once, and the ways that their pages came."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    ways: set[str] = set()
    async with rpc.channel(prefill) as up, rpc.channel(decode) as down:
        session = clients.DecodeSessionClient(down, decode).open()

        async def begin(request: GenerationRequest) -> None:
            session.submit(request, attempt=1, attach=True)
            session.attach(request.id, 2, await handles(up, request), ())

        async def collect(events: AsyncIterator[Any]) -> None:
            left = set(tokens)
            async for event in events:
                assert not isinstance(
                    event, message.PagesLost | message.RequestFailed | message.RequestRejected
                ), event
                for entry in event.entries if isinstance(event, message.StepReply) else ():
                    tokens[entry.id][entry.index :] = entry.tokens
                    if entry.timings is not None:
                        ways.add(entry.timings.transfer_path)
                    if entry.finish is not None:
                        left.discard(entry.id)
                if not left:
                    return

        async with asyncio.timeout(ANSWERS_S):
            await asyncio.gather(collect(aiter(session)), *(begin(request) for request in requests))
        session.close()
    return tokens, ways


@pytest.mark.parametrize(("by", "kernels"), [("grpc", "triton"), ("grpc", "torch")])
def test_answers_are_those_of_one_worker(by: str, kernels: str, alone: dict[str, list[int]]) -> None:
    pools = Path("/dev/shm") / f"eyas-test-{os.getpid()}-{by}-{kernels}"
    backends = {"attention_backend": kernels, "prefill_attention_backend": kernels}
    requests = chats(CHATS)
    ports = free_ports()
    first, second = next(ports), next(ports)
    pools.mkdir()

    async def run(prefill: str, decode: str) -> tuple[dict[str, list[int]], set[str]]:
        for address, role in ((prefill, Role.PREFILL), (decode, Role.DECODE)):
            await until_serving(address, pools / f"{role}.log")
        return await answers(prefill, decode, requests)

    try:
        with worker(Role.PREFILL, first, pools, **backends) as prefill:
            asyncio.run(until_serving(prefill, pools / "prefill.log"))  # each measures what is free
            members = f"{prefill},127.0.0.1:{second}"
            with worker(Role.DECODE, second, pools, members=members, transfer=by, **backends) as decode:
                tokens, ways = asyncio.run(run(prefill, decode))
        logs = {role: (pools / f"{role}.log").read_text() for role in (Role.PREFILL, Role.DECODE)}
        assert not [path for path in pools.iterdir() if path.suffix != ".log"], "staging outlived its worker"
    finally:
        for path in pools.iterdir():
            path.unlink()
        pools.rmdir()
    assert ways == {by}
    assert all("staging of target KV" in log for log in logs.values()), logs
    reference = Reference(engine().model)
    results = [Result(1, {0: tokens[request.id]}) for request in requests]
    worst = max(reference.excess(request, result) for request, result in zip(requests, results, strict=True))
    differ = sum(tokens[request.id] != alone[request.id] for request in requests)
    told = f"{differ} of {CHATS} answers differ from those of one worker; at most {worst:.3f} off"
    print(f"\n{by}, {kernels}: {told}")
    assert worst <= SLACK["bfloat16"] and differ <= 0.25 * CHATS
