"""Files of weights are in memory before anybody reads them."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from threading import Thread

import psutil
import pytest

from eyas.engine.loading.read_ahead import FEWEST_CPUS, PIECE_BYTES, read_ahead

SIZE = 3 * PIECE_BYTES + 4096


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it asks for."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(FEWEST_CPUS))


def written(path: Path) -> Path:
    """A file that the system is asked to keep nothing of."""
    with path.open("wb") as file:
        file.write(os.urandom(SIZE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def in_memory(path: Path) -> float:
    """The share of a file's pages that are in the page cache."""
    with (
        path.open("rb+") as file,
        mmap.mmap(file.fileno(), 0) as seen,
    ):
        first = ctypes.c_char.from_buffer(seen)
        pages = (ctypes.c_ubyte * -(-len(seen) // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(len(seen)), pages) == 0
        del first
        return sum(each & 1 for each in pages) / len(pages)


def test_weights_are_read_and_nothing_else(tmp_path: Path) -> None:
    weights, other = written(tmp_path / "model.safetensors"), written(tmp_path / "model.bin")
    if in_memory(weights) > 0.5:
        pytest.skip("this file system keeps files in memory")
    assert joined(read_ahead(tmp_path))
    assert in_memory(weights) == 1 and in_memory(other) < 0.5


def test_half_of_the_free_memory_is_filled_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = written(tmp_path / "model.safetensors")
    if in_memory(weights) > 0.5:
        pytest.skip("this file system keeps files in memory")
    free = psutil.virtual_memory()._replace(available=2 * PIECE_BYTES + 8192)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    joined(read_ahead(tmp_path))
    assert 0.2 < in_memory(weights) < 0.9  # the system reads on behind a piece


def joined(threads: list[Thread]) -> int:
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return len(threads)


@pytest.mark.parametrize("why", ["no folder", "no weights", "no memory", "few processors"])
def test_what_is_not_there_or_too_large_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    folder = tmp_path / "none" if why == "no folder" else tmp_path
    if why == "no memory":
        (tmp_path / "model.safetensors").write_bytes(bytes(4096))
        free = psutil.virtual_memory()._replace(available=8192)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    if why == "few processors":
        (tmp_path / "model.safetensors").write_bytes(bytes(4096))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(FEWEST_CPUS - 1))
    assert read_ahead(folder) == []


def test_a_file_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    assert joined(read_ahead(tmp_path))
