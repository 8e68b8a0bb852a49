"""A server in a process of its own, for one measurement: started, waited for, stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from eyas.bench.http import MeasuredServer
from eyas.cluster.child import ChildProcess
from eyas.common.errors import DeadlineExceeded, EyasError
from eyas.common.machine.processes import python_module

START_S = 30.0
STOP_S = 5.0
POLL_S = 0.05


@contextlib.asynccontextmanager
async def child_server(
    module: str, words: Sequence[object], server: MeasuredServer, path: str
) -> AsyncIterator[ChildProcess]:
    """`python -m module words`, as `answering` has it."""
    child = ChildProcess(module, python_module(module, *map(str, words)), lambda name, line: None)
    async with answering(child, server, path, START_S, STOP_S):
        yield child


@contextlib.asynccontextmanager
async def answering(
    child: ChildProcess, server: MeasuredServer, path: str, start_s: float, stop_s: float
) -> AsyncIterator[None]:
    """The process, from when `server` answers a GET of `path` until the context ends, and it with it.

    Raises EyasError if it ends at start, DeadlineExceeded if it does not answer within `start_s`.
    """
    child.start()
    try:
        await _until_up(child, server, path, start_s)
        yield
    finally:
        await child.stop(grace_s=stop_s)


async def _until_up(child: ChildProcess, server: MeasuredServer, path: str, start_s: float) -> None:
    try:
        async with asyncio.timeout(start_s):
            while child.running:
                with contextlib.suppress(EyasError):
                    await server.get(path)
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{child.name} did not answer within {start_s:g} s") from error
    child.kill()  # which waits until its last words are read
    raise EyasError(f"{child.name} ended at start: {' '.join(child.tail)}")
