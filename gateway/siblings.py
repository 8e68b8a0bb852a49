"""The metrics of gateway processes that share their ports: each tells its own at a socket, any shows all.

A scrape reaches one of the processes, by chance. The page that it gets has every series of each, with the
label `process`. They are not summed: when one process dies a sum would fall, and Prometheus would count all
that is left of it again. It knows sockets and Prometheus' text. It refuses to know what is counted.
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
SUFFIX = ".sock"


class Siblings:
    """One of the processes. `socket` is its own; those of the others are in the same folder."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._server: asyncio.Server | None = None

    async def start(self, tell: Callable[[], bytes]) -> None:
        """From now on the others are told what `tell` gives. Replaces what an earlier process left."""

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError), contextlib.closing(writer):
                writer.write(tell())
                await writer.drain()

        self._socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(answer, self._socket)

    async def page(self) -> bytes:
        """The figures of all that answer."""
        sockets = sorted(self._socket.parent.glob(f"*{SUFFIX}"))
        pages = await asyncio.gather(*map(_ask, sockets))
        return labelled({socket.stem: page for socket, page in zip(sockets, pages, strict=True)})

    async def aclose(self) -> None:
        """Tells nothing more."""
        if self._server is not None:
            self._server.close()
            self._socket.unlink(missing_ok=True)


async def _ask(socket: Path) -> bytes:
    """What a process tells; nothing if it does not answer."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(socket)
            with contextlib.closing(writer):
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
    return generate_latest(_Known(families.values()))


class _Known(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
