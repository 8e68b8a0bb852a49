"""What the processes of a server hold in memory, watched while an attack lasts.

Three kinds: the gateway; its children, which compile grammars and render templates within limits of their
own; and the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

KINDS = ("gateway", "children", "workers")
MiB = 1 << 20
EVERY_S = 0.2

Memory = Counter[str]  # bytes by kind


class Watch:
    """Of the descendants of one process."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)

    def now(self) -> Memory:
        """What they hold now."""
        held: Memory = Counter()
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._root.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    held[_kind(process)] += _private(process.pid)
        return held

    def descriptors(self) -> int:
        """Files that the gateway has open."""
        return sum(p.num_fds() for p in self._root.children(recursive=True) if _kind(p) == "gateway")

    @contextlib.asynccontextmanager
    async def peak(self) -> AsyncIterator[Memory]:
        """The most while it lasts, kind by kind."""
        most: Memory = self.now()

        async def look() -> None:
            while True:
                await asyncio.sleep(EVERY_S)
                most.update({kind: max(size - most[kind], 0) for kind, size in self.now().items()})

        looking = asyncio.create_task(look())
        try:
            yield most
        finally:
            looking.cancel()


def _kind(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    if "gateway.grammars.child" in words or "gateway.text.rendering" in words:
        return "children"
    return "gateway" if " gateway " in f"{words} " else "workers"


def _private(pid: int) -> int:
    """Bytes of memory that are not a file's or shared: pools of pages, which are shared, never grow."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0
