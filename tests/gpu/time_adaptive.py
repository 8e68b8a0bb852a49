"""Adaptive depth against the best fixed one, at every batch size: tokens per second of both.

    python -m tests.gpu.time_adaptive --out FILE [--shape llama-3.1-8b] [--tables 0 0.5] [--batches 1 4]

A table is the chance of a draft, given the ones before it. Plain decoding, chains of 1, 3, 5 and 7 and
`--spec-adaptive` with 7 have an engine each, with dummy weights and synthetic acceptance, whose table changes
between measurements. Each is of a batch that decodes for a moment, from the same length of context on;
adaptive depth learns first, and is counted in several such moments, since it tries other depths in some. A
round counts as many tokens as its depth is worth by the table, so that the draws' luck is no part of a
figure; what was really drawn stands beside it. Lines are on disk as soon as they are known, several commands
may append to one file, and `--report` reads them again. `--device cpu` tries the script out with a tiny
shape.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add, mul
from pathlib import Path
from typing import Any

import torch

from eyas.common.config import GRAPH_ROWS, EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.gpu.lines import lines_of, say_all
from tests.gpu.steady import (
    TINY,
    Clocked,
    Rate,
    clocked,
    engine_config,
    going_on,
    rate,
    shape_folders,
    submit,
    wait,
    warm,
)

TABLES = (0.0, 0.5, 0.75, 0.95)
BATCHES = (1, 4, 16, 64, 128, 256)
DEPTHS = (1, 3, 5, 7)
TARGET = 0.98
PROMPT, CONTEXT = 16, 2048
AT_ONCE = {"cuda": 3072, "cpu": 16}  # rows of a step with prompts


@dataclass(frozen=True)
class Depth:
    """A way to draft. `steps` 0: plain decoding."""

    steps: int
    adaptive: bool = False

    def __str__(self) -> str:
        return "adaptive" if self.adaptive else f"chain {self.steps}" if self.steps else "plain"

    def options(self, head: Path) -> dict[str, Any]:
        """Of its engine, at a table that is replaced before anything is measured."""
        if not self.steps:
            return {"draft": None}
        rates = (0.5,) * self.steps
        spec = SpeculationConfig(self.steps, 1, self.steps + 1, synthetic_rates=rates, adaptive=self.adaptive)
        return {"draft": str(head), "speculation": spec}


WAYS = (Depth(0), Depth(max(DEPTHS), adaptive=True), *map(Depth, DEPTHS))


@dataclass(frozen=True)
class Moment:
    """How long a batch is watched, once all of it decodes and gave `ramp` tokens per sequence more: for
    `tokens` more and `least` seconds, but no longer than `most` seconds.
    """

    ramp: int
    tokens: int
    least: float
    most: float


MOMENTS = {
    "cuda": (Moment(16, 160, 0.5, 0.8), Moment(16, 64, 0.2, 0.4)),
    "cpu": (Moment(1, 8, 0.0, 30.0), Moment(1, 24, 0.0, 60.0)),
}
"""To learn in, `LESSONS` times, and to be counted, `COUNTED` times."""

LESSONS = {"cuda": 4, "cpu": 1}
"""A look at drafts after a table without any comes after a second or two, in large batches."""
COUNTED = {"cuda": (2, 4), "cpu": (1, 1)}
"""Moments of a fixed depth, and of an adaptive one."""


@dataclass(frozen=True)
class Plan:
    """What a run measures, and until when, by `time.monotonic`."""

    device: str
    tables: Sequence[float]
    batches: Sequence[int]
    folders: tuple[Path, Path]
    end: float


def worth(chances: Sequence[float], offered: int) -> float:
    """Tokens that a round with `offered` drafts in a row gives in the mean; `chances`: of each, in turn."""
    return sum(accumulate(chances[:offered], mul, initial=1.0))


@dataclass(frozen=True)
class Seen:
    """Of one moment or several: rates of what rounds are worth and of what was drawn, and their depths."""

    worth: Rate
    drawn: Rate
    depths: Counter[int]

    def __add__(self, other: Seen) -> Seen:
        return Seen(self.worth + other.worth, self.drawn + other.drawn, self.depths + other.depths)

    def line(self, batch: int) -> dict[str, Any]:
        """For a file of results."""
        rounds = self.depths.total()
        return self.worth.line(batch) | {
            "drawn_per_s": round(self.drawn.tokens / self.drawn.seconds, 1),
            "depths": {depth: round(count / rounds, 3) for depth, count in sorted(self.depths.items())},
        }


def watched(cluster: Clocked, name: str, batch: int, chances: Sequence[float], moment: Moment) -> Seen:
    """A batch that begins together and is given up at the end."""
    params = SamplingParams(temperature=0.0, max_tokens=CONTEXT - PROMPT - 64, ignore_eos=True)
    prompts = [tuple(range(100 + i, 100 + i + PROMPT)) for i in range(batch)]
    requests = [GenerationRequest(f"{name} {i}", prompt, params) for i, prompt in enumerate(prompts)]
    submit(cluster, requests)
    wait(lambda: cluster.begun == batch, 60.0)
    begun = cluster.tokens

    def until(tokens: int, least: float, most: float) -> int:
        """Entries that there are once `tokens` tokens per sequence have come."""
        end = time.perf_counter() + least
        wait(lambda: time.perf_counter() >= end and cluster.tokens - begun >= tokens * batch, most)
        return len(cluster.came)

    first = until(moment.ramp, 0.0, 60.0)
    last = until(moment.ramp + moment.tokens, moment.least, moment.most)
    came = cluster.came[first:last]
    cluster.cancel([request.id for request in requests])
    return Seen(
        rate(came, lambda entry: worth(chances, entry.offered)),
        rate(came, lambda entry: len(entry.tokens)),
        Counter(one.entry.offered for one in came),
    )


def config_of(plan: Plan, way: Depth) -> EngineConfig:
    """The engine of a way, with graphs of the batches that are measured, as far as those have any."""
    most = max(plan.batches)
    options = way.options(plan.folders[1]) | {"chunk_tokens": AT_ONCE[plan.device]}
    if plan.device != "cpu":
        width = 1 if way.adaptive else way.steps + 1
        options["cuda_graph_bs"] = tuple(batch for batch in plan.batches if batch * width <= GRAPH_ROWS)
    return engine_config(
        plan.device, model=str(plan.folders[0]), context_length=CONTEXT, max_running=most,
        num_pages=most * 512 // 16 + CONTEXT // 4, **options,
    )  # fmt: skip


def measured(plan: Plan, way: Depth) -> Iterator[dict[str, Any]]:
    """Each batch size and table through one engine; plain decoding knows no tables."""
    config, (learnt, counted) = config_of(plan, way), MOMENTS[plan.device]
    with clocked(config) as cluster:
        rates = cluster.workers["unified"].engine._parts.runner._executor.state.synthetic
        for batch in plan.batches:
            for chance in plan.tables if way.steps else plan.tables[:1]:
                if time.monotonic() > plan.end:
                    print(f"no time is left for {way}, batch {batch}, table {chance:g}", flush=True)
                    continue
                if rates is not None:
                    with torch.inference_mode():
                        rates.fill_(chance)
                name, each = f"{batch} {chance:g}", (chance,) * way.steps
                for lesson in range(LESSONS[plan.device] if way.adaptive else 0):
                    watched(cluster, f"learn {lesson} {name}", batch, each, learnt)
                moments = range(COUNTED[plan.device][way.adaptive])
                seen = [watched(cluster, f"count {i} {name}", batch, each, counted) for i in moments]
                found = reduce(add, seen).line(batch)
                yield {"synthetic": True, "table": chance, "way": str(way), "batch": batch} | found


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row per table and batch: every way, and adaptive over the best of the others."""
    found: dict[tuple[float, int], dict[str, float]] = defaultdict(dict)
    plain = {line["batch"]: line["tokens_per_s"] for line in lines if line["way"] == "plain"}
    for line in lines:
        if line["way"] != "plain":
            found[line["table"], line["batch"]][line["way"]] = line["tokens_per_s"]
    names = [str(way) for way in WAYS]
    missing = {name for ways in found.values() for name in names if name not in ways} - {"plain"}
    yield f"{'table':>6}{'batch':>6}" + "".join(f"{name:>10}" for name in names) + f"{'ratio':>8}"
    ratios = []
    for (table, batch), ways in sorted(found.items()):
        ways["plain"] = plain.get(batch, 0.0)
        best = max((value for name, value in ways.items() if name != "adaptive"), default=0.0)
        ratio = ways.get("adaptive", 0.0) / best if best else 0.0
        ratios.append(ratio)
        figures = "".join(f"{ways.get(name, 0.0):>10.0f}" for name in names)
        yield f"{table:>6g}{batch:>6}{figures}{ratio:>8.3f} {'PASS' if ratio >= TARGET else 'FAIL'}"
    if ratios:
        verdict = "PASS" if min(ratios) >= TARGET and not missing else "FAIL"
        yield f"adaptive over the best, the least of {len(ratios)}: {min(ratios):.3f} of {TARGET} {verdict}"
    if missing:
        yield f"not measured everywhere: {', '.join(sorted(missing))}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=list(AT_ONCE), default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--tables", type=float, nargs="+", default=list(TABLES))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--seconds", type=float, default=260.0, help="nothing new begins after (260)")
    parser.add_argument("--report", action="store_true", help="only print the table of what FILE has")
    given = parser.parse_args()
    if not given.report:
        end = time.monotonic() + given.seconds - 5
        with tempfile.TemporaryDirectory() as folder:
            shape = given.shape if given.device == "cuda" else TINY
            folders = shape_folders(shape, Path(folder))
            plan = Plan(given.device, given.tables, given.batches, folders, end)
            warm([config_of(plan, way) for way in WAYS])
            for way in WAYS:
                with going_on(str(way)):
                    say_all(given.out, measured(plan, way))
    print(*report(lines_of(given.out)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
