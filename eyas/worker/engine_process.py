"""The process of an engine, which is spawned before the worker knows the engine's configuration.

Importing torch takes seconds. So a worker first spawns the process, then reads its flags and checks its files
while the process imports.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from eyas.common.machine.memory import uncollected
from eyas.common.machine.processes import importing_safely, raise_limit, signal_on_parent_death


class EngineProcess:
    """A process that waits for a function and runs it. Its creator must call `kill` in the end."""

    def __init__(self, *modules: str) -> None:
        """Spawns the process. `modules`: imported while it waits."""
        context = multiprocessing.get_context("spawn")
        theirs, self._pipe = context.Pipe(duplex=False)
        self._process = context.Process(target=_wait, args=(theirs, modules), name="eyas-engine")
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: only the front handles Ctrl-C
        with importing_safely():
            self._process.start()
        signal.signal(signal.SIGINT, before)
        theirs.close()

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Runs `function(*args)` in the process. Call it once; function and arguments are pickled."""
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which its sentinel shows
            self._pipe.send((function, args))

    @property
    def pid(self) -> int:
        """The id of the process, which may have ended."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process has ended."""
        return self._process.sentinel

    def exit_code(self) -> int | None:
        """The exit code of a process that has ended; negative: the signal that ended it."""
        self._process.join()
        return self._process.exitcode

    def kill(self, wait_s: float) -> None:
        """Kills the process, if it still runs, and waits up to `wait_s` seconds for its end.

        A process that waits for a driver may survive even that.
        """
        self._process.kill()
        self._process.join(wait_s)


def _wait(pipe: Connection, modules: tuple[str, ...]) -> None:
    """The main function of the process, which ends with its parent and ignores signals to exit."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal_on_parent_death(signal.SIGKILL)
    raise_limit()  # the parent had not raised its own limit when it spawned this process
    Thread(target=_import, args=(modules,), name="imports", daemon=True).start()
    try:
        function, args = pipe.recv()
    except EOFError:  # the parent has no function to run, or has ended
        os._exit(1)  # the other thread may be in the middle of an import
    function(*args)


def _import(modules: tuple[str, ...]) -> None:
    """Imports the modules in advance. The main thread's own import waits for one in progress here; after a
    failure it tries again, and raises the error.
    """
    with uncollected():
        for module in modules:
            try:
                importlib.import_module(module)
            except ImportError:
                return
