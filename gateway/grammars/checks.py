"""Refuses a grammar that cannot be followed before a worker hears of it.

A process of its own compiles it, within limits of memory and time; what it found is remembered, and nothing
else: that the process was stopped, or ended by others, says nothing about a grammar.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from eyas.common.errors import InvalidRequest, Overloaded, Unavailable
from eyas.common.grammars.notations import Grammar
from eyas.common.machine.processes import python_module
from eyas.common.types import GenerationRequest
from gateway.backends.base import GenerationBackend, GenerationStream, PassingBackend
from gateway.limits.queues import FairQueue, QueueClaim

COMPILE_S = 10.0  # of a processor
WALKS_S = 3.0  # for what follows a compilation
START_S = 60.0
GRACE_S = 5.0  # for a process that has closed its pipe to have ended
MAX_WAITING = 64  # per caller
WAIT_S = 30.0  # for a turn
MAX_REMEMBERED = 256

_BREAKS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_BROKEN = "what compiles it breaks: it needs too much memory, or nests too deeply"
_SILENT = "the process that checks grammars did not answer: try again"
_log = logging.getLogger("eyas.gateway")


class GrammarBackend(PassingBackend):
    """Checks a request's grammar, then passes the request to the backend behind it."""

    def __init__(self, backend: GenerationBackend, checks: GrammarChecks) -> None:
        super().__init__(backend)
        self._checks = checks

    async def start(self, request: GenerationRequest) -> GenerationStream:
        if request.params.grammar is not None:
            await self._checks.check(request.params.grammar, request.caller)
        return await self._backend.start(request)


class GrammarChecks:
    """One compilation at a time, in a process of its own. A grammar is compiled once.

    Callers take turns: one that asks for many slow grammars delays another caller by two of them at most.
    """

    def __init__(self, folder: Path, compile_s: float = COMPILE_S) -> None:
        """`folder`: the model's. `compile_s`: the most that the process takes of a processor for one grammar;
        an answer is waited for twice as long.
        """
        self._folder = folder
        self._compile_s = compile_s
        self._verdicts: dict[Grammar, str | None] = {}  # why not; the newest last
        self._pending: dict[Grammar, asyncio.Task[str | None]] = {}
        self._waiting: Counter[str] = Counter()  # by caller, of what is asked
        self._turns: FairQueue[asyncio.Event] = FairQueue()
        self._compiling = False
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._child: subprocess.Popen[bytes] | None = None  # the thread's
        self._closed = False

    def start(self) -> None:
        """Begins to start the process: it is there before the first grammar comes, which need not wait."""
        self._thread.submit(self._start)

    async def check(self, grammar: Grammar, caller: str = "") -> None:
        """Raises InvalidRequest, which says why it cannot be followed; Overloaded if many are before it, and
        Unavailable if nobody can say.
        """
        reason = await self._reason(grammar, caller)
        if reason is not None:
            raise InvalidRequest(f"grammar cannot be followed: {reason}", param="grammar")

    async def aclose(self) -> None:
        """Ends the process, and what is being asked of it."""
        self._closed = True
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        if (child := self._child) is not None:
            child.kill()  # so the thread need not wait for its answer
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self._end()

    async def _reason(self, grammar: Grammar, caller: str) -> str | None:
        if grammar in self._verdicts:
            self._verdicts[grammar] = reason = self._verdicts.pop(grammar)
            return reason
        if grammar not in self._pending:
            if self._waiting[caller] >= MAX_WAITING:
                raise Overloaded("too many grammars wait to be compiled")
            self._waiting[caller] += 1
            self._pending[grammar] = asyncio.create_task(self._ask(grammar, caller))
        return await asyncio.shield(self._pending[grammar])  # others may wait for it too

    async def _ask(self, grammar: Grammar, caller: str) -> str | None:
        try:
            async with self._turn(caller):
                reason = await self._compile(grammar)
            self._verdicts[grammar] = reason
            while len(self._verdicts) > MAX_REMEMBERED:
                del self._verdicts[next(iter(self._verdicts))]
            return reason
        finally:
            self._waiting -= Counter([caller])  # a caller with none is not kept
            del self._pending[grammar]

    @contextlib.asynccontextmanager
    async def _turn(self, caller: str) -> AsyncIterator[None]:
        """Waits for the turn to compile a grammar alone. Raises Overloaded if it comes too late."""
        mine = asyncio.Event()
        self._turns.add(mine, QueueClaim(caller, arrived=time.monotonic()))
        self._next()
        try:
            try:
                async with asyncio.timeout(WAIT_S):  # it keeps a cancellation that comes with the turn
                    await mine.wait()
            except TimeoutError:
                raise Overloaded(f"the grammars before it took longer than {WAIT_S:g} s") from None
            yield
        finally:
            self._turns.remove(mine)
            if mine.is_set():
                self._compiling = False
            self._next()

    def _next(self) -> None:
        if self._turns and not self._compiling:
            self._compiling = True
            first = self._turns.first()
            self._turns.serve(first)
            first.set()

    async def _compile(self, grammar: Grammar) -> str | None:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, grammar)

    # --- the thread --------------------------------------------------------------------------------------

    def _answer(self, grammar: Grammar) -> str | None:
        """The process's answer. One thread runs this, so grammars wait for one another.

        A process that ends is asked again, anew: others may have ended it. Raises Unavailable if that is no
        answer either.
        """
        for again in (True, False):
            line = self._line_about(grammar)
            if line:
                return msgspec.json.decode(line, type=str | None)
            ended_by = self._end(grace_s=GRACE_S if line is not None else 0.0)
            if self._closed or line is None:
                break
            reason = _BROKEN if ended_by in _BREAKS else None
            if ended_by == signal.SIGPROF:
                reason, again = f"it takes more than {self._compile_s:g} s to compile", False
            if reason is not None and not again:
                _log.warning("a grammar was given up: %s", reason)
                return reason
        _log.warning("a grammar was not checked: its process was stopped or ended")
        raise Unavailable(_SILENT)

    def _line_about(self, grammar: Grammar) -> bytes | None:
        """Sends the grammar and returns the reply, as `_line` does. Starts the process if there is none."""
        child = self._child or self._start()
        assert child.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            child.stdin.write(msgspec.json.encode(grammar) + b"\n")
            child.stdin.flush()
            return _line(child, 2 * self._compile_s + WALKS_S)
        return b""

    def _start(self) -> subprocess.Popen[bytes]:
        """Starts the process. Raises InvalidRequest if it can check nothing, Unavailable if it is silent."""
        command = python_module("gateway.grammars.child", str(self._folder), str(self._compile_s))
        pipe = subprocess.PIPE  # by vfork: the handlers that gRPC has for forks are not called
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._child = child
        line = _line(child, START_S)
        reason: str | None = msgspec.json.decode(line, type=str | None) if line else None
        if not line or reason is not None:
            self._end()
        if not line:
            raise Unavailable("the process that checks grammars did not start: try again")
        if reason is not None:
            raise InvalidRequest(f"grammar cannot be followed: {reason}", param="grammar")
        return child

    def _end(self, grace_s: float = 0.0) -> int | None:
        """Ends the process, which may end by itself within `grace_s`. The signal that ended it."""
        child, self._child = self._child, None
        if child is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
        child.kill()
        for file in (child.stdin, child.stdout):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        return -child.wait()


def _line(child: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """Reads the process's reply, one short line; empty if it ends. None: no reply within `timeout_s`."""
    assert child.stdout is not None
    poll = select.poll()
    poll.register(child.stdout.fileno(), select.POLLIN)
    return child.stdout.readline() if poll.poll(timeout_s * 1000) else None
