"""The processes of one gateway, which share its ports, ask each other: each answers at a socket of its own.

A caller's request reaches one of the processes, by chance. So a page of metrics has the series of all, with
the label `process`, and what ends a request ends it wherever it runs. The series are not summed: when one
process dies a sum would fall, and Prometheus would count all that is left of it again.
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
HEAR_S = 30.0  # until a question is complete
SUFFIX = ".sock"
METRICS = "metrics"


class GatewaySiblings:
    """One of the processes. `socket` is its own; those of the others are in the same folder."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._server: asyncio.Server | None = None
        self._answers: dict[str, Callable[[bytes], bytes]] = {}

    def on(self, question: str, answer: Callable[[bytes], bytes]) -> None:
        """Answers questions of that name in this process from now on; `answer` gets their content."""
        self._answers[question] = answer

    async def start(self) -> None:
        """Starts to answer the other processes. Replaces an earlier process's socket."""
        self._socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._hear, self._socket)

    async def ask(self, question: str, about: bytes = b"", within_s: float = ANSWER_S) -> dict[str, bytes]:
        """Returns the answers of the other processes, by process; nothing for a silent one."""
        sockets = sorted({*self._socket.parent.glob(f"*{SUFFIX}")} - {self._socket})
        answers = await asyncio.gather(*(_ask(socket, question, about, within_s) for socket in sockets))
        return {socket.stem: answer for socket, answer in zip(sockets, answers, strict=True)}

    async def page(self) -> bytes:
        """The figures of all that answer."""
        own = {self._socket.stem: self._answers[METRICS](b"")}
        return labelled(dict(sorted((own | await self.ask(METRICS)).items())))

    async def aclose(self) -> None:
        """Answers nothing more."""
        if self._server is not None:
            self._server.close()
            self._socket.unlink(missing_ok=True)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError), contextlib.closing(writer):
            async with asyncio.timeout(HEAR_S):
                question, _, about = (await reader.read()).partition(b"\n")
            answer = self._answers.get(question.decode())
            if answer is not None:
                writer.write(answer(about))
                await writer.drain()


async def _ask(socket: Path, question: str, about: bytes, within_s: float) -> bytes:
    """Asks one process, and returns its answer; nothing if there is none."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_unix_connection(socket)
            with contextlib.closing(writer):
                writer.write(question.encode() + b"\n" + about)
                writer.write_eof()
                return await reader.read()
    return b""


def labelled(pages: Mapping[str, bytes]) -> bytes:
    """One page of several processes' pages, by name: each series gets the label `process`."""
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
