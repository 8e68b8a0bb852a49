"""Processes of this machine: how Python ones are started, end with their supervisor, and open enough files.

Python puts the folder that it is started in before its own library for `-m` and `-c`, which multiprocessing
uses. A `random.py` in that folder would run. So child processes load no modules from there.

A supervised process ends when its supervisor ends, for whatever reason, by two independent means, because
each alone has a gap: the kernel's parent-death signal (immediate, Linux only, not sent if the parent died
before it was asked for), and end-of-file on standard input, whose other end the supervisor holds open. It
asks the process to end, and then kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

_SAFE_PATH = "PYTHONSAFEPATH"
PR_SET_PDEATHSIG = 1
GRACE_S = 8.0
MOST = 65536  # a process needs no more


def python_module(module: str, *words: str) -> tuple[str, ...]:
    """The command `python -m module words`."""
    return (sys.executable, "-P", "-m", module, *words)


def python_function(module: str, name: str, *words: str) -> tuple[str, ...]:
    """The command that calls a module's function: by `-m`, what it pickles would be of `__main__`."""
    return (sys.executable, "-P", "-c", f"from {module} import {name}; {name}()", *words)


def import_safely() -> None:
    """Every Python process that this one starts from now on imports safely, those of libraries too."""
    os.environ[_SAFE_PATH] = "1"


def open_standard_files() -> None:
    """Opens /dev/null in place of standard input, output and error that were closed before the start.

    Else the next sockets have their numbers: libraries write their complaints there, and libuv does not close
    such a socket, but aborts.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # as Python says that it is closed
            file = open(os.devnull, mode)  # takes the lowest number that is free, which is this file's
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)


def importing_safely() -> AbstractContextManager[None]:
    """Sets safe imports for processes that multiprocessing starts inside: these have no command of ours."""
    return with_variable(_SAFE_PATH, "1")


@contextlib.contextmanager
def with_variable(name: str, value: str) -> Iterator[None]:
    """Sets a variable of the environment inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def die_with_parent(grace_s: float = GRACE_S) -> None:
    """Call it once, early, in a process whose parent holds a pipe open on its standard input.

    When the parent ends, this process gets SIGHUP, which means: leave now. If it still runs `grace_s` seconds
    later, it gets SIGKILL, together with its process group if it leads one.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, the supervisor and so this process ignore it
    signal_on_parent_death(signal.SIGHUP)
    threading.Thread(target=_watch_stdin, args=(grace_s,), name="lifeline", daemon=True).start()


def signal_on_parent_death(number: signal.Signals) -> None:
    """Makes the kernel send the signal when the thread that started this process ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _watch_stdin(grace_s: float) -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(grace_s)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def raise_limit() -> int:
    """Raises the soft limit on open files to the hard one, at most to MOST; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return MOST if soft == resource.RLIM_INFINITY else soft
