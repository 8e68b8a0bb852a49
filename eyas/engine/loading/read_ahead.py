"""A model's files on their way from a disk into memory, while Python still imports what will read them.

A disk is idle in the first seconds of a start, and reads slowly what is then read page by page. No torch is
loaded here.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import psutil

PIECE_BYTES = 8 << 20
THREADS = 2
FEWEST_CPUS = 4  # with fewer, imports are late by as much as reading is early


def read_ahead(folder: Path) -> list[Thread]:
    """Begins to read a folder's weights. No thread: it has none, they would take half of the free memory, or
    there are few processors.

    Threads end with the process. What cannot be read is passed over: who loads it says so.
    """
    try:
        sizes = {path: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
    except OSError:
        return []
    room = psutil.virtual_memory().available / 2
    if not 0 < sum(sizes.values()) < room or len(os.sched_getaffinity(0)) < FEWEST_CPUS:
        return []
    threads = [Thread(target=_read, args=(sizes, n), name="read-ahead", daemon=True) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def _read(sizes: dict[Path, int], number: int) -> None:
    """A thread's pieces: each reads the ones that the others leave."""
    read = bytearray(PIECE_BYTES)
    for path, size in sizes.items():
        try:
            with path.open("rb") as file:
                for first in range(number * PIECE_BYTES, size, THREADS * PIECE_BYTES):
                    os.preadv(file.fileno(), [read], first)
        except OSError:
            continue
