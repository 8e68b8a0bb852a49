"""One folder under /dev/shm for everything that the workers of a cluster put there.

The cluster and each of its workers hold a lock on it, and the last one to leave removes it: the cluster as a
rule, a worker if the cluster was killed. If all were killed the next cluster does. A lock dies with its
process, so no pid is ever guessed at.
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


class PoolFolder:
    """A new folder. Owner: the cluster, which calls `leave` once, when its workers are gone."""

    def __init__(self, parent: str) -> None:
        _sweep(Path(parent))
        self.path, self._lock = _make(parent)

    def leave(self) -> None:
        """Gives up the lock; if no other process has one, the folder and its pools are removed."""
        _leave(self.path, self._lock)


@contextlib.contextmanager
def living_in(folder: Path) -> Iterator[None]:
    """For a worker: keeps a cluster's folder while it lives. Any other folder is left as it is.

    Raises ConfigError if a cluster's folder is not there.
    """
    if not folder.name.startswith(PREFIX):
        yield
        return
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        message = f"--pool-dir: {folder} cannot be used: {error.strerror}"
        raise ConfigError(message, param="pool-dir") from error
    _locked(lock, fcntl.LOCK_SH)
    try:
        yield
    finally:
        _leave(folder, lock)


def remove_pools(folder: Path, pid: int) -> None:
    """Removes what an engine's process put there and could not remove itself, or did not come to."""
    for pool in folder.glob(f"eyas-{pid}-*"):
        pool.unlink(missing_ok=True)


def _make(parent: str) -> tuple[Path, int]:
    while True:
        try:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as error:
            raise ConfigError(f"{parent} cannot hold KV pages: {error.strerror}", param="pool-dir") from None
        lock = os.open(path, os.O_RDONLY)
        if _locked(lock, fcntl.LOCK_SH) and path.exists():
            return path, lock
        os.close(lock)  # another cluster's sweep came between: this one is gone


def _sweep(parent: Path) -> None:
    for folder in parent.glob(PREFIX + "*"):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError:
            continue  # another user's, or just removed
        _leave(folder, lock)


def _leave(folder: Path, lock: int) -> None:
    """Gives up the lock; if no other process has one, the folder goes."""
    if _locked(lock, fcntl.LOCK_EX):
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _locked(folder: int, kind: int) -> bool:
    """A shared lock may become an exclusive one: of two who try, the first one loses its own, so one wins."""
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
