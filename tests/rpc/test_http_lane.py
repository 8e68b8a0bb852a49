"""The lane against the reader's way: the same events leave, whatever a call asks for, sooner or later."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from scripted_backend import nano_tokenizer
from scripted_cluster import DECODE, PREFILL, UNIFIED, gateway, until
from scripted_worker import ScriptedWorker, workers

from eyas.common.config import GatewayConfig
from gateway.backends.answer import EntryLane, around
from gateway.backends.delivery import MAX_BUFFERED_STEPS
from gateway.http.front import create_app
from gateway.http.protocol import HttpLimits
from gateway.http.server import HttpServer
from gateway.observe.metrics import GatewayMetrics

TEXT = {"model": "eyas-nano", "prompt": [5, 6, 7], "max_tokens": 40, "stream": True, "seed": 1}
CHAT = {k: v for k, v in TEXT.items() if k != "prompt"} | {"messages": [{"role": "user", "content": "Hi"}]}
USAGE = {"stream_options": {"include_usage": True}}
EVERY = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SGLANG = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 40}, "stream": True}
SEVERAL = SGLANG | {"sampling_params": {"max_new_tokens": 40, "n": 3}}
RESPONSES = {"model": "eyas-nano", "input": "Hi", "max_output_tokens": 40, "stream": True}
BY_LANE = [
    ("completions", TEXT),
    ("completions", TEXT | USAGE),
    ("completions", TEXT | {"n": 3}),
    ("completions", TEXT | {"echo": True}),
    ("chat/completions", CHAT),
    ("chat/completions", CHAT | USAGE | {"n": 2}),
    ("completions", TEXT | {"return_token_ids": True, "n": 2}),
    ("chat/completions", CHAT | EVERY),
    ("responses", RESPONSES),
    ("/generate", SGLANG),
    ("/generate", SEVERAL),
]
BY_READER = [
    ("completions", TEXT | {"logprobs": 1}),
    ("completions", TEXT | {"stop": ["zzzz"]}),
    ("completions", TEXT | {"prompt": [[5, 6], [7, 8]]}),
    ("/generate", SGLANG | {"return_logprob": True}),
    ("/generate", SGLANG | {"sampling_params": {"max_new_tokens": 40, "stop": "zzzz"}}),
    ("/generate", SGLANG | {"input_ids": [[5, 6], [7, 8]]}),
]
CONTEXT = 1 << 24  # tokens
LONG = 1000  # tokens per step: the sockets' buffers are soon full
ITS_OWN = re.compile(rb'"(?:item_)?id":"[^"]*"|"created(?:_at)?":[^,}]*|"e2e_latency":[^,}]*')


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What lanes answered."""
    answers: list[bool] = []
    take = EntryLane.offer

    def told(self: EntryLane, entry: Any, now: float) -> bool:
        answers.append(take(self, entry, now))
        return answers[-1]

    monkeypatch.setattr(EntryLane, "offer", told)
    return answers


