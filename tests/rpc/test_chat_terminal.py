"""`eyas chat` as a child process, at a terminal and in a pipe, against a gateway with a scripted backend."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.cluster.listening import free_ports
from eyas.common.config import GatewayConfig
from gateway.main import fronts
from gateway.observe.metrics import GatewayMetrics

ANSWER = "# Fruit\n\nHere are **three**: apples, pears and plums."
WAIT_S = 30.0


@contextlib.asynccontextmanager
async def served(backend: ScriptedBackend, **fields: object) -> AsyncIterator[str]:
    config = GatewayConfig(port=next(free_ports()), grpc_port=0, **fields)
    async with fronts(config, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry())):
        yield f"http://127.0.0.1:{config.port}"


def command(url: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "eyas.cli", "chat", "--url", url, *flags]


def piped(url: str, said: str, *flags: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EYAS_API_KEY": key} if key else dict(os.environ)
    return subprocess.run(
        command(url, *flags), input=said, capture_output=True, text=True, timeout=WAIT_S, env=environment
    )


class Terminal:
    """A person's end of a terminal on which `eyas chat` runs."""

    def __init__(self, url: str) -> None:
        self._fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command(url),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # Tests that run in the background of a shell have Ctrl-C ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)
        os.set_blocking(self._fd, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character
        self.shown = self.all = ""

    async def see(self, text: str) -> None:
        """Until `text` is shown after what was seen before."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            with contextlib.suppress(BlockingIOError, OSError):
                came = self._decoder.decode(os.read(self._fd, 65536))
                self.shown, self.all = self.shown + came, self.all + came
            await asyncio.sleep(0.02)
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    async def leaves(self) -> int:
        return await asyncio.to_thread(self.process.wait, WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(nano_tokenizer(), says=lambda request, choice: ANSWER)


async def test_a_pipe_gets_the_bare_answer(backend: ScriptedBackend) -> None:
    async with served(backend) as url:
        done = await asyncio.to_thread(piped, url, "Which fruit?\n\nAnd now?\n")
    assert done.returncode == 0
    assert done.stdout == f"{ANSWER}\n{ANSWER}\n"
    assert done.stderr.count("tokens/s") == 2 and len(backend.requests) == 2


async def test_the_key_comes_from_the_environment(backend: ScriptedBackend) -> None:
    async with served(backend, api_keys=("sesame",)) as url:
        refused = await asyncio.to_thread(piped, url, "Hi\n")
        welcome = await asyncio.to_thread(piped, url, "Hi\n", key="sesame")
    assert refused.returncode == 1 and "EYAS_API_KEY" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert welcome.stdout == f"{ANSWER}\n"


async def test_ctrl_c_stops_the_answer_only(backend: ScriptedBackend) -> None:
    backend.pause_s = 0.5
    async with served(backend) as url:
        terminal = Terminal(url)
        try:
            await terminal.see("> ")
            terminal.type("Which fruit?\n")
            await terminal.see("Fruit")
            terminal.interrupt()
            await terminal.see("(stopped)")
            async with asyncio.timeout(WAIT_S):
                await backend.streams[0].closed.wait()  # the server stopped too
            backend.pause_s = 0.0
            terminal.type("/help\n")
            await terminal.see("stop the answer")
            terminal.type("And now?\n")
            await terminal.see("plums.")
            await terminal.see("tokens/s")
            assert "# Fruit" not in terminal.all  # Markdown is drawn, not shown as it is written
            terminal.type("/exit\n")
            assert await terminal.leaves() == 0
        finally:
            terminal.close()
    assert len(backend.requests) == 2
