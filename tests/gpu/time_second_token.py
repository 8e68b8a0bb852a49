"""How long token 2 of a long prompt comes after token 1, by a link of a given rate that is only played.

    python -m tests.gpu.time_second_token [--gbit 400] [--device cpu]

A prefill and a decode engine in this process, on one GPU (an 8B model's shape, dummy weights) or on the CPU
(the embedded model). Their pages are copied as they always are; that a copy is over is told no earlier than a
link of that rate, one copy after the other, would have brought a page of --page-mib. Token 1 is known when
the last chunk ends. What has not come by then stands between it and token 2, and a decode step. With
--at-the-end the owner lets no page be read before all can.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from eyas.bench.shapes import SHAPES, write_model
from eyas.common.config import NANO, EngineConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.ipc.messages import Event, PrefillDone, StepReply, WatchUpdate
from kv_transfer.backends.base import CopyJob, CopyResult, PeerSource
from kv_transfer.backends.cuda_ipc import CudaIpcBackend
from kv_transfer.backends.shm import ShmBackend
from tests.unit.loopback import Loopback, Worker, split_configs, wait_all

ANSWER = 24  # tokens
WAIT_S = 60.0
ALLOWED_MS = 25.0  # beside a decode step


class PlayedLink:
    """Tells of copies when a link would have made them. `page_s`: seconds of a page."""

    def __init__(self, page_s: float) -> None:
        self._page_s = page_s
        self._free = 0.0  # when the link has made all that was begun
        self._due: dict[CopyJob, float] = {}
        self._came: dict[object, list[CopyResult]] = {}  # by backend

    def start(self, job: CopyJob) -> None:
        """A copy begins."""
        self._free = max(self._free, time.monotonic()) + len(job.dst_pages) * self._page_s
        self._due[job] = self._free

    def through(self, backend: object, results: list[CopyResult]) -> list[CopyResult]:
        """Those that have come to a backend, of `results` and earlier ones."""
        came, now = [*self._came.get(backend, ()), *results], time.monotonic()
        self._came[backend] = [one for one in came if self._due[one.job] > now]
        return [one for one in came if self._due[one.job] <= now]

    def patched(self, kind: type) -> mock._patch_multiple:  # type: ignore[type-arg]
        """Copies of backends of that kind take this link."""
        start, poll = kind.start, kind.poll

        def played_start(backend: object, source: PeerSource, job: CopyJob) -> None:
            self.start(job)
            start(backend, source, job)

        return mock.patch.multiple(
            kind, start=played_start, poll=lambda backend: self.through(backend, poll(backend))
        )


class Timeline(Loopback):
    """`done`: when a prompt was whole, by request; `tokens`: when each of its tokens came."""

    def __init__(self, *configs: EngineConfig, at_the_end: bool) -> None:
        self.done: dict[str, float] = {}
        self.came: dict[str, list[float]] = {}
        self._at_the_end = at_the_end
        super().__init__(*configs)

    def event(self, worker: Worker, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, PrefillDone):
            self.done[event.id] = now
        elif isinstance(event, StepReply):
            for entry in event.entries:
                self.came.setdefault(entry.id, []).extend([now] * len(entry.tokens))
        elif isinstance(event, WatchUpdate) and self._at_the_end and not event.done:
            return
        super().event(worker, event)


def engines(args: argparse.Namespace, folder: str) -> tuple[EngineConfig, ...]:
    """A prefill and a decode engine."""
    sizes = {"chunk_tokens": args.chunk, "draft": None, "pool_dir": folder, "worker": "w"}
    if args.device == "cpu":
        config = EngineConfig(model=str(NANO), num_pages=512, **sizes)
    else:
        model = Path(folder, "model")
        write_model(SHAPES["llama-3.1-8b"], model)
        config = resolve_engine(
            "cuda", model=str(model), load_format="dummy", mem_fraction_static=0.35, max_running=8, **sizes
        )
    return split_configs(dataclasses.replace(config, transfer="auto"))[:2]


def measure(args: argparse.Namespace, folder: str) -> dict[str, object]:
    """Medians in milliseconds over requests, one at a time."""
    page_s = args.page_mib * 2**20 * 8 / (args.gbit * 1e9)
    link, kind = PlayedLink(page_s), ShmBackend if args.device == "cpu" else CudaIpcBackend
    with link.patched(kind):
        cluster = Timeline(*engines(args, folder), at_the_end=args.at_the_end)
        try:
            for number in range(args.times + 1):
                ids = tuple((7 * i + 31 * number) % 1000 + 5 for i in range(args.prompt))
                params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
                wait_all([cluster.submit(GenerationRequest(f"r{number}", ids, params), split=True)], WAIT_S)
        finally:
            cluster.close()
    names = [f"r{number}" for number in range(1, args.times + 1)]
    gaps = [1e3 * (cluster.came[name][1] - cluster.done[name]) for name in names]
    steps = [
        1e3 * statistics.median(b - a for a, b in zip(came[4:], came[5:], strict=False))
        for came in (cluster.came[name] for name in names)
    ]
    late = statistics.median(gap - step for gap, step in zip(gaps, steps, strict=True))
    pages = -(-args.prompt // 16)
    return {
        "gbit": args.gbit,
        "prompt": args.prompt,
        "chunk": args.chunk,
        "at the end": args.at_the_end,
        "all pages ms": round(1e3 * pages * page_s, 2),
        "gap ms": round(statistics.median(gaps), 2),
        "step ms": round(statistics.median(steps), 2),
        "late ms": round(late, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gbit", type=float, default=400.0, help="of the played link (400)")
    parser.add_argument("--page-mib", type=float, default=2.0, help="of a page of 16 tokens (2: an 8B model)")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens (8192)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk (2048)")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--at-the-end", action="store_true", help="no page moves before all are there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eyas-second-", dir="/dev/shm") as folder:
        found = measure(args, folder)
    print(json.dumps(found), flush=True)
    return 0 if args.at_the_end or float(str(found["late ms"])) <= ALLOWED_MS else 1


if __name__ == "__main__":
    sys.exit(main())
