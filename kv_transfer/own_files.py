"""The files that processes of a host put into one folder for each other: whose they are, what is left over.

A process has a lock beside its files, which the kernel drops when it ends, however it ends. So nobody guesses
by a process id, which means another process in every container.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
from multiprocessing.util import Finalize
from pathlib import Path

from eyas.common.errors import ConfigError

LOCK = ".lock"


def own_prefix(folder: Path) -> str:
    """How the names of this process's files in `folder` begin. Raises ConfigError if it cannot hold any."""
    return _claim(folder, os.getpid())


def new_path(what: str, folder: Path) -> Path:
    """A fresh name for a file of this process, whose end leaves it to `sweep`. Raises as `own_prefix`."""
    return folder / f"{own_prefix(folder)}-{secrets.token_hex(3)}-{what}"


def sweep(folder: Path) -> list[Path]:
    """Removes the files of processes that have ended, and says which."""
    removed: list[Path] = []
    for path in folder.glob(f"eyas-*{LOCK}"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # another user's, or just removed
        if _locked(lock):
            removed += _remove(path)
        os.close(lock)
    return removed


@functools.cache
def _claim(folder: Path, pid: int) -> str:
    """A name that no other process has, under a lock that this one keeps until it ends."""
    while True:
        path = folder / f"eyas-{pid}-{secrets.token_hex(3)}{LOCK}"  # short: a socket's path has 107 bytes
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            if _locked(lock) and path.exists():  # no other process's sweep came between
                break
        except OSError as error:
            raise ConfigError(f"{folder} cannot hold KV pages: {error.strerror}", param="pool-dir") from None
        os.close(lock)
    Finalize(None, _remove, args=(path,), exitpriority=0)
    return path.name.removesuffix(LOCK)


def _remove(lock: Path) -> list[Path]:
    """The files beside a lock, then the lock itself, so that what is left names its owner."""
    files = list(lock.parent.glob(f"{lock.name.removesuffix(LOCK)}-*"))
    for file in [*files, lock]:
        with contextlib.suppress(OSError):
            file.unlink()
    return files


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
