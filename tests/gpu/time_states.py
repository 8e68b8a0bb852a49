"""Layers with a state on a GPU, right and how fast: `python -m tests.gpu.time_states --out FILE`.

In under 100 s on one H200, in the shape of Qwen3-Next-80B-A3B. First the kernels against the recurrence row
by row, and a row's bits by prompts, single rows, chains and trees; then each beside the time of the bytes
that it must move, by CUDA graphs. FILE gets one JSON object a line, which is printed as well; a part that
fails prints its traceback, and the others go on. The last line says PASS or FAIL.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from eyas.bench.kernels.timing import graph_us, queue_us
from eyas.engine.kernels.launch.warm import KernelWarmup
from eyas.engine.kernels.states import prompts
from eyas.engine.kernels.states.few import recur_few
from eyas.engine.kernels.states.gates import gated_norm, rule_gates
from eyas.engine.kernels.states.order import DeltaLayer, SolvedRows
from eyas.engine.kernels.states.prompts import Chunks, recur_chunks
from eyas.engine.states.delta import DeltaRows, DeltaRule, DeltaState
from eyas.engine.states.rows import StateRows
from eyas.engine.states.shape import SPAN, DeltaShape, ring_rows
from eyas.engine.states.store import StateFormat, StateStore
from tests.gpu.latent_bench import COPY_BYTES_PER_US
from tests.gpu.time_latent import error_of, run
from tests.unit.states_rig import Piece, Scene

SHAPE = DeltaShape(16, 32, 128, 128, 4)
LAYERS = 36
TREE = [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12]

Record = dict[str, Any]


class RoundedRule(DeltaRule):
    """The recurrence over heads that are rounded as kernels round them."""

    def _heads(self, *rows: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super()._heads(*rows)
        scale = self.shape.key_size**-0.5
        return (q / scale).bfloat16().float() * scale, k.bfloat16().float(), v.bfloat16().float()


@dataclass(frozen=True)
class StepCase:
    """A step of `batch` sequences with `rows` rows each; `tree`: they are one. `due`: each sequence's state
    is to be folded first; `crossing`: its rows pass the position of a state.
    """

    batch: int
    rows: int = 1
    tree: bool = False
    due: bool = False
    crossing: bool = False

    @property
    def name(self) -> str:
        kind = "tree of" if self.tree else "rows of"
        more = ", folded" if self.due else ", crossing" if self.crossing else ""
        return f"{self.batch} sequences, {kind} {self.rows}{more}"

    def behind(self, sequence: int) -> int:
        """Certain rows behind the last position of a state: spread as those of a batch are."""
        if self.crossing:
            return SPAN - 2
        return sequence * 37 % max(SPAN - self.rows, 1) if self.batch > 1 else SPAN // 2

    @property
    def floor_bytes(self) -> int:
        """Bytes of a layer's states, and of all that its rows read and write besides."""
        return self.batch * SHAPE.value_heads * SHAPE.key_size * SHAPE.value_size * 4

    @property
    def row_bytes(self) -> int:
        kept = sum(self.behind(s) for s in range(self.batch))
        each = SHAPE.key_heads * SHAPE.key_size * 2 + SHAPE.value_heads * (SHAPE.value_size * 4 + 8)
        solved = SHAPE.value_heads * 4 * sum(self.behind(s) ** 2 // 2 for s in range(self.batch))
        moved = SHAPE.inputs * 8 + SHAPE.value_heads * SHAPE.value_size * 2
        return kept * each + solved + self.batch * self.rows * (moved + each + SHAPE.value_heads * SPAN * 4)


class Step:
    """Layers with slots of their own, so that each call's memory is cold."""

    def __init__(self, case: StepCase, layers: int, device: str = "cuda") -> None:
        m = case.batch * case.rows
        self.case = case
        format = StateFormat((0,), SHAPE, ring_rows(16), torch.bfloat16)
        filters = torch.randn(SHAPE.kernel, SHAPE.inputs, device=device)
        self.layers = []
        for _ in range(layers):
            memory = torch.zeros(case.batch, format.slot_bytes, dtype=torch.uint8, device=device)
            [stored] = StateStore(format, memory).layers.values()
            self.layers.append(DeltaLayer(DeltaRule(SHAPE, filters), stored, SolvedRows.on(stored, SHAPE)))
        self.inputs = torch.randn(m, SHAPE.inputs, device=device, dtype=torch.bfloat16)
        decay = -torch.rand(m, SHAPE.value_heads, device=device)
        self.gates = torch.cat((decay, -decay), 1)
        parents = TREE[: case.rows] if case.tree else list(range(-1, case.rows - 1))
        depths: list[int] = []
        for parent in parents:
            depths.append(1 + (depths[parent] if parent >= 0 else -1))
        starts = [4 * SPAN + case.behind(s) for s in range(case.batch)]
        folds = [start // SPAN * SPAN for start in starts]
        bounds = [fold - SPAN if case.due else fold for fold in folds]
        numbers = (
            *(range(case.batch), range(0, m, case.rows), [case.rows] * case.batch, starts, bounds, folds),
            *([start + each for start in starts for each in part] for part in (parents, depths)),
        )
        tables = [torch.tensor(list(each), dtype=torch.int32, device=device) for each in numbers]
        self.rows = StateRows(*tables, most=case.rows, trees=case.tree)
        self.out = self.inputs.new_zeros(m, SHAPE.value_heads * SHAPE.value_size)

    def recur(self, layer: int, pdl: bool = True) -> torch.Tensor:
        recur_few(self.inputs, self.gates, self.layers[layer], self.rows, self.out, pdl)
        return self.out


STEPS = [
    *(StepCase(batch, rows) for batch in (1, 8, 32, 128) for rows in (1, 4)),
    *(StepCase(batch, rows=16, tree=True) for batch in (1, 8, 32)),
    *(StepCase(32, due=True), StepCase(32, rows=4, crossing=True), StepCase(8, 16, True, crossing=True)),
]
PROMPTS = [(1, 1024), (1, 4096), (4, 1024), (1, 32768)]


BLOCKS, SOLVERS = (32, 64), (1, 2)


def recipe() -> None:
    """All that is launched here but for the smallest kernels, so that it is compiled by many processes."""
    for rows, tree in ((1, False), (4, False), (16, False), (16, True)):
        step = Step(StepCase(2, rows, tree), 1, "meta")
        for pdl in (False, True):
            step.recur(0, pdl)
    for block in BLOCKS:
        with patch.object(prompts, "_BLOCK", block):
            _prompt(1, 256, "meta")()
    for warps in SOLVERS:
        with patch.object(prompts, "_SOLVERS", warps):
            _prompt(1, 256, "meta")()


def check_rows(device: str) -> Iterator[Record]:
    """Against the recurrence, and bit by bit."""
    whole = Scene(SHAPE, 2, torch.bfloat16, width=16)
    [expected] = whole.step([Piece(0, list(range(200)))], prompt=True, twin=False)
    rows = DeltaRows(whole.inputs[:200], *whole.gates[:200].chunk(2, 1))
    start = DeltaState.empty(SHAPE, 1, torch.bfloat16, device)
    for rule in (RoundedRule(SHAPE, whole.rule.filters), whole.rule):
        error = error_of(expected, rule.run(start, rows, range(-1, 199)).flatten(1))
        yield {"check": f"a prompt against {type(rule).__name__}", "error": error, "ok": error < 0.01}
    found, pieces = [], Scene(SHAPE, 2, torch.bfloat16, width=16)
    for first, count in ((0, 7), (7, 50), (57, 66)):
        others = [
            Piece(1, list(range(300 + first, 303 + first))),
            Piece(0, list(range(first, first + count))),
        ]
        found.append(pieces.step(others, prompt=True, twin=False)[1])
    found += [pieces.step([Piece(0, [row])], twin=False)[0] for row in range(123, 200)]
    yield _same("pieces and single rows", torch.cat(found), expected)
    chains = Scene(SHAPE, 2, torch.bfloat16, width=16)
    chains.step([Piece(0, list(range(123))), Piece(1, list(range(9)))], prompt=True, twin=False)
    both = [Piece(1, [8, 9]), Piece(0, list(range(123, 139)), certain=0)]
    yield _same("a chain", chains.step(both, twin=False)[1], expected[123:139])
    path = [0, 2, 5, 9, 13]
    tokens = list(range(400, 416))
    for depth, node in enumerate(path):
        tokens[node] = 123 + depth
    [tree] = chains.step([Piece(0, tokens, TREE, certain=0)], twin=False)
    yield _same("a tree", tree[path], expected[123:128])
    chains.accept(0, 123, path)
    last = [chains.step([Piece(0, [row])], twin=False)[0] for row in range(128, 200)]
    yield _same("rows behind a tree", torch.cat(last), expected[128:])
    for scene in (pieces, chains):
        yield _same("a state", scene.layer.states[0], whole.layer.states[0])


def _same(name: str, found: torch.Tensor, expected: torch.Tensor) -> Record:
    different = int((found != expected).sum())
    return {"check": name, "different": different, "of": found.numel(), "ok": different == 0}


def time_steps() -> Iterator[Record]:
    for case in STEPS:
        step = Step(case, 6 if case.batch > 32 else 12 if case.batch > 8 else LAYERS)
        us = graph_us([partial(step.recur, layer) for layer in range(len(step.layers))])
        floor = case.floor_bytes / COPY_BYTES_PER_US
        every = (case.floor_bytes + case.row_bytes) / COPY_BYTES_PER_US
        record = {"time": case.name, "us": us, "states_us": floor, "bytes_us": every, "over": us / every}
        yield record | {"of_model_ms": us * LAYERS / 1e3}


def time_kernels() -> Iterator[Record]:
    """Each kernel of a prompt of 4,096 rows."""
    for warps in SOLVERS:
        with patch.object(prompts, "_SOLVERS", warps):
            run_once = _prompt(1, 4096)
            run_once()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(3):
                    run_once()
                torch.cuda.synchronize()
            for kernel in seen.key_averages():
                yield {"kernel": kernel.key[:40], "solvers": warps, "us": kernel.device_time_total / 3}


def time_prompts() -> Iterator[Record]:
    """By a queue of launches, as prompts run."""
    for sequences, count in PROMPTS:
        for block in BLOCKS:
            with patch.object(prompts, "_BLOCK", block):
                us = queue_us([_prompt(sequences, count)])
            products = SHAPE.inputs + SHAPE.value_heads * SHAPE.value_size
            bytes_us = sequences * count * 2 * products / COPY_BYTES_PER_US
            record = {
                "time": f"{sequences} prompts of {count}",
                "block": block,
                "us": us,
                "bytes_us": bytes_us,
            }
            yield record | {"of_model_ms": us * LAYERS / 1e3}


def _prompt(sequences: int, count: int, device: str = "cuda") -> Any:
    step = Step(StepCase(sequences, count), 1, device)
    numbers = torch.arange(sequences * count, device=device, dtype=torch.int32) % count
    zero = torch.zeros_like(step.rows.starts)
    ends = zero + count // SPAN * SPAN
    rows = StateRows(
        step.rows.slots, step.rows.firsts, step.rows.counts, zero, zero, ends, numbers - 1, numbers, count
    )
    chunks = Chunks.of([0] * sequences, [count] * sequences, device)
    return partial(recur_chunks, step.inputs, step.gates, step.layers[0], rows, chunks, step.out)


def time_beside() -> Iterator[Record]:
    """Gates, and the norm behind."""
    heads, width = SHAPE.value_heads, SHAPE.value_heads * SHAPE.value_size
    gain = torch.ones(SHAPE.value_size, device="cuda")
    bias = torch.zeros(heads, device="cuda")
    for m in (1, 32, 128, 4096):
        steps = torch.randn(m, heads, device="cuda", dtype=torch.bfloat16)
        made = torch.randn(m, width, device="cuda", dtype=torch.bfloat16)
        us = graph_us([partial(rule_gates, (steps, steps), bias, bias, SHAPE, True)] * LAYERS)
        yield {"time": f"gates of {m} rows", "us": us}
        us = graph_us([partial(gated_norm, made, made, gain, 1e-6, True)] * LAYERS)
        yield {"time": f"norm of {m} rows", "us": us, "bytes_us": m * width * 6 / COPY_BYTES_PER_US}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    began = time.monotonic()
    compiled = KernelWarmup("tests.gpu.time_states:recipe", (), 90, os.cpu_count() or 1).wait()
    print(f"{compiled.kernels} kernels in {time.monotonic() - began:.0f} s", flush=True)
    parts = {
        "rows": partial(check_rows, "cuda"),
        "steps": time_steps,
        "kernels": time_kernels,
        "prompts": time_prompts,
        "beside": time_beside,
    }
    with asked.out.open("a") as file, torch.inference_mode():

        def say(record: Record) -> None:
            text = record.pop("traceback", None)
            print(json.dumps(record) if text is None else text, flush=True)
            print(json.dumps(record | ({"traceback": text} if text else {})), file=file, flush=True)

        fine = run(parts, say, began + 85)
        say({"verdict": "PASS" if fine else "FAIL"})
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
