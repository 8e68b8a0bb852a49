"""Measures the cost of a gateway: CPU time per request and per streamed token, memory per stream.

    python -m tools.bench.gateway_cost [--streams N] [--step-ms MS] [--gateway-workers N] [--workers N]
                                      [--route completions|chat|generate]

Real gateway processes serve streams that paced workers (`tools.bench.paced_worker`) feed: every step brings
each stream a token. The client counts events and reads the processes' CPU clocks while all streams are open.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import psutil
import uvloop

from eyas.bench.backends import COMPLETIONS, RequestTemplate
from eyas.bench.http import MeasuredServer
from eyas.bench.jobs import LoadJob
from eyas.bench.runner import TargetServer, Workload, run_load
from eyas.cluster.child import ChildProcess
from eyas.cluster.plan import gateway_argv
from eyas.common.cluster.listening import free_ports
from eyas.common.config import GatewayConfig
from eyas.common.errors import DeadlineExceeded, EyasError
from eyas.common.machine.processes import python_module, raise_limit
from eyas.flags import positive
from tools.bench.child_server import child_server

REQUESTS, CONCURRENCY = 400, 8  # of one token each: what a request costs
ENDLESS = 1_000_000  # tokens of a stream that is closed before its end
PROMPT = [5, 6, 7, 8]
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT, "max_tokens": ENDLESS}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": ENDLESS}),
    "generate": ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": ENDLESS}}),
}
"""By name: what the streams ask, and where."""
OPENING = 64  # streams that are being opened at a time
OPEN_S = 120.0
STOP_S = 5.0


@dataclass(frozen=True)
class GatewayLoad:
    """Open streams, the time from one of their tokens to the next, and the processes that serve them."""

    streams: int = 256
    step_ms: int = 20
    processes: int = 1  # of the gateway
    workers: int = 1
    seconds: int = 4
    route: str = "completions"  # in ROUTES


async def measure_gateway(load: GatewayLoad | None = None) -> dict[str, Any]:
    """One row of figures: CPU microseconds per token and per request, KiB per stream, and more.

    Raises EyasError if a request fails or a stream ends, DeadlineExceeded if the streams do not open.
    """
    load = load or GatewayLoad()
    raise_limit()
    async with contextlib.AsyncExitStack() as running:
        server, processes = await start_gateway(load, running)
        target = TargetServer(server, COMPLETIONS, RequestTemplate(GatewayConfig.served_model))
        await _requests(target)  # warm-up
        before = processes.cpu_s()
        await _requests(target)
        request_s = (processes.cpu_s() - before) / REQUESTS
        memory = processes.memory()
        streams = await running.enter_async_context(_opened(server, load))
        await asyncio.sleep(1.0)
        counts, before, began = [stream.events for stream in streams], processes.cpu_s(), time.perf_counter()
        await asyncio.sleep(load.seconds)
        got = [stream.events - count for stream, count in zip(streams, counts, strict=True)]
        cpu_s, seconds = processes.cpu_s() - before, time.perf_counter() - began
        if ended := sum(stream.ended for stream in streams):
            raise EyasError(f"{ended} of {load.streams} streams ended")
        return {
            "case": f"gateway, {load.route}, {load.streams} streams, {load.processes} processes",
            "tokens_per_s": round(sum(got) / seconds),
            "cpu_us_per_token": round(1e6 * cpu_s / sum(got), 2),
            "cpu_us_per_request": round(1e6 * request_s, 1),
            "cores": round(cpu_s / seconds, 2),
            "kib_per_stream": round((processes.memory() - memory) / 1024 / load.streams, 1),
            "events_least_most": (min(got), max(got)),
        }


async def _requests(target: TargetServer) -> None:
    """Asks for answers of one token."""
    load = Workload((LoadJob.single(tuple(range(100, 164)), 1),) * REQUESTS, max_concurrency=CONCURRENCY)
    run = await run_load(target, load, {}, lambda _: None)
    if failed := [record.error for record in run.records if record.error]:
        raise EyasError(f"the gateway failed {len(failed)} of {REQUESTS} requests: {failed[0]}")


# --- the gateway -------------------------------------------------------------------------------------------


class GatewayProcesses:
    """The gateway's process and its children."""

    def __init__(self, pid: int) -> None:
        root = psutil.Process(pid)
        self._all = [root, *root.children(recursive=True)]

    def cpu_s(self) -> float:
        """The CPU seconds of all so far."""
        times = [one.cpu_times() for one in self._all]
        return float(sum(one.user + one.system for one in times))

    def memory(self) -> int:
        """The bytes that all have in memory."""
        return int(sum(one.memory_info().rss for one in self._all))