@contextlib.asynccontextmanager
async def doors(started: list[ScriptedWorker]) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Clients of one gateway: through its own server, and through one that has no short way for parts."""
    for worker in started:
        worker.vocab_size, worker.context_length = 4096, CONTEXT
    async with gateway(started) as (backend, _):
        app = create_app(GatewayConfig(), backend, nano_tokenizer(), GatewayMetrics(CollectorRegistry()))
        server = HttpServer(app, "127.0.0.1", 0, HttpLimits())
        await server.start()
        url, plain = f"http://127.0.0.1:{server.port}/v1/", httpx.ASGITransport(app)
        async with (
            httpx.AsyncClient(base_url=url, timeout=10) as quick,
            httpx.AsyncClient(base_url="http://gateway/v1/", transport=plain, timeout=10) as slow,
        ):
            yield quick, slow
        await server.aclose()


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[bytes]:
    """Every event; of several choices, in an order that does not depend on which was told first."""
    answer = await client.post(client.base_url.join(path), json=body)
    assert answer.status_code == 200, answer.text
    found = ITS_OWN.sub(b"", answer.content).split(b"\n\n")
    several = "n" in body | body.get("sampling_params", {})
    return sorted(found) if several or len(body.get("prompt", body.get("input_ids", ()))) == 2 else found


@pytest.mark.parametrize(
    ("roles", "path", "body"),
    [
        pytest.param(roles, *asked, marks=() if roles[0] is UNIFIED or number == 0 else pytest.mark.slow)
        for roles in ((UNIFIED,), (PREFILL, DECODE))
        for number, asked in enumerate(BY_LANE)
    ],
)
async def test_the_same_events_come_by_the_lane(
    path: str, body: dict[str, Any], roles: Any, taken: list[bool]
) -> None:
    async with workers(*roles) as started, doors(started) as (quick, slow):
        expected = await events(slow, path, body)
        assert not taken, "there is no lane without parts"
        assert await events(quick, path, body) == expected
        assert taken.count(True) > len(taken) / 2


@pytest.mark.parametrize(
    ("roles", "body"),
    [
        ((UNIFIED, UNIFIED), TEXT | {"max_tokens": 200, "n": 2}),
        ((PREFILL, DECODE, DECODE), TEXT | {"max_tokens": 400}),
        pytest.param((UNIFIED, UNIFIED), TEXT | {"max_tokens": 400}, marks=pytest.mark.slow),
        pytest.param((PREFILL, DECODE, DECODE), TEXT | {"max_tokens": 200, "n": 2}, marks=pytest.mark.slow),
    ],
)
async def test_a_worker_that_is_lost_on_the_way_changes_no_byte(
    roles: Any, body: dict[str, Any], taken: list[bool]
) -> None:
    """Another worker goes on, from what the lane has shown; what the first one still says is dropped."""
    async with workers(*roles) as started, doors(started) as (quick, slow):
        expected = await events(slow, "completions", body | USAGE)
        submits = [len(worker.of("submit")) for worker in started]
        told = asyncio.create_task(events(quick, "completions", body | USAGE))
        await until(lambda: taken.count(True) > 20)
        for worker, known in zip(started, submits, strict=True):
            if len(worker.of("submit")) > known:
                worker.end_sessions()
        before = len(taken)
        assert await told == expected
        assert taken[before:].count(True) > 20, "the lane goes on with the other worker"


@pytest.mark.parametrize(("path", "body"), BY_READER)
async def test_what_a_lane_cannot_say_takes_none(path: str, body: dict[str, Any], taken: list[bool]) -> None:
    async with workers(UNIFIED) as started, doors(started) as (quick, slow):
        assert await events(quick, path, body) == await events(slow, path, body)
        assert True not in taken


@given(st.text(), st.integers(0, 9))
def test_an_event_rendered_around_its_text_is_the_plain_one(text: str, choice: int) -> None:
    def render(choice: int, text: str) -> bytes:
        said = {"index": choice, "text": text, "model": 'a "text" of its own'}
        return b"data: " + json.dumps(said, ensure_ascii=False).encode() + b"\n\n"

    before, after = around(render, choice)
    line = (before + msgspec.json.encode(text) + after).removeprefix(b"data: ")
    assert json.loads(line) == json.loads(render(choice, text).removeprefix(b"data: "))


def reader(port: int, body: dict[str, Any]) -> socket.socket:
    """A client with a small buffer that has asked and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def all_of(client: socket.socket) -> bytes:
    """What a client gets until the answer ends."""
    client.settimeout(10)
    got = b""
    while not got.endswith(b"0\r\n\r\n"):
        got += client.recv(1 << 20)
    return got


def texts(answer: bytes) -> Iterator[str]:
    for line in re.findall(rb'data: (\{"id".*\})\n', answer):
        yield json.loads(line)["choices"][0]["text"]


@pytest.mark.slow
async def test_a_client_that_pauses_gets_everything_in_order(taken: list[bool]) -> None:
    body = TEXT | {"max_tokens": LONG * (MAX_BUFFERED_STEPS - 1)}
    async with workers(UNIFIED) as started, doors(started) as (quick, slow):
        started[0].script.step_s, started[0].script.tokens_a_step = 0.0, LONG
        whole = (await slow.post("completions", json=body | {"stream": False})).json()["choices"][0]["text"]
        with reader(quick.base_url.port or 0, body) as client:
            await until(lambda: True in taken and taken[-1] is False, 10.0)  # it is the reader's turn
            assert "".join(texts(await asyncio.to_thread(all_of, client))) == whole


@pytest.mark.parametrize("more", [{}, {"stream": False}, {"model": "another"}])
async def test_a_caller_of_http_1_0_gets_no_chunks(more: dict[str, Any], taken: list[bool]) -> None:
    """The connection ends with the answer, and all of it has come."""
    async with workers(UNIFIED) as started, doors(started) as (quick, slow):
        body = json.dumps(TEXT | more).encode()
        expected = await slow.post("completions", json=TEXT | more)
        reader, writer = await asyncio.open_connection("127.0.0.1", quick.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        head, _, answer = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower() and b"connection: close" in head
        assert ITS_OWN.sub(b"", answer) == ITS_OWN.sub(b"", expected.content)
        assert not taken


async def test_a_client_that_never_reads_is_ended() -> None:
    async with workers(UNIFIED) as started, doors(started) as (quick, _):
        started[0].script.step_s, started[0].script.tokens_a_step = 0.0, LONG
        with reader(quick.base_url.port or 0, TEXT | {"max_tokens": CONTEXT - 3}):
            await until(lambda: bool(started[0].of("cancel")), 30.0)


async def test_a_lane_that_breaks_ends_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: EntryLane, entry: Any, now: float) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(EntryLane, "offer", breaks)
    async with workers(UNIFIED) as started, doors(started) as (quick, _):
        *_, error, done, _ = await events(quick, "completions", TEXT)
        assert b"internal error" in error and done == b"data: [DONE]"
        assert (await quick.post("completions", json=TEXT | {"stream": False})).status_code == 200
