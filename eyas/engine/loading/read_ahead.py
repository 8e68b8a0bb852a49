"""A model's files on their way from a disk into memory, while Python still imports what will read them.

A disk is idle in the first seconds of a start, and reads slowly what is then read page by page. No torch is
loaded here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from threading import Thread

import psutil

PIECE_BYTES = 8 << 20
THREADS = 4
FEWEST_CPUS = 4  # with fewer, imports are late by as much as reading is early


def read_ahead(folder: Path) -> list[Thread]:
    """Begins to read a folder's weights, as many as fit into half of the free memory. No thread: it has none,
    or there are few processors.

    Threads end with the process. What cannot be read is passed over: loading it fails, and says so.
    """
    try:
        sizes = [(path, path.stat().st_size) for path in sorted(folder.glob("*.safetensors"))]
    except OSError:
        return []
    pieces = [(path, first) for path, size in sizes for first in range(0, size, PIECE_BYTES)]
    del pieces[psutil.virtual_memory().available // 2 // PIECE_BYTES :]
    if not pieces or len(os.sched_getaffinity(0)) < FEWEST_CPUS:
        return []
    shares = [pieces[number::THREADS] for number in range(THREADS)]
    threads = [Thread(target=_read, args=(share,), name="read-ahead", daemon=True) for share in shares]
    for thread in threads:
        thread.start()
    return threads


def _read(pieces: Iterable[tuple[Path, int]]) -> None:
    """Reads pieces of files and drops what it read: the system's cache then has them."""
    read = bytearray(PIECE_BYTES)
    for path, first in pieces:
        try:
            with path.open("rb", buffering=0) as file:
                os.preadv(file.fileno(), [read], first)
        except OSError:
            continue
