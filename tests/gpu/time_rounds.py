"""The kernels of a round on a GPU: do they agree with their plain twins, and what does each one cost?

    python -m tests.gpu.time_rounds --out DIR

A kernel's time is that of a launch in a CUDA graph, less that of resetting the tables before it. A round is
all its small kernels in a row (products and attention left out), launched with and without overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from eyas.bench.kernels.timing import graph_us
from eyas.common.config import SpeculationConfig
from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.kernels.drafts.chains import propose
from eyas.engine.kernels.drafts.paths import PathRows, compact, gather_path
from eyas.engine.kernels.drafts.rounds import FACTS, RoundBatch, RoundRows, RoundVerdicts, prepare, verdict
from eyas.engine.kernels.drafts.trees import TreeFrontier, grow, new_growth, select
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape

PAGE, HIDDEN, VOCAB, STEPS, TOPK = 16, 4096, 32000, 5, 8
LAUNCHES, REPLAYS = 20, 15  # of a kernel in a graph, of the graph
AGREEMENT = {"rounds": "", "chains": "", "paths": "", "trees": "shape3 or shape4 or verified"}

Call = Callable[[], None]


class Round:
    """B sequences with W - 1 drafts each, all of which the target agrees with; 32 is a tree, 4 a chain."""

    def __init__(self, size: int, width: int, pdl: bool) -> None:
        self.width, self.tree = width, width == 32
        self.deepest = STEPS + 1 if self.tree else width
        self.tables = SlotTables(TableSizes(size + 1, 64, width), "cuda")
        self.tables.length[:-1] = 500
        self.tables.speculative[:-1] = 1
        self.tables.drafts.fill_(1)
        self.tables.pages.copy_(torch.arange(64 * (size + 1), dtype=torch.int32).view(size + 1, 64))
        self.batch = RoundBatch(self.tables, torch.arange(size, dtype=torch.int32, device="cuda"), PAGE, pdl)
        self.chosen = ints(size * width) + 1
        self.rows = new_rows(size, width)
        self.mask = torch.zeros(1, size, width, dtype=torch.int64, device="cuda")
        self.verdicts = RoundVerdicts(ints(size, FACTS + width), ints(size, self.deepest))
        self.features = torch.randn(size * width, HIDDEN, dtype=torch.bfloat16, device="cuda")
        gathered = self.features.new_zeros(size * self.deepest, HIDDEN)
        self.extension = PathRows(gathered, new_rows(size, self.deepest), ints(size))
        self.logits, self.next = torch.randn(size, VOCAB, device="cuda"), new_rows(size, 1)
        self.token_map = torch.arange(VOCAB, device="cuda")
        if self.tree:
            self._grow(size)
        self.saved = self.tables.memory.clone()

    def _grow(self, size: int) -> None:
        shape = PoolShape(KvFormat(32, 8, 128), (size + 1) * 64, PAGE, torch.bfloat16, "cuda")
        self.pool = KvPool(shape).tensor
        self.growth = new_growth(SpeculationConfig(STEPS, TOPK, self.width), size, self.token_map, "cuda")
        self.levels = []
        for level in range(STEPS):
            logits = torch.randn(size * (TOPK if level else 1), VOCAB, device="cuda")
            probabilities, ids = logits.softmax(-1).topk(TOPK)
            below = TreeFrontier(new_rows(size, TOPK), ints(size * TOPK)) if level + 1 < STEPS else None
            self.levels.append((level, probabilities, ids, below))
            grow(self.batch, self.growth, *self.levels[-1])
        select(self.batch, self.growth)
        self.tables.drafts.fill_(1)

    def reset(self) -> None:
        torch.add(self.saved, 0, out=self.tables.memory)  # a kernel: what follows may overlap with it

    def kernels(self) -> dict[str, Call]:
        """In the order of a round; a chain's draft steps, or a tree's levels, by their numbers."""
        found: dict[str, Call] = {
            "prepare": lambda: prepare(self.batch, self.rows, self.mask),
            "verdict": lambda: verdict(self.batch, self.chosen, self.verdicts),
        }
        if self.tree:
            found["compact"] = lambda: compact(self.batch, self.verdicts, self.pool)
        found["gather_path"] = lambda: gather_path(self.batch, self.verdicts, self.features, self.extension)
        for level in getattr(self, "levels", ()):
            found[f"grow {level[0]}"] = lambda level=level: grow(self.batch, self.growth, *level)
        if self.tree:
            found["select"] = lambda: select(self.batch, self.growth)
        for step in range(0 if self.tree else self.width - 1):
            found[f"propose {step}"] = lambda step=step: propose(
                self.batch, self.logits, step, self.token_map, self.next
            )
        return found


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device="cuda")


def new_rows(size: int, width: int) -> RoundRows:
    return RoundRows(ints(size * width), ints(size * width), ints(size * width), ints(size))


def microseconds(call: Call) -> float:
    """Of one `call`, the median over replays of a graph of many."""
    return graph_us([call] * LAUNCHES, REPLAYS)


def timed(size: int, width: int) -> dict[str, float]:
    """Microseconds of each kernel, and of a whole round with and without overlap."""
    plain = Round(size, width, pdl=False)
    base = microseconds(plain.reset)

    def after_reset(*calls: Call) -> float:
        return microseconds(lambda: [call() for call in (plain.reset, *calls)]) - base

    found = {name: after_reset(call) for name, call in plain.kernels().items()}
    found["round"] = after_reset(*plain.kernels().values())
    overlapped = Round(size, width, pdl=True)
    calls = (overlapped.reset, *overlapped.kernels().values())
    found["round, overlapped"] = microseconds(lambda: [call() for call in calls]) - base
    return found


def agreement(out: Path) -> bool:
    """The unit tests of these kernels, compiled instead of interpreted."""
    running = {}
    for name, chosen in AGREEMENT.items():
        log = (out / f"agreement_{name}.txt").open("w")
        command = [sys.executable, "-m", "pytest", "-q", "-k", chosen, f"tests/unit/test_kernels_{name}.py"]
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        for name, process in running.items():
            said = "agrees" if process.wait(timeout=60) == 0 else "DIFFERS"
            last = (out / f"agreement_{name}.txt").read_text().strip().splitlines()[-1:]
            print(f"{name}: {said} {last}", flush=True)
    finally:
        for process in running.values():
            process.kill()
    return all(process.returncode == 0 for process in running.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    results = {}
    for width in (4, 32, 1):
        for size in (1, 8, 32):
            found = results[f"B {size} W {width}"] = timed(size, width)
            print(f"B {size:2} W {width:2}:", "  ".join(f"{k} {v:.1f}" for k, v in found.items()), flush=True)
            (out / "time_rounds.json").write_text(json.dumps(results, indent=1))
    return 0 if agreement(out) else 1


if __name__ == "__main__":
    sys.exit(main())
