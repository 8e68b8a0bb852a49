"""The rates of the ways between GPUs of a host, as `eyas doctor` measures them, beside plain copies.

    [UCX_TLS=^cma] python -m tests.gpu.time_links --out FILE [--ways shm shm@8 nixl tcp] [--device cpu]

One worker that computes prompts on GPU 0, and one per way that decodes on GPU 1, with dummy weights of a
small model whose pages are those of an 8B model, of 2 MiB. The workers start side by side. Each way copies
proof pages through whole workers: engines, fronts and gRPC are in it. Beside them the PCIe copy from one GPU
to pinned memory and into the other is timed, each by itself and both together, and one processor's memcpy.
WAY@N: with N windows on their way at once instead of `kv_transfer.windows.AT_ONCE`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from eyas.bench.output import append_line
from eyas.bench.shapes import ModelShape, write_model
from eyas.common.errors import EyasError
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient

MODEL = Path("/tmp/eyas-links")
SHAPE = ModelShape(1024, 2048, layers=32, heads=8, kv_heads=8, vocab=4096, context=4096)
PAGES = "4096"
PORT = 23400  # of the owner; the pullers' follow
START_S, PROBE_S = 85.0, 12.0
PROBES = 3  # per way; the first sets it up
CUSTOM = "import kv_transfer.windows\nkv_transfer.windows.AT_ONCE = {}\n"  # in all of a worker's processes
PIECE = 32 << 20
PIECES = 32


def main() -> int:
    """The command line; 1 if some way was not measured."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for JSON lines")
    parser.add_argument("--ways", nargs="+", default=["shm", "nixl", "tcp"])
    parser.add_argument("--device", default="cuda", help="cpu: the embedded model, to try it")
    args = parser.parse_args()
    if args.device != "cpu":
        write_model(SHAPE, MODEL)
        plain(args.out)
    with ExitStack() as workers:
        for number, way in enumerate(["owner", *args.ways]):
            workers.enter_context(worker(number, way, args))
        return asyncio.run(measure(args))


def plain(out: Path) -> None:
    """Copies of 1 GiB in pieces, out of GPU 0, into GPU 1, and both at once; and memcpy."""
    host = [torch.empty(PIECES // 4, PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(PIECES, PIECE, dtype=torch.uint8, device=f"cuda:{i}") for i in range(2)]

    def copy(ends: tuple[int, ...]) -> float:
        for end in (0, 1):
            torch.cuda.synchronize(end)
        began = time.perf_counter()
        for i in range(PIECES):
            for end in ends:
                here, there = host[end][i % len(host[end])], device[end][i]
                with torch.cuda.device(end):
                    target, source = (here, there) if end == 0 else (there, here)
                    target.copy_(source, non_blocking=True)
        for end in (0, 1):
            torch.cuda.synchronize(end)
        return PIECES * PIECE / (time.perf_counter() - began) / 1e9

    for what, ends in (("out", (0,)), ("in", (1,)), ("out and in", (0, 1))):
        copy(ends)
        say(out, what=f"PCIe {what}", GBs=round(copy(ends), 1))
    began = time.perf_counter()
    host[1].copy_(host[0])
    say(out, what="memcpy by torch", GBs=round(host[0].nbytes / (time.perf_counter() - began) / 1e9, 1))


@contextmanager
def worker(number: int, way: str, args: argparse.Namespace) -> Iterator[None]:
    """A worker's process; its lines go to a file beside the results."""
    role, device = ("prefill", 0) if number == 0 else ("decode", 1)
    by, _, most = way.partition("@")
    flags = ["--roles", role, "--port", str(PORT + number), "--draft", "none", "--supervised"]
    flags += ["--num-pages", PAGES, "--max-running-requests", "4", "--chunked-prefill-size", "256"]
    if args.device != "cpu":
        flags += ["--device", f"cuda:{device}", "--model", str(MODEL), "--load-format", "dummy"]
        flags += ["--disable-cuda-graph", "--tune-seconds", "0"]
    flags += ["--registry", f"static:127.0.0.1:{PORT}"] + ([] if number == 0 else ["--transfer", by])
    log = args.out.with_name(f"{args.out.stem}-{by}{most}.log").open("w")
    command = [sys.executable, "-m", "eyas.cli", "worker", *flags]
    paths = [os.environ.get("PYTHONPATH", "")]
    if most:
        folder = args.out.with_name(f"windows-{most}")
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(CUSTOM.format(most))
        paths.insert(0, str(folder.resolve()))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env)
    try:
        yield
    finally:
        process.terminate()
        timer = threading.Timer(8.0, process.kill)
        timer.start()
        process.wait()
        timer.cancel()


async def measure(args: argparse.Namespace) -> int:
    """Asks each puller for its links, one after the other."""
    failed, owner = 0, f"127.0.0.1:{PORT}"
    deadline = time.monotonic() + START_S
    async with rpc.channel(owner) as channel:
        while not await rpc.is_serving(channel, 1.0):
            if time.monotonic() > deadline:
                say(args.out, what="the owner did not start")
                return 1
            await asyncio.sleep(0.5)
    for number, way in enumerate(args.ways, start=1):
        address = f"127.0.0.1:{PORT + number}"
        async with rpc.channel(address) as channel:
            while not await rpc.is_serving(channel, 1.0) and time.monotonic() < deadline:
                await asyncio.sleep(0.5)
            for _ in range(PROBES):
                try:
                    links = await InfoClient(channel).probe_links(owner, PROBE_S)
                except EyasError as error:
                    say(args.out, what=way, problem=error.message)
                    failed += 1
                    continue
                for link in links:
                    failed += bool(link.problem)
                    figures = {
                        "GBs": round(link.bytes_per_s / 1e9, 2),
                        "page_us": round(1e6 * link.latency_s),
                    }
                    say(args.out, what=way, path=link.path, **figures, problem=link.problem)
    return int(failed > 0)


def say(out: Path, **fields: Any) -> None:
    """A line in the file, and on the screen."""
    append_line(out, fields)
    print(fields, flush=True)


if __name__ == "__main__":
    sys.exit(main())
