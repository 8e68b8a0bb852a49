"""What strangers cost a gateway: its memory under oversized calls, silent connections and half-sent headers.

`python -m tests.e2e.door_memory` starts a gateway process before a scripted worker, with a key and few files
(soft limit), lets callers without the key do their worst, and prints a line for each attack. It fails if
memory is not bounded, is not given back, or an ordinary request waits meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx

from eyas.client import AsyncClient
from eyas.common.cluster.listening import free_ports
from eyas.common.errors import EyasError
from eyas.common.types import Role

sys.path.append(str(Path(__file__).resolve().parents[1] / "rpc"))
from scripted_worker import ScriptedWorker

KEY = "sesame"
SOFT_FILES = 1024  # what a shell gives
OVERSIZED = b"\x1a\x84\x80\x80\x1c\x0a\xff\xff\xff\x1b" + b"\x05" * (28 * 2**21 - 1)
"""A GenerateRequest of 58,720,255 ids, each a byte on the wire."""

MiB = 2**20
BOUND = 128 * MiB  # above the start, at any time
LEFT = 48 * MiB  # above the start, BACK_S after the attack
BACK_S = 20.0
SETTLE_S = 1.0  # from the attack's start to the first ordinary request
ANSWER_S = 5.0  # of an ordinary request meanwhile, on a busy machine


@dataclass(frozen=True)
class Gateway:
    pid: int
    port: int
    grpc_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def memory(self, kind: str = "VmRSS") -> int:
        """Bytes; VmHWM: the most since `forget_peak`."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(kind):
                return int(line.split()[1]) * 1024
        raise ValueError(kind)

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@dataclass(frozen=True)
class Cost:
    """Of one attack: bytes of memory before, at most, and after; seconds until back, and of the answers."""

    attack: str
    before: int
    peak: int
    after: int
    back_s: float
    http_s: float
    grpc_s: float

    @property
    def bounded(self) -> bool:
        grown, left = self.peak - self.before, self.after - self.before
        return grown <= BOUND and left <= LEFT and max(self.http_s, self.grpc_s) <= ANSWER_S

    def __str__(self) -> str:
        memory = " -> ".join(f"{size / MiB:.0f}" for size in (self.before, self.peak, self.after))
        answers = f"HTTP answers in {self.http_s:.2f} s, gRPC in {self.grpc_s:.2f} s"
        return f"{self.attack}: {memory} MiB, back in {self.back_s:.1f} s; {answers}"


@contextlib.asynccontextmanager
async def gateway() -> AsyncIterator[Gateway]:
    """A gateway process that answers."""
    ports = free_ports()
    port, grpc_port = next(ports), next(ports)
    worker = await ScriptedWorker((Role.PREFILL, Role.DECODE)).start()
    command = f"-m eyas.cli gateway --registry static:{worker.address} --port {port} --grpc-port {grpc_port}"
    # By a shell: with a `preexec_fn` Python forks, which the gRPC of the worker above may not survive.
    shell = ("sh", "-c", f'ulimit -Sn {SOFT_FILES} && exec "$@"', "sh")
    process = await asyncio.create_subprocess_exec(
        *shell, sys.executable, *command.split(), env={**os.environ, "EYAS_API_KEY": KEY}
    )
    started = Gateway(process.pid, port, grpc_port)
    try:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(httpx.HTTPError, AssertionError):
                    await ask_http(started)
                    break
                await asyncio.sleep(0.2)
        yield started
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await worker.kill()


# --- ordinary requests -------------------------------------------------------------------------------------


async def ask_http(target: Gateway) -> None:
    body = {"model": "eyas-nano", "prompt": [5, 6, 7], "max_tokens": 4}
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        headers = {"authorization": f"Bearer {KEY}"}
        answer = await client.post(f"{target.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


async def ask_grpc(target: Gateway) -> None:
    async with AsyncClient(f"127.0.0.1:{target.grpc_port}", api_key=KEY, timeout_s=30) as client:
        await client.generate([5, 6, 7], max_tokens=4)


async def seconds(ask: Callable[[Gateway], Awaitable[None]], target: Gateway) -> float:
    """What an answer takes; infinity if there is none."""
    began = time.monotonic()
    try:
        await ask(target)
    except (httpx.HTTPError, EyasError):
        return math.inf
    return time.monotonic() - began


# --- attacks -----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def oversized_calls(target: Gateway, count: int = 20) -> AsyncIterator[None]:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc_port}", options=options) as channel:
        generate = channel.unary_stream("/eyas.v1.Eyas/Generate", request_serializer=None)

        async def call() -> grpc.StatusCode:
            one = generate(OVERSIZED, timeout=60)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await one.read()
            return await one.code()

        calls = [asyncio.create_task(call()) for _ in range(count)]
        await asyncio.sleep(0)
        yield
        codes = await asyncio.gather(*calls)
    assert grpc.StatusCode.OK not in codes, codes


@contextlib.asynccontextmanager
async def connections(port: int, count: int, words: bytes) -> AsyncIterator[None]:
    """`count` connections that say `words` and then nothing more."""

    async def connect(stack: contextlib.ExitStack) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(lambda: writer.transport.abort())  # which keeps the writer: without it, it would close
        writer.write(words)

    with contextlib.ExitStack() as stack:
        for _ in range(count):
            with contextlib.suppress(OSError):  # refused: all the better
                async with asyncio.timeout(10):
                    await connect(stack)
        yield


def half(size: int) -> bytes:
    """A request that breaks off within a header of `size` bytes."""
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * size


ATTACKS: dict[str, Callable[[Gateway], AbstractAsyncContextManager[None]]] = {
    "20 calls of 57 MB without a key": oversized_calls,
    "2,000 silent HTTP connections": lambda target: connections(target.port, 2000, b""),
    "2,000 silent gRPC connections": lambda target: connections(target.grpc_port, 2000, b""),
    "300 half-sent headers of 60 KB": lambda target: connections(target.port, 300, half(60_000)),
    "300 half-sent headers of 1 MB": lambda target: connections(target.port, 300, half(MiB)),
}


# --- measuring ---------------------------------------------------------------------------------------------


async def cost(name: str) -> Cost:
    """Of one attack on a gateway of its own."""
    async with gateway() as target:
        for ask in (ask_http, ask_grpc):
            await ask(target)  # what is loaded at the first request is no attack's cost
        before = target.memory()
        target.forget_peak()
        async with ATTACKS[name](target):
            await asyncio.sleep(SETTLE_S)
            http_s = await seconds(ask_http, target)
            grpc_s = await seconds(ask_grpc, target)
        ended = time.monotonic()
        while target.memory() - before > LEFT and time.monotonic() - ended < BACK_S:
            await asyncio.sleep(0.2)
        back_s = time.monotonic() - ended
        return Cost(name, before, target.memory("VmHWM"), target.memory(), back_s, http_s, grpc_s)


def allow_files() -> None:
    """The attacker's own connections are files, too."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def main() -> int:
    allow_files()
    failed = 0
    for name in ATTACKS:
        found = await cost(name)
        print(found if found.bounded else f"{found}: TOO MUCH", flush=True)
        failed += not found.bounded
    return failed


if __name__ == "__main__":
    sys.exit(bool(asyncio.run(main())))
