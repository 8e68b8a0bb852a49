"""A folder that several processes use, and that the last of them to leave removes.

Each holds a lock on it. A lock dies with its process, so no pid is ever guessed at. If all were killed, the
next process that makes a folder with the same prefix removes theirs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


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
