"""The HTTP front on a real socket: the openai client against it, and clients that hang up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.config import GatewayConfig
from eyas.common.errors import Overloaded
from gateway.formats import fields
from gateway.http import front as http
from gateway.http.front import create_app
from gateway.limits import queues
from gateway.observe.metrics import GatewayMetrics


class Server(uvicorn.Server):
    """A gateway on a free port, run by a thread of its own or by the test's loop."""

    def __init__(self, backend: ScriptedBackend) -> None:
        app = create_app(
            GatewayConfig(api_keys=("k",)), backend, backend.tokenizer, GatewayMetrics(CollectorRegistry())
        )
        super().__init__(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/v1"

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return ScriptedBackend(nano_tokenizer())


@pytest.fixture(scope="module")
def client(backend: ScriptedBackend) -> Iterator[openai.OpenAI]:
    server = Server(backend)
    thread = threading.Thread(target=server.run, args=([server.socket],))
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    with openai.OpenAI(base_url=server.url, api_key="k", max_retries=0, timeout=10) as client:
        yield client
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def fresh(backend: ScriptedBackend) -> None:
    backend.refusal = None
    backend.says = lambda request, choice: f"Answer {choice} is: naïve \U0001f642 ### end"


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="eyas-nano",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        n=2,
        stop="###",
        logprobs=True,
        top_logprobs=1,
    )
    assert [c.message.content for c in reply.choices] == [f"Answer {i} is: naïve \U0001f642 " for i in (0, 1)]
    assert [c.finish_reason for c in reply.choices] == ["stop", "stop"]
    scored = [c.logprobs.content for c in reply.choices if c.logprobs and c.logprobs.content]
    assert reply.usage is not None
    assert sum(map(len, scored)) == reply.usage.completion_tokens
    details = reply.usage.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens


