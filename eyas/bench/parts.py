"""A measurement in parts, each in a process of its own: what breaks one part leaves the others.

A fault of a GPU ends every later call in its process, and an engine holds its memory to the end; so both end
with their part.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from eyas.common import logging as eyas_logging
from eyas.common.config import EngineConfig
from eyas.common.errors import EyasError
from eyas.common.machine.processes import importing_safely, signal_on_parent_death
from kv_transfer.host_files import sweep

SILENCE_S = 600.0  # without a line of a part, then it is ended: a large model is loaded meanwhile
POOLS = Path(EngineConfig.pool_dir)  # what a part leaves there when it dies is removed
LEAVE_S = 10.0  # for a part to leave in good order

Line: TypeAlias = dict[str, Any]
Tell: TypeAlias = Callable[[Line], None]


@dataclass(frozen=True)
class ChildPart:
    """`work` is called in a new process, so it must be picklable; what it tells arrives in the first one."""

    name: str
    work: Callable[[Tell], None]


@dataclass(frozen=True)
class _RequestFailure:
    message: str


def run_parts(parts: Iterable[ChildPart], tell: Tell, silence_s: float = SILENCE_S) -> int:
    """Runs the parts one after the other; each line goes to `tell` when it comes.

    Names every part that failed on standard error and goes on; returns their number.
    """
    failed = 0
    for part in parts:
        failure = _run(part, tell, silence_s)
        if failure is not None:
            print(f"eyas: {part.name} failed: {failure}", file=sys.stderr, flush=True)
            failed += 1
    return failed


def _run(part: ChildPart, tell: Tell, silence_s: float) -> str | None:
    """Runs the part; gives the reason if it failed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(part, theirs), name=part.name)
    with importing_safely():
        process.start()
    theirs.close()
    grace_s = 0.0
    try:
        while ours.poll(silence_s):
            try:
                said = ours.recv()
            except EOFError:
                process.join(LEAVE_S)
                return f"its process ended with exit code {process.exitcode} before it was done"
            if said is None or isinstance(said, _RequestFailure):
                grace_s = LEAVE_S
                return said.message if said else None
            tell(said)
        return f"it said nothing for {silence_s:g} s"
    finally:
        ours.close()
        _end(process, grace_s)


def _end(process: BaseProcess, grace_s: float) -> None:
    """Lets the process leave within `grace_s`, then asks it to, then makes it."""
    process.join(grace_s)
    for end in (process.terminate, process.kill):
        if process.is_alive():
            end()
            process.join(LEAVE_S)
    sweep(POOLS)


def _main(part: ChildPart, pipe: Connection) -> None:
    """The process of a part. Ctrl-C is the business of the first process, which then sends SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds, so that what is in files is unlinked
    signal_on_parent_death(signal.SIGTERM)
    eyas_logging.setup(part.name)
    logging.getLogger("eyas").setLevel(logging.WARNING)
    try:
        part.work(pipe.send)
        last: _RequestFailure | None = None
    except EyasError as error:
        last = _RequestFailure(error.message)
    except Exception as error:
        traceback.print_exc()
        last = _RequestFailure(brief(error))
    with contextlib.suppress(BrokenPipeError):
        pipe.send(last)


def brief(error: Exception) -> str:
    """An unexpected error in one line."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"
