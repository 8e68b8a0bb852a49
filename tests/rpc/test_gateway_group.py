"""Several gateway processes on one port: all serve, one that dies comes back, and all of them drain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from scripted_cluster import UNIFIED
from scripted_worker import workers

from eyas.client import AsyncClient
from eyas.cluster import gateway_group
from eyas.cluster.gateway_group import _line, _members
from eyas.common.cluster.listening import claim, free_ports, listen
from eyas.common.config import GatewayConfig
from eyas.common.errors import ConfigError
from eyas.common.machine.leave import SAME_WORD_S
from gateway.http.siblings import SUFFIX
from tests.rpc.gateway_process import gateway_process, line_with

ASKED = {"model": "eyas-nano", "prompt": [5, 6, 7], "max_tokens": 4}
NAMES = {"gateway-0", "gateway-1"}
LOG = partial(_line, False)


@contextlib.asynccontextmanager
async def group(address: str) -> AsyncIterator[tuple[Any, str, str]]:
    """(the process, its HTTP address, its gRPC address) once both members have said a word to the worker."""
    async with gateway_process(f"--registry=static:{address}", "--gateway-workers=2") as (process, said):
        listening = await line_with(said, "gateway listening")
        where = re.fullmatch(r".* http=(\S+)/v1 grpc=(\S+)\n", listening)
        assert where, listening
        for _ in NAMES:
            await line_with(said, "requests go through the cluster")
        log = asyncio.create_task(said.read())  # so that no process waits for a full pipe
        yield process, where[1], where[2]
        log.cancel()


async def answered(url: str) -> dict[str, float]:
    """By process: the completions that it has answered."""
    async with httpx.AsyncClient(trust_env=False) as client:
        page = (await client.get(f"{url}/metrics", timeout=10)).text
    page = page.replace('model_name="eyas-nano",', "")
    counter = r'eyas_http_responses_total\{path="/v1/completions",process="(.*)",status="200"\} (.*)'
    lines = re.findall(counter, page)
    assert page.count("eyas_serving{process=") == len(set(re.findall('process="([^"]*)"', page)))
    return {name: float(count) for name, count in lines}


async def ask(url: str, times: int) -> None:
    """Each over a connection of its own."""
    for _ in range(times):
        async with httpx.AsyncClient(trust_env=False) as client:
            (await client.post(f"{url}/v1/completions", json=ASKED, timeout=10)).raise_for_status()


def member(process: Any, name: str) -> psutil.Process:
    (found,) = [p for p in psutil.Process(process.pid).children() if f"{name}.sock" in " ".join(p.cmdline())]
    return found


@pytest.mark.slow
async def test_all_serve_and_one_that_dies_comes_back() -> None:
    async with workers(UNIFIED) as (worker,), group(worker.address) as (process, url, grpc):
        await ask(url, 24)
        counts = await answered(url)
        assert counts.keys() == NAMES and sum(counts.values()) == 24
        async with AsyncClient(grpc, retries=0) as client:
            assert (await client.generate((1, 2), max_tokens=4)).usage.completion_tokens == 4
        lost = member(process, "gateway-0").pid
        os.kill(lost, signal.SIGKILL)
        async with asyncio.timeout(30):
            while (await answered(url)).keys() != NAMES:
                with contextlib.suppress(httpx.HTTPError):  # connections that the dead one had not taken yet
                    await ask(url, 1)
        assert member(process, "gateway-0").pid != lost


@pytest.mark.slow
async def test_either_process_ends_a_request_of_the_other() -> None:
    async with workers(UNIFIED) as (worker,), group(worker.address) as (_, url, _):
        worker.script.stop_at = 1  # answers that never come
        asked = [asyncio.create_task(answer_of(url, f"r{i}")) for i in range(8)]
        async with asyncio.timeout(30):
            for i in range(8):
                while await ended(url, f"r{i}") == 0:
                    await asyncio.sleep(0.05)
        assert await asyncio.wait_for(asyncio.gather(*asked), 20) == [499] * 8


async def ended(url: str, name: str) -> int:
    """How many requests of this name are ended by one of the processes, whichever is asked."""
    async with httpx.AsyncClient(trust_env=False) as client:
        told = await client.post(f"{url}/abort_request", json={"rid": name}, timeout=20)
    return int(told.json()["aborted"])


async def answer_of(url: str, name: str) -> int:
    """The status of a request of this name, over a connection of its own."""
    async with httpx.AsyncClient(trust_env=False) as client:
        headers = {"x-request-id": name}
        return (
            await client.post(f"{url}/v1/completions", json=ASKED, headers=headers, timeout=60)
        ).status_code


@pytest.mark.slow
@pytest.mark.parametrize("to", ["the first", "every process"])
async def test_all_of_them_drain(to: str) -> None:
    async with workers(UNIFIED) as (worker,), group(worker.address) as (process, url, _):
        worker.script.step_s = 0.1
        canaries = len(worker.of("submit"))
        asked = [asyncio.create_task(ask(url, 1)) for _ in range(8)]
        async with asyncio.timeout(30):
            while len(worker.of("submit")) < canaries + 8:
                await asyncio.sleep(0.01)
        members = psutil.Process(process.pid).children()
        for told in members if to == "every process" else []:
            told.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        await asyncio.gather(*asked)
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert len(members) == 2 and not any(one.is_running() for one in members)
        listen("127.0.0.1", int(url.rpartition(":")[2]), "port").close()


@pytest.mark.slow
async def test_a_second_signal_ends_all_at_once() -> None:
    async with workers(UNIFIED) as (worker,), group(worker.address) as (process, url, _):
        worker.script.stop_at = 1  # an answer that never comes
        canaries = len(worker.of("submit"))
        hanging = asyncio.create_task(ask(url, 1))
        async with asyncio.timeout(30):
            while len(worker.of("submit")) == canaries:
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(SAME_WORD_S + 0.1)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
        with pytest.raises(httpx.HTTPError):
            await hanging


def test_a_claimed_port_is_for_those_who_share_it() -> None:
    with claim("127.0.0.1", 0, "port") as claimed:
        port = claimed.getsockname()[1]
        with listen("127.0.0.1", port, "port", shared=True), listen("127.0.0.1", port, "port", shared=True):
            for taken in (claim, listen):
                with pytest.raises(ConfigError, match=f"--port: cannot listen on 127.0.0.1:{port}"):
                    taken("127.0.0.1", port, "port")


async def test_a_taken_port_and_wide_limits_are_told_at_once(tmp_path: Path) -> None:
    port, limits = next(free_ports()), tmp_path / "limits.toml"
    limits.write_text("[default]\nrequests_per_minute = 60\n")
    with listen("127.0.0.1", port, "port", shared=True):
        flags = (
            "--registry=static:127.0.0.1:1",
            "--gateway-workers=2",
            f"--port={port}",
            f"--key-limits={limits}",
        )
        async with gateway_process(*flags) as (process, said):
            lines = (await said.read()).decode()
            assert "a key may have up to 2 times its limits" in lines
            assert f"eyas: --port: cannot listen on 127.0.0.1:{port}" in lines
            assert await process.wait() == 2


def test_a_group_needs_no_writable_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with _members(GatewayConfig(port=0, grpc_port=0, processes=2), LOG) as children:
        assert len(children) == 2


def test_a_killed_group_leaves_its_sockets_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gateway_group, "SHARED_MEMORY", str(tmp_path))
    config = GatewayConfig(port=0, grpc_port=0, processes=2)
    killed = tmp_path / f"{gateway_group.PREFIX}killed"
    killed.mkdir()
    (killed / f"gateway-0{SUFFIX}").touch()
    with _members(config, LOG), _members(config, LOG):
        assert not killed.exists() and len(list(tmp_path.iterdir())) == 2, "the first one lives"
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(gateway_group, "SHARED_MEMORY", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no socket can be made in .*nowhere: No such file"):
        with _members(config, LOG):
            pass
