"""Files and sockets by which processes of one host meet: whose they are, and whether they are the named ones.

A process has a lock beside the files that it puts into a folder for others, which the kernel drops when it
ends, however it ends. So nobody guesses by a process id, which means another process in every container.
Containers share names and not files, and so do hosts: a path alone proves nothing, and who is given one must
find that very file or none.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.common.wire.pool import Export

LOCK = ".lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CREDENTIALS = struct.Struct("3i")  # process, user, group


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


@dataclass(frozen=True)
class HostFile:
    """The path of a file, and its identity (`file_identity`)."""

    path: str
    identity: str

    @classmethod
    def at(cls, path: str) -> HostFile:
        """The file that is there now."""
        return cls(path, file_identity(path))

    @classmethod
    def find(cls, export: Export, folder: str) -> HostFile:
        """Returns a peer's exported file, which lies directly in `folder`: a peer may name no other file of
        ours.

        Raises ConfigError if there is no such file, or the peer's file of this name is another one.
        """
        path, identity = (os.fsdecode(export.get(field, b"")) for field in ("path", "identity"))
        there = Path(path).parent == Path(folder) and identity != ""
        if not there or file_identity(path) != identity:
            raise ConfigError(f"the peer's {path!r} is not a file in {folder} of this host")
        return cls(path, identity)

    def export(self) -> Export:
        """Returns the fields by which peers `find` it."""
        return {"path": self.path.encode(), "identity": self.identity.encode()}


def file_identity(path: str) -> str:
    """Names one file among those of all hosts; empty if there is none. Equal identities: the same memory.

    (A boot id is of one running kernel; a device and an inode, of one file of its.)
    """
    try:
        info = os.stat(path)
    except (OSError, ValueError):  # (a name that no file can have)
        return ""
    return f"{_BOOT_ID.read_text().strip()}/{info.st_dev}/{info.st_ino}"


def listen_at(path: Path, waiting: int) -> socket.socket:
    """A listener at `path`, a new file in a folder that other users cannot enter.

    `waiting`: connections that may wait to be accepted. Raises ConfigError if it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"the socket {path} cannot be made: {error.strerror or error}") from None
    os.chmod(path, 0o600)
    listener.listen(waiting)
    return listener


def is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.geteuid()
