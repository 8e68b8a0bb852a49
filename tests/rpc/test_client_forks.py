"""The SDK in a forked child: a sentence instead of a call that never ends, and closing ends at once."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import asyncio, os, signal, sys
from eyas.client import AsyncClient, Client, EyasError

CHAT = [{"role": "user", "content": "Hi"}]
ADDRESS = "127.0.0.1:1"

async def anew():
    async with AsyncClient(ADDRESS) as client:
        await client.models()

def tried(name, call):
    try:
        call()
    except EyasError as error:
        print(name, type(error).__name__, error.message, flush=True)

if sys.argv[1] == "used":
    client = Client(ADDRESS, retries=0)
    tried("parent", client.models)
    stream = client.chat_stream(CHAT)
    asynchronous = client._client
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(60)
if sys.argv[1] == "used":
    tried("models", client.models)
    tried("chat", lambda: client.chat(CHAT))
    tried("generate", lambda: client.generate_stream("x"))
    tried("next", lambda: next(stream))
    tried("async", lambda: asyncio.run(asynchronous.chat(CHAT)))
    asyncio.run(asynchronous.aclose())
    stream.close()
    client.close()
tried("new", lambda: Client(ADDRESS, retries=0).models())
tried("anew", lambda: asyncio.run(anew()))
"""


def run(manner: str) -> dict[str, str]:
    """By the name of each call, how it ended."""
    command = [sys.executable, "-c", CODE, manner]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_a_child_of_who_has_made_a_client_is_refused_in_words() -> None:
    ended = run("used")
    assert ended.pop("parent").startswith("Unavailable")
    assert list(ended) == ["models", "chat", "generate", "next", "async", "new", "anew"]
    for words in ended.values():
        assert words.startswith("InvalidRequest this process was forked"), ended


def test_a_child_of_who_has_not_calls_as_ever() -> None:
    ended = run("unused")
    assert list(ended) == ["new", "anew"]
    assert all(words.startswith("Unavailable") for words in ended.values()), ended
