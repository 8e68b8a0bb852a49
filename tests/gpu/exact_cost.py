"""What exact arithmetic costs over fast, by whole engines of the 8B shape, in one run on one GPU.

    python -m tests.gpu.exact_cost --out FILE [--seconds N] [--prompts triton] [--kind int4] [--only fast]

Each arithmetic, without drafts and with EAGLE-3 chains of 3 that are accepted by chance (3.0 tokens a round),
in a process of its own; all kernels are compiled before. Times of a token: one request and 32 at once (bs1,
bs32), and, without drafts, prompts of 1,024 tokens that keep coming beside 32 answers (s1k); prompts of 7,900
tokens, four at once, in tokens a second (s8k). Everything is asked twice, and the second time counts. FILE
gets a line of JSON whenever something is known, the ratios last. `--prompts`: what attends fast prompts;
exact ones always have a Triton kernel. `--kind`: of the weights (int4-head: the head's too); `--only`: one
arithmetic.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.ipc.messages import Event, StepReply
from eyas.engine.loading.startup import EngineStart
from tests.gpu.exact_rig import KINDS, Bed, Engine, Way
from tests.gpu.lines import lines_of, say
from tests.unit.loopback import Worker

RATE = 0.81  # 1 + r + r^2 + r^3 = 3.0 tokens a round
WAYS = tuple(
    Way(arithmetic, drafts, rate=RATE if drafts != "plain" else 0.0)
    for drafts in ("plain", "chain 3")
    for arithmetic in ("fast", "exact")
)
LIMIT_S = 120.0  # of one engine
PAGES, RUNNING = 12000, 64


@dataclass(frozen=True)
class Load:
    """`count` requests, `at_once` at a time, `gap_s` apart in the mean."""

    name: str
    prompt: int
    answer: int
    count: int
    at_once: int
    gap_s: float = 0.0
    per_second: bool = False  # tokens, prompts' too; else milliseconds a token
    drafted: bool = False  # also with chains

    @property
    def unit(self) -> str:
        return "tokens/s" if self.per_second else "ms"


LOADS = (
    Load("bs1", 128, 256, 1, 1, drafted=True),
    Load("bs8", 128, 256, 8, 8, drafted=True),
    Load("bs32", 128, 256, 32, 32, drafted=True),
    Load("s1k", 1024, 128, 96, 32, gap_s=0.03),
    Load("s8k", 7900, 64, 12, 4, per_second=True),
)


class Timed(Engine):
    """An engine whose answers' first and last tokens are timed."""

    def __init__(self, config: EngineConfig) -> None:
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        super().__init__(config)

    def event(self, worker: Worker, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, StepReply):
            for entry in event.entries:
                self._first.setdefault(entry.id, now)
                self._last[entry.id] = now
        super().event(worker, event)

    def answered(self, request: GenerationRequest) -> tuple[float, list[int]]:
        """A request alone: seconds to its first token, and all tokens. Raises RuntimeError if it fails."""
        began = time.perf_counter()
        result = self.submit(request, split=False)
        if not result.done.wait(LIMIT_S) or result.failure is not None:
            raise RuntimeError(f"request {request.id}: {result.failure or 'no answer'}")
        return self._first[request.id] - began, result.tokens[0]

    def measured(self, load: Load, seed: int) -> float:
        """The figure of a load, in its unit."""
        dice = random.Random(seed)
        params = SamplingParams(temperature=0.0, seed=seed, max_tokens=load.answer, ignore_eos=True)
        vocabulary = self.worker.ready.vocab_size
        requests = [
            GenerationRequest(
                f"{i}", tuple(dice.randrange(10, vocabulary - 300) for _ in range(load.prompt)), params
            )
            for i in range(load.count)
        ]
        self._first.clear()
        self._last.clear()
        began = time.perf_counter()
        done = list(self.flow(requests, load.at_once, time.monotonic() + LIMIT_S, load.gap_s))
        assert len(done) == load.count
        if load.per_second:
            return load.count * (load.prompt + load.answer) / (time.perf_counter() - began)
        spans = [self._last[name] - first for name, first in self._first.items()]
        return 1e3 * statistics.median(spans) / (load.answer - 1)

    def apart_ms(self) -> list[float]:
        """Between the first tokens of the last load."""
        times = sorted(self._first.values())
        return [round(1e3 * (after - before), 2) for before, after in pairwise(times)]


