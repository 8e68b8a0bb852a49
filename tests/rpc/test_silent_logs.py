"""What users say stands in no line of the gateway's log and in no metric: in answers, refusals and defects.

The whole cluster is looked at in tests/e2e/test_secure_cluster.py.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.client import AsyncClient
from eyas.common.cluster.listening import free_ports
from eyas.common.config import GatewayConfig
from eyas.common.errors import EyasError, InvalidRequest
from eyas.common.logging import JsonFormatter, TextFormatter
from gateway.main import fronts
from gateway.observe.metrics import GatewayMetrics

MARK = "Xylograph"
CHAT: dict[str, Any] = {"model": "eyas-nano", "messages": [{"role": "user", "content": MARK}]}


@pytest.fixture(params=[TextFormatter, JsonFormatter])
def said(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """What a gateway would write, from its default level on."""
    stream = io.StringIO()
    handler, root = logging.StreamHandler(stream), logging.getLogger("eyas")
    handler.setFormatter(request.param("gateway", True))
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield stream
    root.removeHandler(handler)
    root.setLevel(before)


async def ask(http: httpx.AsyncClient, client: AsyncClient, backend: ScriptedBackend) -> None:
    """Calls that end in all ways, by HTTP, as streams too, and by gRPC."""
    for error in (None, InvalidRequest(f"{MARK} is bad"), RuntimeError(MARK), KeyError(MARK)):
        backend.refusal = error  # type: ignore[assignment]  # a defect may be of any class
        for stream in (False, True):
            await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        try:
            await client.generate(MARK)
        except EyasError:
            assert error is not None
    backend.refusal, backend.breaks_with = None, ExceptionGroup(MARK, [ValueError(MARK)])
    for stream in (False, True):
        await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    for body in (CHAT | {"n": MARK}, CHAT | {"model": MARK}, CHAT | {MARK: 1}, {"messages": MARK}):
        await http.post("/v1/chat/completions", json=body)
    await http.post("/v1/chat/completions", content=b"{" + MARK.encode())
    await http.get(f"/{MARK}", headers={"authorization": f"Bearer {MARK}", "x-request-id": f"{MARK} {MARK}"})


async def test_no_line_and_no_metric_repeats_a_request(said: io.StringIO) -> None:
    """Power: defects are told with their frames, and answers with their ids; the backend did say the mark."""
    ports = free_ports()
    config = GatewayConfig(port=next(ports), grpc_port=next(ports))
    backend = ScriptedBackend(nano_tokenizer(), says=lambda *_: MARK)
    url, target = f"http://127.0.0.1:{config.port}", f"127.0.0.1:{config.grpc_port}"
    async with (
        fronts(config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry())),
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http,
        AsyncClient(target, retries=0) as client,
    ):
        await ask(http, client, backend)
        page = (await http.get("/metrics")).text
    text = said.getvalue()
    assert text.count("ended after") >= 2 and text.count("Traceback") >= 6 and "scripted_backend.py" in text
    assert "builtins.KeyError (its words may quote a request)" in text
    assert 'status="400"' in page and 'status="500"' in page
    assert [line for line in (*text.splitlines(), *page.splitlines()) if MARK.lower() in line.lower()] == []


def test_other_processes_keep_the_words_of_their_errors() -> None:
    """They see token ids alone, and an operator needs to read what the device said."""
    try:
        raise RuntimeError("out of memory")
    except RuntimeError as error:
        record = logging.LogRecord("eyas", logging.ERROR, "", 0, "it broke", (), (type(error), error, None))
    for formatter in (TextFormatter("engine"), JsonFormatter("engine")):
        assert "out of memory" in formatter.format(record)


def test_words_that_another_formatter_left_are_not_repeated() -> None:
    """`logging` keeps a record's traceback for the handlers that come after."""
    try:
        raise KeyError(MARK)
    except KeyError as error:
        record = logging.LogRecord("eyas", logging.ERROR, "", 0, "failed", (), (KeyError, error, None))
    assert MARK in logging.Formatter().format(record)
    assert MARK not in TextFormatter("gateway", True).format(record)
