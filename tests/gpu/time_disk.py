"""A start that reads a model of 16 bits from a disk: which share of the disk's rate is it read at?

    python -m tests.gpu.time_disk --out FILE --folder DIR --prepare    # writes it (16 GB), and starts once
    python -m tests.gpu.time_disk --out FILE --folder DIR              # dd twice, and a start

The disk's rate is that of `dd iflag=direct`, one file after the other or all at once, whichever is faster. A
start's is what the system takes in from disks (/proc/vmstat) between the first and the last twentieth of the
files, which are out of the page cache before. Nothing else may use the disk.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from eyas.bench.shapes import SHAPES, ModelShape, write_model
from eyas.engine.checkpoint.folder import weight_files
from tests.gpu.report import Report
from tests.gpu.time_start import Server, let_go, ones, sizes_of, wide, write_layers

LOOK_S = 0.02
ENDS = 0.05  # of the bytes, at either end: a rate is that between them
AIM = 0.8
KIB = 1024


def write_wide_model(shape: ModelShape, folder: Path) -> None:
    """The folder of a model of 16 bits. Matrices of one size have the same numbers in every layer."""
    write_model(shape, folder)
    made = {
        size: torch.randn(size).mul_(size[1] ** -0.5).bfloat16() for size in set(sizes_of(shape).values())
    }
    ends = [("model.embed_tokens.weight", wide(shape)), ("model.norm.weight", ones(shape))]
    ends.append(("lm_head.weight", ends[0][1]))
    write_layers(shape, folder, ends, lambda size: iter([("weight", made[size])]))


class Intake:
    """What the system takes in from disks, as seconds and bytes, from its start to its end."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []
        self._over = Event()
        self._thread = Thread(target=self._look, daemon=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def rate(self, size: int) -> float | None:
        """GB/s between the first and the last part of `size` bytes. None: fewer came."""
        came = [(at, taken - self._seen[0][1]) for at, taken in self._seen]
        places = [next((at for at, taken in came if taken >= part * size), None) for part in (ENDS, 1 - ENDS)]
        first, last = places
        if first is None or last is None or first == last:
            return None
        return (1 - 2 * ENDS) * size / (last - first) / 1e9

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self._seen.append((time.monotonic(), taken_in()))


def taken_in() -> int:
    """Bytes from disks since the system's start."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        name, value = line.split()
        if name == "pgpgin":
            return KIB * int(value)
    raise OSError("/proc/vmstat says nothing of pgpgin")


def disk_rate(folder: Path) -> dict[str, Any]:
    """GB/s of dd, which reads around the page cache."""
    files, size = weight_files(folder), size_of(folder)
    commands = [["dd", f"if={path}", "of=/dev/null", "bs=8M", "iflag=direct"] for path in files]
    found: dict[str, Any] = {}
    for name, at_once in (("one after the other", 1), ("all at once", len(files))):
        let_go(folder)
        began = time.monotonic()
        for first in range(0, len(commands), at_once):
            some = commands[first : first + at_once]
            running = [subprocess.Popen(each, stderr=subprocess.DEVNULL) for each in some]
            if any(each.wait() for each in running):
                raise OSError("dd failed")
        found[name] = round(size / (time.monotonic() - began) / 1e9, 2)
    return found


def size_of(folder: Path) -> int:
    """Bytes of the weights."""
    return sum(path.stat().st_size for path in weight_files(folder))


def started(server: Server, folder: Path, best: float, seconds: float) -> dict[str, Any]:
    """A start whose files are out of the page cache, and its share of the disk's rate."""
    let_go(folder)
    intake = Intake()
    with intake.watched():
        found: dict[str, Any] = server.start(seconds)
    rate = intake.rate(size_of(folder))
    if rate is None:
        return found | {"ok": False, "read": "less than the files"}
    return found | {"GB/s": round(rate, 2), "share": round(rate / best, 3), "ok": rate >= AIM * best}


def main() -> int:
    """The command line; 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.time_disk", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--prepare", action="store_true", help="only writes it, and starts once")
    parser.add_argument("--flags", default="", help="more flags of eyas serve, in one word")
    args = parser.parse_args()
    report, folder = Report(args.out, args.seconds), args.folder
    server = Server(folder, args.device, ("--draft", "none", *args.flags.split()))
    if args.prepare:
        report.run("written", lambda: _written(SHAPES[args.shape], folder))
        report.run("start, kernels may be compiled", lambda: server.start(report.left))
        return int(report.failed > 0)
    rates: dict[str, Any] = {}
    report.run("disk", lambda: rates.setdefault("GB/s", disk_rate(folder)))
    if rates:
        best = max(rates["GB/s"].values())
        report.run("start, files out of the cache", lambda: started(server, folder, best, report.left))
    return int(report.failed > 0)


def _written(shape: ModelShape, folder: Path) -> dict[str, Any]:
    began = time.monotonic()
    if not folder.exists():
        write_wide_model(shape, folder)
    return {"GB": round(size_of(folder) / 1e9, 3), "s": round(time.monotonic() - began, 2)}


if __name__ == "__main__":
    sys.exit(main())
