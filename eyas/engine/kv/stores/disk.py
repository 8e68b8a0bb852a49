"""A folder of a local disk: a file for each page, the one used longest ago removed first.

Workers with the same namespace may share a folder, and a worker finds what one before it left. A file appears
whole or not at all; which files there are is looked at again now and then, for others write here too.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from eyas.common.errors import ConfigError, TransferFailed
from eyas.engine.kv.stores.store import SEAL_BYTES, Parts, is_sealed, seal

LOOK_S = 30.0  # between looks at the folder
LOOK_SHARE = 0.01  # of the time, at most, goes to looks
BREATH_S = 0.001  # after each of its folders, in which the threads that compute run
OLD_S = 60.0  # a file that is not whole by then never will be
PARTIAL = ".part"

_log = logging.getLogger("eyas.engine")


class DiskStore:
    """`folder` / `namespace`, of at most `most_bytes`. ConfigError if nothing can be written there."""

    name = "disk"

    def __init__(self, folder: Path, namespace: str, most_bytes: int) -> None:
        self.folder = folder / namespace
        self._limit = self._most = most_bytes  # as configured; as the disk has room
        self._lock = threading.Lock()
        self._files: OrderedDict[bytes, int] = OrderedDict()  # bytes by key; the next to be removed first
        self._total = 0
        self._next_look = -math.inf
        self._numbers = itertools.count()
        try:
            self._make_folder()
            probe = self._partial()
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            text = f"--disk-cache-dir: {folder} cannot be written: {error.strerror}"
            raise ConfigError(text, param="disk-cache-dir") from None
        self._look()

    def put(self, key: bytes, parts: Parts) -> int:
        """Writes a page's file, after it has removed others if there is no room."""
        size = SEAL_BYTES + sum(len(part) for part in parts)
        self._look()
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
                return 0
            self._make_room(size)
        partial, path = self._partial(), self._path(key)
        try:
            self._make_folder()  # someone may have removed it
            path.parent.mkdir(exist_ok=True)
            with open(partial, "xb", buffering=0) as file:
                if os.writev(file.fileno(), [seal(key, parts), *parts]) != size:
                    raise OSError(errno.ENOSPC, "the disk is full")
            partial.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                with self._lock:
                    self._most = min(self._most, self._total)  # the next page takes an old one's place
            raise TransferFailed(f"{self.folder} takes no page: {error.strerror}") from None
        with self._lock:
            self._add(key, size)
        return size

    def get(self, key: bytes, parts: Parts) -> bool:
        """Reads a page's file. A damaged one is removed."""
        path, sealed = self._path(key), bytearray(SEAL_BYTES)
        try:
            with open(path, "rb", buffering=0) as file:
                os.preadv(file.fileno(), [sealed, *parts], 0)
                os.utime(file.fileno())  # for the next look at the folder
        except FileNotFoundError:
            self._gone(key)
            return False
        except OSError as error:
            raise TransferFailed(f"{path} cannot be read: {error.strerror}") from None
        if not is_sealed(bytes(sealed), key, parts):
            _log.warning("a KV page on the disk is damaged, and removed: %s", path)
            with contextlib.suppress(OSError):
                path.unlink()
            self._gone(key)
            return False
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
        return True

    def close(self) -> None:
        """Files stay."""

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its reader can guess prompts

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / name

    def _partial(self) -> Path:
        return self.folder / f"{os.getpid()}-{next(self._numbers)}-{time.monotonic_ns()}{PARTIAL}"

    def _add(self, key: bytes, size: int) -> None:
        self._total += size - self._files.pop(key, 0)
        self._files[key] = size

    def _gone(self, key: bytes) -> None:
        with self._lock:
            self._total -= self._files.pop(key, 0)

    def _make_room(self, size: int) -> None:
        while self._files and self._total + size > self._most:
            key, freed = self._files.popitem(last=False)
            self._total -= freed
            with contextlib.suppress(OSError):
                self._path(key).unlink()

    def _look(self) -> None:
        """Reads which files there are, if that was long ago. The next look sees what changes meanwhile."""
        began = time.monotonic()
        with self._lock:
            if began < self._next_look:
                return
            self._next_look = math.inf  # one thread looks
        files = sorted(self._listed())
        now = time.monotonic()
        with self._lock:
            self._files = OrderedDict((key, size) for _, key, size in files)
            self._total = sum(self._files.values())
            self._most = self._limit
            self._next_look = now + max(LOOK_S, (now - began) / LOOK_SHARE)

    def _listed(self) -> Iterator[tuple[float, bytes, int]]:
        """(when it was used, its key, its bytes) of every file. Removes what will never be one."""
        for entry in _entries(self.folder):
            if entry.name.endswith(PARTIAL):
                with contextlib.suppress(OSError):
                    if time.time() > entry.stat().st_mtime + OLD_S:
                        os.unlink(entry.path)
                continue
            for file in _entries(entry.path):
                with contextlib.suppress(OSError, ValueError):
                    info = file.stat()
                    yield info.st_mtime, bytes.fromhex(file.name), info.st_size
            time.sleep(BREATH_S)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """The entries of a folder; none if it is gone, or is no folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []
