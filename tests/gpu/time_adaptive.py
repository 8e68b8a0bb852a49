"""Adaptive depth against the best fixed one, at every batch size: tokens per second of both.

    python -m tests.gpu.time_adaptive --out FILE [--shape llama-3.1-8b] [--tables 0 0.5] [--batches 1 4]

A table is the chance of a draft, given the ones before it. Plain decoding, chains of 1, 3, 5 and 7 and
`--spec-adaptive` with 7 answer the same requests, with dummy weights and synthetic acceptance. Each batch is
answered twice and the second time counts: adaptive depth learns in the first. A line per engine and batch is
on disk as soon as it is known; several commands may append to one file, which `--report` reads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.bench.files import append_line
from eyas.common.config import SpeculationConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.unit.loopback import Loopback, wait_all

TABLES = (0.0, 0.5, 0.75, 0.95)
BATCHES = (1, 4, 16, 64, 128, 256)
DEPTHS = (1, 3, 5, 7)
PROMPT, TOKENS, WAIT_S = 16, 256, 120


@dataclass(frozen=True)
class Depth:
    """A way to draft. `steps` 0: plain decoding."""

    steps: int
    adaptive: bool = False

    def __str__(self) -> str:
        return "adaptive" if self.adaptive else f"chain {self.steps}" if self.steps else "plain"

    def speculation(self, chance: float) -> SpeculationConfig:
        """With a draft accepted by `chance`, once those before it were."""
        rates = (chance,) * self.steps
        return SpeculationConfig(self.steps, 1, self.steps + 1, synthetic_rates=rates, adaptive=self.adaptive)


WAYS = (Depth(0), *map(Depth, DEPTHS), Depth(max(DEPTHS), adaptive=True))


def tokens_per_s(cluster: Loopback, name: str, batch: int) -> float:
    """Of a batch of answers that begin together, prompts included."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    requests = [
        GenerationRequest(f"{name} {i}", tuple(range(100 + i, 100 + i + PROMPT)), params)
        for i in range(batch)
    ]
    began = time.perf_counter()
    wait_all([cluster.submit(request, split=False) for request in requests], WAIT_S)
    return batch * TOKENS / (time.perf_counter() - began)


def measured(
    folders: tuple[Path, Path], way: Depth, chance: float, batches: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Each batch size through one engine."""
    options: dict[str, Any] = {"draft": str(folders[1]), "speculation": way.speculation(chance)}
    if not way.steps:
        options = {"draft": None}
    config = resolve_engine(
        "cuda", model=str(folders[0]), load_format="dummy", worker="unified", context_length=2048,
        num_pages=max(batches) * (PROMPT + TOKENS + 64) // 16 + 64, max_running=max(batches),
        prefill_attention_backend="triton", **options,
    )  # fmt: skip
    began = time.perf_counter()
    cluster = Loopback(config)
    try:
        tokens_per_s(cluster, "warm", 1)
        start_s = round(time.perf_counter() - began, 1)
        for batch in batches:
            tokens_per_s(cluster, f"learn {batch}", batch)
            found = tokens_per_s(cluster, f"count {batch}", batch)
            yield {
                "table": chance,
                "way": str(way),
                "batch": batch,
                "tokens_per_s": round(found, 1),
                "start_s": start_s,
            }
    finally:
        cluster.close()


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row per table and batch: every way, and adaptive over the best of the others."""
    found: dict[tuple[float, int], dict[str, float]] = defaultdict(dict)
    plain = {line["batch"]: line["tokens_per_s"] for line in lines if line["way"] == "plain"}
    for line in lines:
        found[line["table"], line["batch"]][line["way"]] = line["tokens_per_s"]
    names = [str(way) for way in WAYS]
    yield f"{'table':>6}{'batch':>6}" + "".join(f"{name:>10}" for name in names) + f"{'ratio':>8}"
    for (table, batch), ways in sorted(found.items()):
        ways.setdefault("plain", plain.get(batch, 0.0))
        best = max((value for name, value in ways.items() if name != "adaptive"), default=0.0)
        ratio = ways.get("adaptive", 0.0) / best if best else 0.0
        figures = "".join(f"{ways.get(name, 0.0):>10.0f}" for name in names)
        yield f"{table:>6g}{batch:>6}{figures}{ratio:>8.3f}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--tables", type=float, nargs="+", default=list(TABLES))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--report", action="store_true", help="only print the table of what FILE has")
    given = parser.parse_args()
    if not given.report:
        with tempfile.TemporaryDirectory() as folder:
            model, head = Path(folder) / "model", Path(folder) / "head"
            shape = ["-m", "eyas.bench.shapes", given.shape, str(model), "--head", str(head)]
            subprocess.run([sys.executable, *shape], check=True)
            for number, table in enumerate(given.tables):
                for way in WAYS if number == 0 else WAYS[1:]:  # plain decoding is the same for all
                    for line in measured((model, head), way, table, given.batches):
                        append_line(given.out, line)
                        print(line, flush=True)
    print(*report([json.loads(line) for line in given.out.read_text().splitlines()]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
