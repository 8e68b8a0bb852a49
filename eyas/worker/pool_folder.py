"""One folder under /dev/shm for everything that the workers of a cluster put there.

The cluster removes it when it ends; if the cluster was killed, the next one does. The folder is locked while
its cluster lives, and a lock dies with its process, so no pid is ever guessed at.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "eyas-cluster-"


class PoolFolder:
    """A locked folder. Owner: the cluster, which calls `remove` once."""

    def __init__(self, parent: str) -> None:
        _sweep(Path(parent))
        self.path, self._lock = _make(parent)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _make(parent: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = os.open(path, os.O_RDONLY)
        if _locked(lock) and path.exists():
            return path, lock
        os.close(lock)  # another cluster's sweep came between: this one is gone


def _sweep(parent: Path) -> None:
    for folder in parent.glob(PREFIX + "*"):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError:
            continue  # another user's, or just removed
        if _locked(lock):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
