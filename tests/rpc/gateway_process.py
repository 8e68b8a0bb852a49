"""A gateway as a process of its own, and the lines that it logs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def gateway_process(
    *flags: str,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    command = [sys.executable, "-m", "eyas.cli", "gateway", "--port=0", "--grpc-port=0", *flags]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr
    try:
        yield process, process.stderr
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line_with(said: asyncio.StreamReader, text: str) -> str:
    async with asyncio.timeout(30):
        while text not in (line := (await said.readline()).decode()):
            assert line, f"it ended without {text!r}"
    return line
