"""Connects the processes of one gateway: each answers queries of the others at its own Unix socket.

The processes share the gateway's ports, so the kernel chooses the process of each request. A page of metrics
therefore has the series of all processes, with the label `process`, and an abort reaches every process. The
series are not summed: the sum would fall when a process dies, and Prometheus would take that for a reset of
the counter.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

ANSWER_S = 1.0  # a process that takes longer is left out of a page
QUERY_S = 30.0  # until a query is complete
SUFFIX = ".sock"
METRICS = "metrics"


class GatewaySiblings:
    """One process of the gateway. `socket`: its own; the sockets of the others are in the same folder."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._server: asyncio.Server | None = None
        self._answers: dict[str, Callable[[bytes], bytes]] = {}

    def on(self, query: str, answer: Callable[[bytes], bytes]) -> None:
        """Registers `answer` for queries of this name; it is called with the content of the query."""
        self._answers[query] = answer

    async def start(self) -> None:
        """Starts to answer the other processes. Replaces the socket of an earlier process."""
        self._socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer_query, self._socket)

    async def ask(self, query: str, about: bytes = b"", within_s: float = ANSWER_S) -> dict[str, bytes]:
        """Returns the answers of the other processes, by process; b"" for one that does not answer."""
        sockets = sorted({*self._socket.parent.glob(f"*{SUFFIX}")} - {self._socket})
        answers = await asyncio.gather(*(_ask(socket, query, about, within_s) for socket in sockets))
        return {socket.stem: answer for socket, answer in zip(sockets, answers, strict=True)}

    async def page(self) -> bytes:
        """The metrics page of all processes that answer."""
        own = {self._socket.stem: self._answers[METRICS](b"")}
        return labelled(dict(sorted((own | await self.ask(METRICS)).items())))

    async def aclose(self) -> None:
        """Stops answering and removes the socket."""
        if self._server is not None:
            self._server.close()
            self._socket.unlink(missing_ok=True)

    async def _answer_query(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError), contextlib.closing(writer):
            async with asyncio.timeout(QUERY_S):
                query, _, about = (await reader.read()).partition(b"\n")
            answer = self._answers.get(query.decode())
            if answer is not None:
                writer.write(answer(about))
                await writer.drain()


async def _ask(socket: Path, query: str, about: bytes, within_s: float) -> bytes:
    """Returns the answer of one process; b"" without one."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_unix_connection(socket)
            with contextlib.closing(writer):
                writer.write(query.encode() + b"\n" + about)
                writer.write_eof()
                return await reader.read()
    return b""


def labelled(pages: Mapping[str, bytes]) -> bytes:
    """Merges the metrics pages of processes, by name, into one page, with the label `process`."""
    families: dict[str, Metric] = {}
    for name, page in pages.items():
        for family in text_string_to_metric_families(page.decode()):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                known.add_sample(sample.name, {**sample.labels, "process": name}, sample.value)
    return generate_latest(_KnownSibling(families.values()))


class _KnownSibling(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
