"""Measures the cost of the load client itself: CPU per event, and the delay from sending to seeing one.

    python -m tools.bench.overhead [--streams N] [--tokens-per-second R] [--seconds S]

A stub server in another process streams tokens at a fixed pace over many streams. Each token's text is the
moment of its sending, by the clock that all processes of a machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import uvloop

from eyas.bench.backends import COMPLETIONS, RequestTemplate
from eyas.bench.http import MeasuredServer
from eyas.bench.jobs import LoadJob
from eyas.bench.records import RequestRecord
from eyas.bench.runner import ClientMeter, TargetServer
from eyas.common.cluster.listening import free_ports
from eyas.common.errors import EyasError
from eyas.common.machine.processes import die_with_parent
from eyas.flags import port, positive
from tools.bench.child_server import child_server

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-0123456789","object":"text_completion","created":1,"model":"stub","choices":'
    b'[{"index":0,"text":"%.7f ","logprobs":null,"finish_reason":null}]}\n\n'
)
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'


@dataclass(frozen=True)
class StreamPace:
    """Streams at a time, tokens per second over all of them, and for how many seconds."""

    streams: int = 100
    tokens_per_s: int = 20_000
    seconds: int = 5

    @property
    def step_s(self) -> float:
        """Between two tokens of a stream."""
        return self.streams / self.tokens_per_s


async def measure_client(pace: StreamPace) -> dict[str, Any]:
    """Figures of the client at this pace, against a stub server that is started for it. Raises EyasError."""
    address = next(free_ports())
    words = ("--stub", address, "--streams", pace.streams, "--tokens-per-second", pace.tokens_per_s)
    server = MeasuredServer(f"http://127.0.0.1:{address}")
    async with child_server("tools.bench.overhead", words, server, "/"):
        target = TargetServer(server, COMPLETIONS, RequestTemplate("stub"))
        job = LoadJob.single(tuple(range(64)), max(2, int(pace.seconds / pace.step_s)))
        (turn,) = job.turns
        began = time.perf_counter()
        async with ClientMeter() as meter:
            requests = (target.ask(job, turn.prompt, turn.max_tokens) for _ in range(pace.streams))
            records = await asyncio.gather(*requests)
        return _figures(records, time.perf_counter() - began, meter)


def lateness_s(record: RequestRecord) -> list[float]:
    """The delay with which each token was seen, in seconds; `start_s` is a `time.perf_counter`."""
    seen = itertools.accumulate(record.itls_s, initial=record.start_s + record.ttft_s)
    return [at - float(sent) for at, sent in zip(seen, record.text.split(), strict=True)]


def _figures(records: list[RequestRecord], seconds: float, meter: ClientMeter) -> dict[str, Any]:
    if failed := [record.error for record in records if record.error]:
        raise EyasError(f"{len(failed)} of {len(records)} streams failed: {failed[0]}")
    delays = [1e3 * np.asarray(lateness_s(record)) for record in records]
    events = sum(map(len, delays))
    figures: dict[str, Any] = {
        "streams": len(records),
        "tokens_per_s": events / seconds,
        "client_cpu": meter.cpu_s / seconds,
        "cpu_us_per_event": 1e6 * meter.cpu_s / events,
        "client_lag_ms": meter.lag_ms(),
    }
    added = {
        "ttft": np.asarray([one[0] for one in delays]),
        "event": np.concatenate(delays),
        "itl": np.concatenate([np.abs(np.diff(one)) for one in delays]),
    }
    for name, times in added.items():
        for percent in (50, 99):
            figures[f"{name}_late_ms_p{percent}"] = float(np.percentile(times, percent))
    return {name: round(value, 3) for name, value in figures.items()}


# --- the stub server ---------------------------------------------------------------------------------------


class _StubConnection(asyncio.Protocol):
    """One connection: a POST gets its tokens one by one, a GET an empty answer."""

    def __init__(self, streams: set[_StubConnection]) -> None:
        self._streams = streams
        self._received = bytearray()
        self._left = self._tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.discard(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        elif len(body) >= int(head.lower().partition(b"content-length:")[2].split()[0]):
            self._left = self._tokens = json.loads(body)["max_tokens"]
            self._received.clear()  # the connection may be used again
            self._transport.write(HEAD)
            self._streams.add(self)

    def step(self) -> None:
        """Sends the next token, after the last one also usage and the end."""
        self._write(EVENT % time.perf_counter())
        self._left -= 1
        if not self._left:
            self._write(USAGE % (64, self._tokens))
            self._transport.write(b"0\r\n\r\n")
            self._streams.discard(self)

    def _write(self, event: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))


async def _serve(address: int, pace: StreamPace) -> None:
    """Sends a token to every stream once per step, as an engine does."""
    streams: set[_StubConnection] = set()
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: _StubConnection(streams), "127.0.0.1", address):
        due = time.perf_counter()
        while True:
            due = max(due + pace.step_s, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            for stream in list(streams):
                stream.step()


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.overhead", description=__doc__)
    add = parser.add_argument
    add("--streams", type=positive, default=StreamPace.streams, metavar="N", help=f"({StreamPace.streams})")
    add(
        "--tokens-per-second",
        type=positive,
        default=StreamPace.tokens_per_s,
        metavar="R",
        help="over all streams",
    )
    add("--seconds", type=positive, default=StreamPace.seconds, metavar="S", help=f"({StreamPace.seconds})")
    add("--stub", type=port, metavar="PORT", help="be the stub server, on this port")
    args = parser.parse_args(argv)
    pace = StreamPace(args.streams, args.tokens_per_second, args.seconds)
    if args.stub is not None:
        die_with_parent()
        uvloop.run(_serve(args.stub, pace))
    else:
        print(json.dumps(uvloop.run(measure_client(pace))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
