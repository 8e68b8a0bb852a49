"""An engine's process, which begins before it is known what it runs.

Python takes seconds to import torch. So a worker spawns the process first of all, and reads its flags and
checks its files while the process imports.
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
    """A process that runs one function, once it is given one. Whoever made it kills it in the end."""

    def __init__(self, *modules: str) -> None:
        """Spawns it. `modules`: what it imports meanwhile."""
        context = multiprocessing.get_context("spawn")
        theirs, self._pipe = context.Pipe(duplex=False)
        self._process = context.Process(target=_wait, args=(theirs, modules), name="eyas-engine")
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: only the front handles Ctrl-C
        with importing_safely():
            self._process.start()
        signal.signal(signal.SIGINT, before)
        theirs.close()

    def run(self, function: Callable[..., None], *given: Any) -> None:
        """Lets it run the function. Call it once; all that is given is pickled."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its sentinel tells
            self._pipe.send((function, given))

    @property
    def pid(self) -> int:
        """The id of the process, which may have ended."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that can be read once it has ended."""
        return self._process.sentinel

    def exit_code(self) -> int | None:
        """The exit code of a process that has ended; negative: the signal that ended it."""
        self._process.join()
        return self._process.exitcode

    def kill(self, wait_s: float) -> None:
        """Ends it now, if it has not ended. One that waits for a driver may outlast even that."""
        self._process.kill()
        self._process.join(wait_s)


def _wait(pipe: Connection, modules: tuple[str, ...]) -> None:
    """The process. It ends with its parent, and ignores what tells the parent to leave."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal_on_parent_death(signal.SIGKILL)
    raise_limit()  # the parent had not raised its own by then
    Thread(target=_import, args=(modules,), name="imports", daemon=True).start()
    try:
        function, given = pipe.recv()
    except EOFError:  # the parent has nothing to run, or is gone
        os._exit(1)  # a thread may be in mid-import
    function(*given)


def _import(modules: tuple[str, ...]) -> None:
    """An import elsewhere waits for one that this has begun; if that fails, it is tried again, and raises."""
    with uncollected():
        for module in modules:
            try:
                importlib.import_module(module)
            except ImportError:
                return