def test_chat_stream(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    usage = None
    for chunk in client.chat.completions.create(
        model="eyas-nano",
        messages=[{"role": "user", "content": "Hi"}],
        n=2,
        stop=["###"],
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            assert "#" not in texts[choice.index] and "\ufffd" not in texts[choice.index]
    assert texts == {i: f"Answer {i} is: naïve \U0001f642 " for i in (0, 1)}
    assert usage is not None and usage.completion_tokens > 0


def test_completions(client: openai.OpenAI) -> None:
    ids = [5, 6, 7]
    reply = client.completions.create(model="eyas-nano", prompt=[ids, ids], max_tokens=3, logprobs=2)
    assert [c.finish_reason for c in reply.choices] == ["length", "length"]
    assert reply.usage is not None and reply.usage.prompt_tokens == 6
    for choice in reply.choices:
        assert choice.logprobs is not None and choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
    stream = client.completions.create(
        model="eyas-nano", prompt=ids, max_tokens=60, stream=True, extra_body={"speculative": False}
    )
    assert "".join(chunk.choices[0].text for chunk in stream).endswith("### end")


def test_errors(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    def ask(stream: bool = False, **more: object) -> object:
        return client.completions.create(model="eyas-nano", prompt="x", stream=stream, extra_body={**more})

    with pytest.raises(openai.BadRequestError) as bad:
        ask(top_p=7)
    assert bad.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    backend.refusal = Overloaded("the queue is full")
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as limited:
            ask(stream)
        assert limited.value.response.headers["retry-after"] == "1"
    assert [model.id for model in client.models.list()] == ["eyas-nano"]


@contextlib.asynccontextmanager
async def serving(backend: ScriptedBackend) -> AsyncIterator[str]:
    """The URL of a gateway in this event loop, whose streams the test may look at."""
    server = Server(backend)
    task = asyncio.create_task(server.serve([server.socket]))
    try:
        yield server.url
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 30)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_ends_its_generation(stream: bool) -> None:
    backend = ScriptedBackend(nano_tokenizer(), says=lambda *_: "word " * 50, pause_s=0.1)
    body = {"model": "eyas-nano", "prompt": "x", "max_tokens": 100, "stream": stream}
    async with serving(backend) as url:
        async with httpx.AsyncClient(headers={"authorization": "Bearer k"}) as client:
            with contextlib.suppress(httpx.ReadTimeout):
                async with client.stream("POST", f"{url}/completions", json=body, timeout=0.4) as response:
                    assert stream and response.status_code == 200
                    async for line in response.aiter_lines():
                        if line.startswith("data: "):
                            break
        async with asyncio.timeout(20):
            await backend.streams[0].closed.wait()
        assert backend.streams[0].told < 10


async def test_a_client_that_hangs_up_before_admission_ends_it() -> None:
    backend = ScriptedBackend(nano_tokenizer())
    gone = asyncio.Event()

    async def never(_: object) -> None:
        try:
            await asyncio.sleep(30)
        finally:
            gone.set()

    backend.start = never  # type: ignore[assignment]
    async with serving(backend) as url:
        async with httpx.AsyncClient(headers={"authorization": "Bearer k"}, timeout=0.3) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(f"{url}/completions", json={"model": "eyas-nano", "prompt": "x"})
        async with asyncio.timeout(20):
            await gone.wait()


async def test_a_client_that_hangs_up_before_its_turn_is_not_read(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "LEAST_REST_S", 1.0)  # between two requests
    read = list[bytes]()

    def noted(kind: type, raw: bytes) -> object:
        read.append(raw)
        return fields.parse(kind, raw)

    monkeypatch.setattr(http, "parse", noted)
    async with serving(backend) as url, httpx.AsyncClient(headers={"authorization": "Bearer k"}) as client:

        async def ask(prompt: str, timeout: float) -> httpx.Response:
            body = {"model": "eyas-nano", "prompt": prompt, "max_tokens": 1}
            return await client.post(f"{url}/completions", json=body, timeout=timeout)

        assert (await ask("first", 5)).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            await ask("left", 0.2)
        assert (await ask("last", 5)).status_code == 200
        await asyncio.sleep(1.2)  # another turn
    assert len(read) == 2 and b"last" in read[1]


async def test_others_are_answered_while_a_body_of_many_messages_is_read(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def slowly(kind: type, raw: bytes) -> object:
        assert answered.wait(10), "the event loop waits"
        return fields.parse(kind, raw)

    monkeypatch.setattr(http, "parse", slowly)
    messages = [{"role": "user", "content": "x"}] * 1024
    async with serving(backend) as url, httpx.AsyncClient(headers={"authorization": "Bearer k"}) as client:
        body = {"model": "eyas-nano", "messages": messages, "max_tokens": 1}
        reading = asyncio.create_task(client.post(f"{url}/chat/completions", json=body, timeout=15))
        await asyncio.sleep(0.1)
        assert (await client.get(f"{url}/models", timeout=5)).status_code == 200
        answered.set()
        assert (await reading).status_code in (200, 400)  # it may be too long for the model


async def test_a_client_that_never_reads_loses_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.wire.LAST_SEND_TIMEOUT_S", 0.1)
    backend = ScriptedBackend(nano_tokenizer(), says=lambda *_: "word " * 50)
    config = GatewayConfig(request_timeout_s=0.2)
    app = create_app(config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry()))
    body = b'{"model": "eyas-nano", "prompt": "x", "max_tokens": 100, "stream": true}'
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if not incoming:
            await asyncio.Event().wait()
        return incoming.pop()

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # the socket's buffer is full

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    async with asyncio.timeout(20):
        await app(scope, receive, send)  # type: ignore[arg-type]
    assert backend.streams[0].closed.is_set()


async def test_half_a_body_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.wire.BODY_TIMEOUT_S", 0.2)
    backend = ScriptedBackend(nano_tokenizer())
    async with serving(backend) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        lines = ["POST /v1/completions HTTP/1.1", "host: x", "authorization: Bearer k", "content-length: 9"]
        writer.write("\r\n".join([*lines, "", "{"]).encode())
        async with asyncio.timeout(20):
            status = await reader.readline()
        writer.close()
    assert b" 408 " in status
    assert backend.requests == []


async def test_half_bodies_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that began first is given up; what comes at once is served meanwhile."""
    monkeypatch.setattr("gateway.http.wire.MAX_ARRIVING_BYTES", 2300)
    async with serving(ScriptedBackend(nano_tokenizer())) as url:
        lines = ["POST /v1/completions HTTP/1.1", "host: x", "authorization: Bearer k", "content-length: 900"]
        head = "\r\n".join([*lines, "", ""]).encode()
        halves = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
            writer.write(head + b" " * 800)
            halves.append((reader, writer))
            await asyncio.sleep(0.05)
        async with asyncio.timeout(20):
            assert b" 429 " in await halves[0][0].readline()
        async with httpx.AsyncClient(trust_env=False, headers={"authorization": "Bearer k"}) as client:
            whole = await client.post(f"{url}/completions", json={"model": "eyas-nano", "prompt": "Hi"})
        assert whole.status_code == 200
        for reader, writer in halves[1:]:
            writer.write(b" " * 100)
            async with asyncio.timeout(20):
                assert b" 400 " in await reader.readline()  # spaces are no JSON
        for _, writer in halves:
            writer.close()
