"""Adaptive depth against each fixed depth of the same engine, in turns: tokens per second.

    python -m tests.gpu.time_depths --out FILE [--shape r8] [--tables 0.5 0.75] [--batches 1 8]

`r8`: one rank of eight of DeepSeek-V3 with its NextN head, chains of 2, uniform routing; two engines of that
size fit no GPU. Another shape: an EAGLE-3 head, chains of 7. All have dummy weights and synthetic acceptance,
as in `tests.gpu.time_adaptive`, which compares engines: what ran before heats a card, and a card that is hot
is slower. Here a depth is fixed while it is measured, and the ways take turns. Plain rounds pay for the head
that catches up. FILE gets a line of JSON per batch, table and way; the report is printed last. `--device cpu`
tries the script out with tiny models.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from tests.gpu.answer_latent import LAYERS, write_rank
from tests.gpu.lines import say
from tests.gpu.steady import TINY, Clocked, clocked, engine_config, shape_folders, warm
from tests.gpu.time_adaptive import CONTEXT, LESSONS, MOMENTS, TARGET, Seen, watched
from tests.unit.tiny_deepseek import V3, write_tiny_nextn_deepseek

R8 = "r8"
NEXTN_RATE = 0.704  # 1 + r + r^2 = 2.2 tokens per round of 2 steps
TURNS = 2
ADAPTIVE = "adaptive"


@dataclass(frozen=True)
class Plan:
    """`steps`: of the deepest chain. `batches`, `tables`: what is measured by itself."""

    steps: int
    batches: tuple[int, ...]
    tables: tuple[float, ...]


PLANS = {R8: Plan(2, (1, 8, 32, 128), (NEXTN_RATE,))}
OTHER = Plan(7, (1, 4, 16, 64, 128, 256), (0.0, 0.5, 0.75, 0.95))


def config_of(given: argparse.Namespace, plan: Plan, folder: Path) -> EngineConfig:
    """An engine of the shape, whose files are written into `folder`."""
    target, head = folders(given, folder)
    most, rates = max(given.batches), (0.5,) * plan.steps
    sizes: dict[str, Any] = {"context_length": CONTEXT, "max_running": most}
    sizes |= {"num_pages": most * 512 // 16 + CONTEXT // 4, "chunk_tokens": 16}
    if given.device != "cpu":
        sizes |= {"cuda_graph_bs": tuple(given.batches), "chunk_tokens": 4096}
        sizes |= {"uniform_experts": given.shape == R8}
    spec = SpeculationConfig(plan.steps, 1, plan.steps + 1, synthetic_rates=rates, adaptive=True)
    return engine_config(given.device, model=str(target), draft=str(head), speculation=spec, **sizes)


def folders(given: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """The target and its head, without weights."""
    if given.shape != R8:
        return shape_folders(given.shape if given.device != "cpu" else TINY, folder)
    if given.device == "cpu":
        write_tiny_nextn_deepseek(folder, V3 | {"vocab_size": 512})
        return folder, folder
    write_rank(folder, given.layers, heads=1)
    return folder, folder


def measured(cluster: Clocked, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line per batch, table and way."""
    runner = cluster.workers["unified"].engine._parts.runner
    depths, (learnt, counted) = runner._depths, MOMENTS[given.device]
    for batch in given.batches:
        for chance in given.tables:
            with torch.inference_mode():
                runner._executor.state.synthetic.fill_(chance)
            chances, seen = (chance,) * max(depths.places), defaultdict[int | str, list[Seen]](list)
            for turn in range(TURNS):
                for way in (*depths.places, ADAPTIVE):
                    name = f"{batch} {chance:g} {way} {turn}"
                    depths.fixed = None if way == ADAPTIVE else way
                    for lesson in range(LESSONS[given.device] if way == ADAPTIVE else 0):
                        watched(cluster, f"learn {lesson} {name}", batch, chances, learnt)
                    seen[way] += [
                        watched(cluster, f"count {i} {name}", batch, chances, counted)
                        for i in range(2 if way == ADAPTIVE else 1)
                    ]
            for way, moments in seen.items():
                line = reduce(add, moments).line(batch)
                yield {"synthetic": True, "table": chance, "steps": way, "batch": batch} | line


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row per table and batch: tokens per second of every way, and adaptive over the best of the others."""
    found: dict[tuple[float, int], dict[Any, float]] = defaultdict(dict)
    for line in lines:
        found[line["table"], line["batch"]][line["steps"]] = line["tokens_per_s"]
    names = list(next(iter(found.values())))
    yield f"{'table':>6}{'batch':>6}" + "".join(f"{name:>10}" for name in names) + f"{'ratio':>8}"
    for (table, batch), ways in sorted(found.items()):
        ratio = ways[ADAPTIVE] / max(value for name, value in ways.items() if name != ADAPTIVE)
        figures = "".join(f"{ways[name]:>10.0f}" for name in names)
        yield f"{table:>6g}{batch:>6}{figures}{ratio:>8.3f} {'PASS' if ratio >= TARGET else 'FAIL'}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=list(MOMENTS), default="cuda")
    parser.add_argument("--shape", default=R8)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of r8 (%(default)s)")
    parser.add_argument("--tables", type=float, nargs="+", help="chances of a draft (the shape's)")
    parser.add_argument("--batches", type=int, nargs="+", help="(the shape's)")
    given = parser.parse_args()
    plan = PLANS.get(given.shape, OTHER)
    given.tables, given.batches = given.tables or plan.tables, given.batches or plan.batches
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(given, plan, Path(folder))
        warm([config])
        with clocked(config) as cluster:
            for line in measured(cluster, given):
                say(given.out, line)
                lines.append(line)
    print(*report(lines), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
