"""A client that is closed: what still waits in it ends, in any thread, and what comes later is refused."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.client import AsyncClient, Cancelled, Client, InvalidRequest
from eyas.common.errors import ConfigError
from tests.rpc.sdk_front import CHAT, in_thread, served

UNSERVED = "127.0.0.1:1"  # no server listens there, so that calls are tried again


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(nano_tokenizer(), says=lambda request, choice: "on and on " * 30, pause_s=0.02)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "eyas-client"]


def closed_while(client: Client, call: Callable[[], object]) -> BaseException:
    """What `call` raises in its thread when this one closes the client."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.3)
    client.close()
    thread.join(5)
    assert not thread.is_alive(), "the call still waits"
    return raised[0]


def test_a_call_that_waits_for_its_next_try_ends() -> None:
    client = Client(UNSERVED, retries=20)
    assert isinstance(closed_while(client, lambda: client.chat(CHAT)), Cancelled)
    assert not threads()


async def test_a_stream_that_is_read_ends(backend: ScriptedBackend) -> None:
    def work(client: Client) -> BaseException:
        return closed_while(client, lambda: list(client.chat_stream(CHAT)))

    assert isinstance(await in_thread(backend, work), Cancelled)
    async with asyncio.timeout(20):
        await backend.streams[0].closed.wait()


@pytest.mark.filterwarnings("error")
async def test_a_closed_client_refuses(backend: ScriptedBackend) -> None:
    def work(client: Client) -> None:
        with client.chat_stream(CHAT) as stream:
            next(stream)
            client.close()
            for call in (lambda: next(stream), client.models, lambda: client.chat(CHAT)):
                with pytest.raises(Cancelled, match="closed"):
                    call()

    await in_thread(backend, work)


async def test_so_does_its_twin(backend: ScriptedBackend) -> None:
    async with served(backend) as address, AsyncClient(address) as client:
        reading = asyncio.create_task(client.chat(CHAT))
        await asyncio.sleep(0.2)
        await client.aclose()
        with pytest.raises(Cancelled):
            await reading
        for call in (client.models, lambda: client.chat(CHAT), lambda: client.generate("x")):
            with pytest.raises(Cancelled, match="closed"):
                await call()


def test_a_client_that_cannot_be_leaves_no_thread() -> None:
    for key in ("a key\n", "schl\u00fcssel"):
        with pytest.raises(InvalidRequest, match="api_key must be printable ASCII"):
            Client(UNSERVED, api_key=key)
    with pytest.raises(ConfigError):
        Client("https://127.0.0.1:1", ca="/none")
    assert not threads()
