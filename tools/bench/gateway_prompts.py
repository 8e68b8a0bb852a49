"""Measures the cost of very long prompts for a gateway's callers: the time added to a first token, and the
delay of other streams.

    python -m tools.bench.gateway_prompts [--tokens N] [--seconds S] [--ids-rate R]
                                         [--gateway-workers N]

Real gateway processes serve prompts at a steady rate, first as text, then as ids, that a paced worker
(`tools.bench.paced_worker`) answers at once; beside them, streams get a token each step. Of a text's time,
what the tokenizer takes alone is told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import numpy as np
import uvloop

from eyas.bench.http import MeasuredServer
from eyas.common.config import NANO, GatewayConfig
from eyas.common.errors import EyasError
from eyas.flags import positive
from gateway.text.tokenizer import Tokenizer
from tools.bench.gateway_cost import ENDLESS, PROMPT, GatewayLoad, GatewayProcesses, start_gateway
from tools.nano.heldout import heldout_prompts

TOKENS, SECONDS, IDS_RATE = 60_000, 12, 100
STREAMS, STEP_MS = 32, 20
SETTLE_S = 1.0
ANSWER_S = 60.0  # for a prompt's first token
ALONE = 7  # times that the tokenizer is timed
_FAILED = b'{"error"'


class PromptKind(NamedTuple):
    """Prompts that come at `rate` per second; `alone_ms`: what the tokenizer takes for one by itself."""

    name: str
    rate: float
    body: bytes
    alone_ms: float = 0.0


async def measure(
    tokens: int = TOKENS, seconds: int = SECONDS, ids_rate: int = IDS_RATE, processes: int = 1
) -> AsyncIterator[dict[str, Any]]:
    """Rows of figures in ms: calm, short prompts, long ones as text and as ids. Failed prompts are counted.

    Raises EyasError if a stream beside them ends, none of a kind is answered, or a worker is given up.
    """
    tokenizer = Tokenizer.load(NANO)
    text, ids = _prompt(tokenizer, tokens)
    kinds = [
        PromptKind("short prompts", 20, _body(PROMPT)),
        PromptKind(f"{len(ids):,} tokens as text", 2, _body(text), _alone_ms(tokenizer, text)),
        PromptKind(f"{len(ids):,} tokens as ids", ids_rate, _body(ids)),
    ]
    load = GatewayLoad(step_ms=STEP_MS, processes=processes)
    async with contextlib.AsyncExitStack() as running:
        server, gateway = await start_gateway(load, running)
        beside = [await _ask(server, _body(PROMPT, ENDLESS)) for _ in range(STREAMS)]
        for stream in beside:
            running.callback(stream.leave)
        await asyncio.gather(*(stream.first_event() for stream in beside))
        await asyncio.sleep(SETTLE_S)
        with _MeasuredWindow(beside, gateway) as window:
            await asyncio.sleep(seconds)
        yield {"case": "nothing else", **window.figures()}
        for kind in kinds:
            with _MeasuredWindow(beside, gateway) as window:
                firsts, failed = await _arrive(server, kind, seconds)
            lost = [error for error in failed if "was lost" in str(error)]
            if lost or not firsts or any(stream.ended for stream in beside):
                why = [*lost, *failed, "a stream ended"][0]
                raise EyasError(f"too much for the gateway: {why}")
            added = [first - kind.alone_ms for first in firsts]
            yield {
                "case": f"{kind.name}, {kind.rate:g} per second",
                "prompts": len(firsts),
                "failed": len(failed),
                "tokenizer_alone_ms": round(kind.alone_ms, 1),
                "first_token_p50_p99": _p50_p99(firsts),
                "added_p50_p99": _p50_p99(added),
                **window.figures(),
                "cpu_ms_per_prompt": round(1e3 * window.cpu_s / len(firsts), 1),
            }
            await asyncio.sleep(SETTLE_S)


def _prompt(tokenizer: Tokenizer, tokens: int) -> tuple[str, list[int]]:
    """A text of about that number of tokens, and its ids."""
    said = "\n".join(message["content"] for chat in heldout_prompts(400, 1) for message in chat)
    each = len(tokenizer.encode(said))
    text = "\n".join([said] * (tokens // each + 1))
    text = text[: len(text) * tokens // len(tokenizer.encode(text))]
    return text, list(tokenizer.encode(text))


def _alone_ms(tokenizer: Tokenizer, text: str) -> float:
    """The median of some tries."""
    took = []
    for _ in range(ALONE):
        began = time.perf_counter()
        tokenizer.encode(text)
        took.append(1e3 * (time.perf_counter() - began))
    return float(np.median(took))


def _body(prompt: str | list[int], max_tokens: int = 8) -> bytes:
    fields = {"model": GatewayConfig.served_model, "prompt": prompt, "max_tokens": max_tokens, "timeout": 600}
    return json.dumps(fields | {"stream": True}).encode()


async def _arrive(
    server: MeasuredServer, kind: PromptKind, seconds: int
) -> tuple[list[float], list[BaseException]]:
    """The times to the first tokens, in ms, of prompts that come evenly for so long, and what failed."""
    began, arrivals = time.perf_counter(), list[asyncio.Task[float]]()
    for number in range(round(kind.rate * seconds)):
        await asyncio.sleep(began + number / kind.rate - time.perf_counter())
        arrivals.append(asyncio.create_task(_first_ms(server, kind.body)))
    ended = await asyncio.gather(*arrivals, return_exceptions=True)
    firsts = [first for first in ended if isinstance(first, float)]
    return firsts, [error for error in ended if isinstance(error, BaseException)]


async def _first_ms(server: MeasuredServer, body: bytes) -> float:
    began = time.perf_counter()
    stream = await _ask(server, body)
    try:
        await stream.first_event()
    finally:
        stream.leave()
    return 1e3 * (stream.times[0] - began)


def _p50_p99(values: Sequence[float]) -> tuple[float, float]:
    return round(float(np.quantile(values, 0.5)), 1), round(float(np.quantile(values, 0.99)), 1)


# --- the client ----------------------------------------------------------------------------------------


class _TimedStream(asyncio.Protocol):
    """One answer: the times (perf_counter) at which something of it came."""

    def __init__(self, request: bytes) -> None:
        self.times: list[float] = []
        self.ended = False
        self._request = request
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def first_event(self) -> None:
        """Waits for the first event. Raises EyasError if there is none."""
        await asyncio.wait_for(self._first, ANSWER_S)

    def leave(self) -> None:
        """Hangs up."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        if self._first.done():
            self.ended |= _FAILED in data  # its connection stays open
            return
        if b"data: " in data:
            self._first.set_result(None)
        elif (at := data.find(_FAILED)) >= 0:
            self._first.set_exception(EyasError(f"a prompt was refused: {data[at:].decode()}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        if not self._first.done():
            self._first.set_exception(EyasError("a stream ended before it began"))


async def _ask(server: MeasuredServer, body: bytes) -> _TimedStream:
    address = urlsplit(server.url)
    loop = asyncio.get_running_loop()
    host, port = address.hostname or "", address.port or 80
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    _, stream = await loop.create_connection(lambda: _TimedStream(head.encode() + body), host, port)
    return stream


class _MeasuredWindow:
    """A span of time: the gaps between events of the streams beside, and the gateway's CPU."""

    def __init__(self, streams: Sequence[_TimedStream], processes: GatewayProcesses) -> None:
        self._streams, self._processes = streams, processes

    def __enter__(self) -> _MeasuredWindow:
        for stream in self._streams:
            del stream.times[:]
        self._cpu_s, self._began = self._processes.cpu_s(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu_s = self._processes.cpu_s() - self._cpu_s
        self._seconds = time.perf_counter() - self._began
        self._gaps = [
            1e3 * (b - a)
            for stream in self._streams
            for a, b in zip(stream.times, stream.times[1:], strict=False)
        ]

    def figures(self) -> dict[str, Any]:
        return {
            "gaps_p50_p99_max": (*_p50_p99(self._gaps), round(max(self._gaps), 1)),
            "gateway_cores": round(self.cpu_s / self._seconds, 2),
        }


async def _print(args: argparse.Namespace) -> None:
    async for row in measure(args.tokens, args.seconds, args.ids_rate, args.gateway_workers):
        print(json.dumps(row), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.gateway_prompts", description=__doc__)
    add = parser.add_argument
    add("--tokens", type=positive, default=TOKENS, metavar="N", help=f"of a prompt ({TOKENS})")
    add("--seconds", type=positive, default=SECONDS, metavar="S", help=f"of each of four parts ({SECONDS})")
    add("--ids-rate", type=positive, default=IDS_RATE, metavar="R", help=f"prompts per second ({IDS_RATE})")
    add("--gateway-workers", type=positive, default=1, metavar="N", help="(1)")
    uvloop.run(_print(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
