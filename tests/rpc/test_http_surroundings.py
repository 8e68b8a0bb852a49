"""What surrounds an answer: request ids in logs, calls from web pages, the doctor that looks at it all."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer
from scripted_cluster import DECODE, PREFILL, gateway, until
from scripted_worker import ScriptedWorker, workers

from eyas import doctor as doctor
from eyas.client.reach import ServerAddress
from eyas.common.cluster.listening import free_ports
from eyas.common.config import GatewayConfig
from eyas.common.errors import Unavailable
from eyas.common.logging import JsonFormatter
from eyas.common.wire.links import PageLink
from eyas.doctor import examine, pairs
from gateway.backends.base import GenerationBackend
from gateway.http.front import create_app
from gateway.http.protocol import HttpLimits
from gateway.http.server import HttpServer
from gateway.observe.canary import CanaryBackend
from gateway.observe.metrics import GatewayMetrics

CHAT = {"model": "eyas-nano", "messages": [{"role": "user", "content": "Hi"}]}


def client_of(config: GatewayConfig) -> httpx.AsyncClient:
    backend = ScriptedBackend(nano_tokenizer())
    app = create_app(config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=10)


async def test_a_log_line_ties_the_callers_id_to_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[dict[str, Any]] = []
    formatter = JsonFormatter("gateway")

    class Sink(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(formatter.format(record)))

    logger, sink = logging.getLogger("eyas.gateway"), Sink()
    logger.addHandler(sink)
    caplog.set_level(logging.INFO)
    try:
        async with client_of(GatewayConfig()) as client:
            body = (
                await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine"})
            ).json()
        logger.info("after it")
    finally:
        logger.removeHandler(sink)
    (line,) = [line for line in lines if body["id"] in line["message"]]
    assert line["request_id"] == "mine" and line["process"] == "gateway" and line["level"] == "INFO"
    assert "request_id" not in lines[-1]


def test_an_exception_is_one_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        record = logging.LogRecord(
            "eyas", logging.ERROR, "", 0, "it %s", ("broke",), (ValueError, error, None)
        )
    text = JsonFormatter("engine").format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == "it broke" and "a\nb" in line["exception"]
    assert line["time"].endswith("+00:00")


async def test_web_pages_of_other_origins_may_call_only_if_allowed() -> None:
    origin = {"origin": "https://chat.example"}
    preflight = origin | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with client_of(GatewayConfig()) as client:
        assert "access-control-allow-origin" not in (await client.get("/v1/models", headers=origin)).headers
    config = GatewayConfig(cors_origins=("https://chat.example",), api_keys=("k",))
    async with client_of(config) as client:
        asked = await client.options("/v1/chat/completions", headers=preflight)
        assert asked.status_code == 200  # asked without the key, as browsers do
        assert asked.headers["access-control-allow-origin"] == "https://chat.example"
        assert asked.headers["x-request-id"]
        denied = await client.options(
            "/v1/models", headers=preflight | {"origin": "https://elsewhere.example"}
        )
        assert denied.status_code == 400 and denied.headers["x-request-id"]
        assert denied.json()["error"]["message"] == "Disallowed CORS origin"
        refused = await client.post("/v1/chat/completions", json=CHAT, headers=origin)
        assert refused.status_code == 401  # the page may read even a refusal
        assert refused.headers["access-control-allow-origin"] == "https://chat.example"
        other = await client.get("/health", headers={"origin": "https://elsewhere.example"})
        assert "access-control-allow-origin" not in other.headers


# --- the doctor ----------------------------------------------------------------------------------------


async def examined(backend: GenerationBackend, metrics: GatewayMetrics, key: str | None = "k") -> int:
    """What the doctor says of a real gateway in front of `backend`."""
    port = next(free_ports())
    app = create_app(GatewayConfig(api_keys=("k",)), backend, nano_tokenizer(), metrics)
    server = HttpServer(app, "127.0.0.1", port, HttpLimits())
    await server.start()
    try:
        asked = ServerAddress(f"http://127.0.0.1:{port}", key)
        return await asyncio.to_thread(examine, asked, None)
    finally:
        await server.aclose()


async def diagnose(started: list[ScriptedWorker], key: str | None = "k") -> int:
    """The same in front of scripted workers, once they are known to serve."""
    async with gateway(started) as (backend, _):
        metrics = GatewayMetrics(CollectorRegistry())
        canary = CanaryBackend(backend, metrics)
        flights = asyncio.create_task(canary.run())
        try:
            await until(lambda: not canary.health().problem)
            return await examined(canary, metrics, key)
        finally:
            flights.cancel()


async def test_the_doctor_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    async with workers(PREFILL, DECODE) as started:
        started[1].script.path = "shm"
        assert await diagnose(started) == 0
    shown = capsys.readouterr().out
    assert all(worker.address in shown for worker in started)
    assert "by shm" in shown and "all is well" in shown and "healthy" in shown


async def test_the_doctor_names_what_a_worker_does_without(capsys: pytest.CaptureFixture[str]) -> None:
    async with workers(PREFILL, DECODE) as started:
        started[0].script.trouble = "the store gives no page: Connection refused"
        started[1].script.path = "shm"
        assert await diagnose(started) == 1
    worker = f"worker {started[0].address} (prefill)"
    assert f"problem: {worker}: the store gives no page: Connection refused" in capsys.readouterr().out


async def test_the_doctor_shows_each_link(capsys: pytest.CaptureFixture[str]) -> None:
    async with workers(PREFILL, DECODE) as started:
        started[1].script.path = "nixl"
        reason = "GPUs 0 and 1 have no peer access"
        started[1].script.links = [
            PageLink(0, "nixl", {"cuda_ipc": reason}, 2.5e-3, 12.5e9, 3, 4_500_000),
            PageLink(1, problem="no way leads there"),
        ]
        assert await diagnose(started) == 1
    lines = capsys.readouterr().out.splitlines()
    pair = f"{started[1].address} <- {started[0].address}"
    first, why, second = lines[(at := next(i for i, line in enumerate(lines) if pair in line)) : at + 3]
    assert all(text in first for text in ("ok", "rank 0", "nixl", "2.5 ms", "12.50 GB/s", "3 pulls, 4.5 MB"))
    assert why.strip() == f"not cuda_ipc: {reason}"
    assert all(text in second for text in ("!!", "rank 1", "no way", " - "))
    assert f"problem: link {pair} rank 1: no way leads there" in lines


def test_links_go_from_each_owner_to_each_other_worker_that_pulls() -> None:
    told = {"a": "prefill", "b": "prefill,decode", "c": "decode", "d": "draft"}
    known = [{"worker": name, "roles": roles.split(","), "stays": False} for name, roles in told.items()]
    known.append({"worker": "e", "roles": ["prefill", "decode"], "stays": True})
    assert pairs(known) == [("b", "a"), ("c", "a"), ("c", "b"), ("d", "a"), ("d", "b")]


async def test_the_doctor_finds_a_detour(capsys: pytest.CaptureFixture[str]) -> None:
    async with workers(PREFILL, DECODE) as started:
        assert await diagnose(started) == 1
    assert "computed the prompt itself" in capsys.readouterr().out


async def test_the_doctor_is_not_let_in(capsys: pytest.CaptureFixture[str]) -> None:
    async with workers(PREFILL, DECODE) as started:
        assert await diagnose(started, key="wrong") == 1
    assert "401" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["refused", "too late", "not understood"])
async def test_the_doctor_tells_what_it_found_before_a_step_failed(
    way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ScriptedBackend(nano_tokenizer(), is_healthy=False)  # and its worker is not there
    if way == "refused":
        backend.refusal = Unavailable("no way through")
    elif way == "too late":
        backend.pause_s = 30.0
        monkeypatch.setattr(doctor, "TIMEOUT_S", 0.2)
    else:
        monkeypatch.setitem(doctor.REQUEST, "timings", False)  # so the reply lacks what the doctor reads
    assert await examined(backend, GatewayMetrics(CollectorRegistry())) == 1
    shown = capsys.readouterr().out
    problems = [line for line in shown.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 3 and "3 found" in shown
    assert problems[0] == "problem: no worker is serving"
    assert "worker 127.0.0.1:1 (prefill,decode) could not be asked" in problems[1]
    assert problems[2].startswith("problem: the request through the cluster failed: ")
    reason = {"refused": "no way through", "too late": "ReadTimeout", "not understood": "'timings'"}[way]
    assert reason in problems[2]


def test_the_doctor_says_that_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(ServerAddress("http://127.0.0.1:1"), None) == 1
    assert "nothing listens" in capsys.readouterr().out