async def start_gateway(
    load: GatewayLoad, running: contextlib.AsyncExitStack
) -> tuple[MeasuredServer, GatewayProcesses]:
    """Starts workers and a gateway, which `running` stops."""
    ports = free_ports()
    workers = [next(ports) for _ in range(load.workers)]
    for port in workers:
        command = python_module("tools.bench.paced_worker", str(port), str(load.step_ms))
        worker = ChildProcess(f"worker at {port}", command, lambda name, line: None)
        running.push_async_callback(worker.stop, STOP_S)
        worker.start()
    config = GatewayConfig(
        registry="static:" + ",".join(f"127.0.0.1:{port}" for port in workers),
        port=next(ports),
        grpc_port=next(ports),
        processes=load.processes,
        drain_s=0.0,
    )
    server = MeasuredServer(f"http://127.0.0.1:{config.port}")
    gateway = await running.enter_async_context(
        child_server("eyas.cli", gateway_argv(config), server, "/health")
    )
    assert gateway.pid is not None
    await asyncio.sleep(1.0)  # by then, the others of several answer too
    return server, GatewayProcesses(gateway.pid)


# --- the client --------------------------------------------------------------------------------------------


class _OpenStream(asyncio.Protocol):
    """One open answer. It counts events and looks at nothing else, so it costs little beside the gateway."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.events = 0
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.events and data.startswith(b"HTTP/") and not data.startswith(b"HTTP/1.1 200"):
            self.transport.abort()
        self.events += data.count(b"\n\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True


@contextlib.asynccontextmanager
async def _opened(server: MeasuredServer, load: GatewayLoad) -> AsyncIterator[list[_OpenStream]]:
    """Streams that have all begun. Raises DeadlineExceeded if they have not within OPEN_S."""
    streams: list[_OpenStream] = []
    try:
        try:
            async with asyncio.timeout(OPEN_S):
                await _open(server, load, streams)
        except TimeoutError as error:
            opened = sum(stream.events > 0 for stream in streams)
            raise DeadlineExceeded(f"{opened} of {load.streams} streams began within {OPEN_S:g} s") from error
        yield streams
    finally:
        for stream in streams:
            stream.transport.abort()


async def _open(server: MeasuredServer, load: GatewayLoad, streams: list[_OpenStream]) -> None:
    path, fields = ROUTES[load.route]
    if load.route != "generate":
        fields = fields | {"model": GatewayConfig.served_model, "timeout": 600}
    body = json.dumps(fields | {"stream": True}).encode()
    loop, address = asyncio.get_running_loop(), urlsplit(server.url)
    host, port = address.hostname or "", address.port or 80
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(load.streams):
        while sum(_waits(stream) for stream in streams[-2 * OPENING :]) >= OPENING:
            await asyncio.sleep(0.005)
        _, stream = await loop.create_connection(lambda: _OpenStream(head.encode() + body), host, port)
        streams.append(stream)
    while any(map(_waits, streams)):
        await asyncio.sleep(0.05)


def _waits(stream: _OpenStream) -> bool:
    return not (stream.events or stream.ended)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    usual = GatewayLoad()
    parser = argparse.ArgumentParser(prog="python -m tools.bench.gateway_cost", description=__doc__)
    add = parser.add_argument
    add("--streams", type=positive, default=usual.streams, metavar="N", help=f"({usual.streams})")
    step = f"from one token of a stream to the next ({usual.step_ms})"
    add("--step-ms", type=positive, default=usual.step_ms, metavar="MS", help=step)
    add("--gateway-workers", type=positive, default=usual.processes, metavar="N", help=f"({usual.processes})")
    add("--workers", type=positive, default=usual.workers, metavar="N", help=f"({usual.workers})")
    add("--seconds", type=positive, default=usual.seconds, metavar="S", help=f"({usual.seconds})")
    add("--route", choices=ROUTES, default=usual.route, help=f"what the streams ask ({usual.route})")
    args = parser.parse_args(argv)
    load = GatewayLoad(
        args.streams, args.step_ms, args.gateway_workers, args.workers, args.seconds, args.route
    )
    print(json.dumps(uvloop.run(measure_gateway(load))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
