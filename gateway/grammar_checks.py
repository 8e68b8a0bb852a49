"""Refuses a grammar that cannot be followed before a worker hears of it.

A process of its own compiles it, within limits of memory and time; what it found is remembered. It knows
that process and its limits. It refuses to know notations, and what becomes of a grammar afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from pathlib import Path

import msgspec

from eyas.common.errors import InvalidRequest, Overloaded
from eyas.common.grammar import Grammar
from eyas.common.types import GenerationRequest, WorkerInfo
from gateway.backend import BackendHealth, GenerationBackend, GenerationStream
from gateway.router import Candidate

COMPILE_S = 10.0
START_S = 60.0
MAX_WAITING = 64
MAX_REMEMBERED = 256

_TOO_LARGE = "it needs too much memory to compile"
_log = logging.getLogger("eyas.gateway")


class GrammarBackend(GenerationBackend):
    """Checks a request's grammar, then passes the request to the backend behind it."""

    def __init__(self, backend: GenerationBackend, checks: GrammarChecks) -> None:
        self._backend = backend
        self._checks = checks

    async def start(self, request: GenerationRequest) -> GenerationStream:
        if request.params.grammar is not None:
            await self._checks.check(request.params.grammar)
        return await self._backend.start(request)

    async def models(self) -> list[WorkerInfo]:
        return await self._backend.models()

    def links(self) -> list[Candidate]:
        return self._backend.links()

    def health(self) -> BackendHealth:
        return self._backend.health()


class GrammarChecks:
    """One compilation at a time, in a process that starts with the first. A grammar is compiled once."""

    def __init__(self, folder: Path, compile_s: float = COMPILE_S) -> None:
        """`folder`: the model's."""
        self._folder = folder
        self._compile_s = compile_s
        self._found: dict[Grammar, str | None] = {}  # why not; the newest last
        self._asked: dict[Grammar, asyncio.Task[str | None]] = {}
        self._turn = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest, which says why it cannot be followed; Overloaded if too many wait."""
        reason = await self._reason(grammar)
        if reason is not None:
            raise InvalidRequest(f"grammar cannot be followed: {reason}", param="grammar")

    async def aclose(self) -> None:
        """Ends the process, and what is being asked of it."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        await self._end()

    async def _reason(self, grammar: Grammar) -> str | None:
        if grammar in self._found:
            self._found[grammar] = reason = self._found.pop(grammar)
            return reason
        if grammar not in self._asked:
            if len(self._asked) >= MAX_WAITING:
                raise Overloaded("too many grammars wait to be compiled")
            self._asked[grammar] = asyncio.create_task(self._ask(grammar))
        return await asyncio.shield(self._asked[grammar])  # others may wait for it too

    async def _ask(self, grammar: Grammar) -> str | None:
        try:
            async with self._turn:
                reason = await self._compile(grammar)
            self._found[grammar] = reason
            while len(self._found) > MAX_REMEMBERED:
                del self._found[next(iter(self._found))]
            return reason
        finally:
            del self._asked[grammar]

    async def _compile(self, grammar: Grammar) -> str | None:
        if self._child is None and (reason := await self._start()) is not None:
            return reason
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        reason = None
        try:
            child.stdin.write(msgspec.json.encode(grammar) + b"\n")
            line = await asyncio.wait_for(child.stdout.readline(), self._compile_s)
        except (ConnectionError, TimeoutError) as error:
            line = b""
            if isinstance(error, TimeoutError):
                reason = f"it takes more than {self._compile_s:g} s to compile"
        except asyncio.CancelledError:
            await self._end()  # its answer would be taken for another's
            raise
        if line:
            return msgspec.json.decode(line, type=str | None)
        await self._end()
        _log.warning("a grammar was given up: %s", reason or _TOO_LARGE)
        return reason or _TOO_LARGE

    async def _start(self) -> str | None:
        """Starts the process; why it cannot answer, if it cannot."""
        pipe = asyncio.subprocess.PIPE
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.grammar_child", str(self._folder)),
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert self._child.stdout is not None
        with contextlib.suppress(TimeoutError):
            if line := await asyncio.wait_for(self._child.stdout.readline(), START_S):
                reason = msgspec.json.decode(line, type=str | None)
                if reason is None:
                    return None
                await self._end()
                return reason
        await self._end()
        raise Overloaded("the process that compiles grammars did not start")

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
