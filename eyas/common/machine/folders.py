"""Folders of this machine: those that several processes share, a cluster's in /dev/shm, a user's caches.

Each process that uses a shared folder holds a lock on it, and the last of them to leave removes it. A lock
dies with its process, so no pid is ever guessed at. If all were killed, the next process that makes a folder
with the same prefix removes theirs. The folder of a service's certificates may be named by one variable for a
whole container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from eyas.common.errors import ConfigError

PREFIX = "eyas-cluster-"
TLS_VARIABLE = "EYAS_TLS_DIR"


class SharedFolder:
    """A new folder in `parent`; its name begins with `prefix`. Raises OSError if none can be made there.

    Its owner calls `leave` once.
    """

    def __init__(self, parent: str, prefix: str) -> None:
        _sweep(Path(parent), prefix)
        self.path, self._lock = _make(parent, prefix)

    def leave(self) -> None:
        """Gives up the lock; if no other process has one, the folder goes, with all that is in it."""
        leave(self.path, self._lock)


def enter(folder: Path) -> int:
    """Takes a lock on a folder that is there; gives its descriptor. Raises OSError if it is not."""
    lock = os.open(folder, os.O_RDONLY)
    _locked(lock, fcntl.LOCK_SH)
    return lock


def leave(folder: Path, lock: int) -> None:
    """Gives up the lock; if no other process has one, the folder goes, with all that is in it."""
    if _locked(lock, fcntl.LOCK_EX):
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _make(parent: str, prefix: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.suppress(FileNotFoundError):  # another process's sweep came between
            lock = os.open(path, os.O_RDONLY)
            if _locked(lock, fcntl.LOCK_SH) and path.exists():
                return path, lock
            os.close(lock)


def _sweep(parent: Path, prefix: str) -> None:
    for folder in parent.glob(prefix + "*"):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError:
            continue  # another user's, or just removed
        leave(folder, lock)


def _locked(folder: int, kind: int) -> bool:
    """A shared lock may become an exclusive one: of two who try, the first one loses its own, so one wins."""
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def new_pool_folder(parent: str) -> SharedFolder:
    """Makes the folder of a cluster, which leaves it after its workers. Raises ConfigError if `parent` cannot
    hold one.
    """
    try:
        return SharedFolder(parent, PREFIX)
    except OSError as error:
        raise ConfigError(f"{parent} cannot hold KV pages: {error.strerror}", param="pool-dir") from None


@contextlib.contextmanager
def living_in(folder: Path) -> Iterator[None]:
    """Keeps a cluster's folder while this worker lives. Any other folder is left as it is.

    Raises ConfigError if a cluster's folder is not there.
    """
    if not folder.name.startswith(PREFIX):
        yield
        return
    try:
        lock = enter(folder)
    except OSError as error:
        message = f"--pool-dir: {folder} cannot be used: {error.strerror}"
        raise ConfigError(message, param="pool-dir") from error
    try:
        yield
    finally:
        leave(folder, lock)


def cache_home() -> Path:
    """`eyas` in the user's cache directory: $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eyas"


def tls_folder(flag: str | None) -> str | None:
    """The folder that the flag names, else the variable; None: services talk in plain."""
    return flag or os.environ.get(TLS_VARIABLE) or None
