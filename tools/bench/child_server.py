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
    """`python -m module words`, from when `server` answers a GET of `path` until the context ends.

    Raises EyasError if it ends at start, DeadlineExceeded if it does not answer within START_S.
    """
    child = ChildProcess(module, python_module(module, *map(str, words)), lambda name, line: None)
    child.start()
    try:
        await _until_up(child, server, path)
        yield child
    finally:
        await child.stop(grace_s=STOP_S)


async def _until_up(child: ChildProcess, server: MeasuredServer, path: str) -> None:
    try:
        async with asyncio.timeout(START_S):
            while child.running:
                with contextlib.suppress(EyasError):
                    await server.get(path)
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{child.name} did not answer within {START_S:g} s") from error
    child.kill()  # which waits until its last words are read
    raise EyasError(f"{child.name} ended at start: {' '.join(child.tail)}")
