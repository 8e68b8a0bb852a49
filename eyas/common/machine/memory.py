"""The memory of this machine, or less where a container's limit is nearer, and that of a process.

It reads control groups of both versions, the process's own and those above it. What the memory is for is its
callers' business. Freed memory of a process goes back to the system when it asks for that: the C library
keeps what was freed for its threads' next use, after a burst of large texts or bodies most of what the burst
took. And what stays is not searched again: Python's collector looks through all objects at times, while the
event loop waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 2**30
_MACHINE = Path("/")
_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes, of which `free` can still be taken. `holder`: "host" or "container", whose limit it is."""

    total: int
    free: int
    holder: str

    @property
    def free_gib(self) -> float:
        """The available memory, in GiB."""
        return self.free / GIB


def memory(root: Path = _MACHINE) -> MemoryBudget:
    """The host's, or a limit's that leaves less. `root`: where the control groups are looked for."""
    host = psutil.virtual_memory()
    total, free, holder = int(host.total), int(host.available), "host"
    for limit, used in _limits(root):
        total = min(total, limit)
        if limit - used < free:
            free, holder = max(limit - used, 0), "container"
    return MemoryBudget(total, free, holder)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of each group that has a limit. What is used and only speeds up files does not count."""
    for group in _groups(root):
        for most, now in _FILES:
            limit, used = _number(group / most), _number(group / now)
            if limit is not None and used is not None:
                yield limit, max(used - _cached(group / "memory.stat"), 0)


def _groups(root: Path) -> Iterator[Path]:
    """The folders of the process's groups that concern memory, each before the one above it.

    In a container a path may be the host's, which is not there: then its root is the container's own.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tops = [mounts, mounts / "unified"]
        elif "memory" in controllers.split(","):
            tops = [mounts / "memory", mounts / controllers]
        else:
            continue
        own = Path(path.strip("/"))
        for top in dict.fromkeys(tops):
            yield from (top / above for above in (own, *own.parents) if (top / above).is_dir())


def _cached(stat: Path) -> int:
    """Bytes of files that were read; they go when memory is needed, those that were read often last."""
    words = dict(line.split(" ", 1) for line in _read(stat).splitlines() if " " in line)
    sizes = [words.get(f"total_{kind}", words.get(kind, "0")) for kind in ("inactive_file", "active_file")]
    return sum(int(each) for each in sizes if each.isdigit())


def _number(path: Path) -> int | None:
    """None: there is no such file, or no limit."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def give_back() -> None:
    """Gives back what is free. Takes some milliseconds per 100 MiB; other threads go on."""
    with contextlib.suppress(AttributeError):  # not every C library can
        ctypes.CDLL(None).malloc_trim(0)


def keep_all() -> None:
    """All objects that are there now stay to the end, so the collector need not look at them again: after a
    gateway's start they are 90,000, which stopped its loop for 65 ms at a time.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The collector does not run inside, and never looks at what was made there: imports make objects that
    stay, and searches of them are a sixth of what torch and an engine take to import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def discard(address: int, size: int, *, shared: bool) -> int:
    """Gives the whole pages of the system within `size` bytes at `address` back: they are zeros when they are
    touched again. Returns how many bytes left.

    `shared`: they are mapped from a file in memory, whose other users see zeros too. Raises OSError.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = max((address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first, 0)
    advice = mmap.MADV_REMOVE if shared else mmap.MADV_DONTNEED
    libc = ctypes.CDLL(None, use_errno=True)
    if length and libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice) != 0:
        raise OSError(ctypes.get_errno(), f"{length} bytes of memory cannot be given back")
    return length