def config_of(bed: Bed, way: Way, prompts: str) -> EngineConfig:
    options = {} if bed.device == "cpu" else {"prefill_attention_backend": prompts}
    return bed.config(way, num_pages=PAGES, max_running=RUNNING, **options)


def measure(bed: Bed, way: Way, prompts: str, out: Path) -> None:
    """One engine, in this process."""
    began = time.monotonic()
    logging.basicConfig(level=logging.INFO)
    config = config_of(bed, way, prompts)
    EngineStart.of(config).wait_for_kernels()
    engine = Timed(config)
    say(out, {"way": str(way), "prompts": prompts, "ready s": round(time.monotonic() - began, 1)})
    for load in LOADS:
        if load.prompt + load.answer > bed.context or (way.drafts != "plain" and not load.drafted):
            continue
        first, figure = (round(engine.measured(load, seed), 4) for seed in (1, 2))
        say(out, {"way": str(way), "load": load.name, load.unit: figure, "the first time": first})
    sys.stdout.flush()
    os._exit(0)


def ratios(out: Path) -> Iterator[dict[str, Any]]:
    """Of every load: exact over fast in time, so that 1.05 is a cost of 5 %."""
    found = {(line["way"], line["load"]): line for line in lines_of(out) if "load" in line}
    for drafts in dict.fromkeys(way.drafts for way in WAYS):
        for load in LOADS:
            pair = [found.get((f"{name}, {drafts}", load.name)) for name in ("fast", "exact")]
            if None not in pair:
                fast, exact = (line[load.unit] for line in pair)
                ratio = fast / exact if load.per_second else exact / fast
                told = {"fast": fast, "exact": exact, "unit": load.unit}
                yield {"load": load.name, "drafts": drafts, **told, "time over fast": round(ratio, 4)}


def command(args: argparse.Namespace, way: Way, folder: str) -> list[str]:
    words = [sys.executable, "-m", "tests.gpu.exact_cost", "--way", str(way), "--folder", folder]
    words += ["--out", str(args.out), "--prompts", args.prompts]
    return [*words, "--device", args.device, "--shape", args.shape, "--kind", args.kind]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything (%(default)g)")
    parser.add_argument("--device", default="cuda", help="cpu: plain torch, to try the script")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--kind", choices=KINDS, default="dense")
    parser.add_argument("--only", choices=["fast", "exact"], help="the other arithmetic is left out")
    parser.add_argument("--prompts", choices=["triton", "flashinfer"], default="triton")
    parser.add_argument("--way", help="one alone, in this process")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--compile", action="store_true", help="only the way's kernels")
    args = parser.parse_args()
    if args.way is not None:
        bed, way = (
            Bed(args.device, args.shape, args.folder, args.kind),
            next(w for w in WAYS if str(w) == args.way),
        )
        prompts = args.prompts if way.arithmetic == "fast" else "triton"
        try:
            if args.compile:
                EngineStart.of(config_of(bed, way, prompts)).wait_for_kernels()
                return 0
            measure(bed, way, prompts, args.out)
        except BaseException:
            say(args.out, {"way": args.way, "failed": traceback.format_exc()})
            os._exit(1)
    failed, ends_at = False, time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        Bed(args.device, args.shape, Path(folder), args.kind).written()
        ways = [way for way in WAYS if args.only in (None, way.arithmetic)]
        commands = {str(way): command(args, way, folder) for way in ways}
        ahead = [subprocess.Popen([*words, "--compile"]) for words in commands.values()]
        failed = any([process.wait(LIMIT_S) for process in ahead])
        for name, words in commands.items():
            try:
                left = max(ends_at - time.monotonic(), 1.0)
                subprocess.run(words, check=True, timeout=min(left, LIMIT_S))
            except subprocess.SubprocessError as error:
                failed = True
                say(args.out, {"way": name, "failed": str(error)})
    for line in ratios(args.out):
        say(args.out, line)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
