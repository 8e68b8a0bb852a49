"""Where the time of a round of chains goes on one GPU: whole captured steps, with and without parts of them.

    python -m tests.gpu.time_chain --out FILE [--shape llama-3.1-8b] [--batches 1 8 32]

Milliseconds of a replayed step, 700 rows of context a sequence, chains of 3 that are accepted by chance at
3.0 tokens per round: as they are served; with fewer drafting steps, without the lookup, without drafting at
all, and plain. A token takes a step over 3.0; what lies between tokens (sending, receiving) comes on top.
`--device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eyas.bench.output import append_line
from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.engine.device.executor import WORDS
from eyas.engine.device.program import DeviceState, StepProgram
from eyas.engine.device.step import StepShape
from eyas.engine.loading.device_build import build_state
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.startup import EngineStart
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo
from eyas.engine.speculation.synthetic import resolve
from tests.gpu.lines import lines_of
from tests.gpu.steady import TINY, engine_config, going_on, shape_folders

STEPS, LENGTH = 3, 3.0
CONTEXT = {"cuda": 700, "cpu": 5}
REPLAYS, TURNS = 20, 3
WHOLE = "chain of 3"


@dataclass(frozen=True)
class Way:
    """A variant of the step. `drafting`: steps of the head (None: there is no head)."""

    name: str
    width: int = STEPS + 1
    drafting: int | None = STEPS
    lookup: bool = True


WAYS = (
    Way(WHOLE),
    Way("no lookup", lookup=False),
    Way("2 steps", drafting=2, lookup=False),
    Way("1 step", drafting=1, lookup=False),
    Way("no head", drafting=None, lookup=False),
    Way("plain", width=1, drafting=None, lookup=False),
)


def state_of(device: str, folders: tuple[Path, Path], most: int) -> DeviceState:
    """An engine's, kernels compiled, without the engine."""
    spec = SpeculationConfig(STEPS, 1, STEPS + 1, synthetic_rates=resolve(STEPS, (), LENGTH))
    config: EngineConfig = engine_config(
        device, model=str(folders[0]), draft=str(folders[1]), context_length=2048, max_running=most,
        num_pages=most * 128, speculation=spec, chunk_tokens=64,
    )  # fmt: skip
    start = EngineStart.of(config)
    loaded, ranks = EngineSpec.of(config, epoch=1), ProcessGroup(RankInfo(), config.device)
    state = build_state(loaded, ranks, start.phases)[1]
    start.wait_for_kernels()
    return state


def settle(state: DeviceState, batch: int) -> None:
    """Sequences in the first slots, with pages and a context."""
    tables, context = state.tables, CONTEXT["cpu" if state.device == "cpu" else "cuda"]
    pages = tables.pages[:-1]
    order = torch.arange(batch * 128, dtype=torch.int32).view(batch, 128)[:, : pages.shape[1]]
    pages[:batch, : order.shape[1]].copy_(order)
    tables.length[:batch] = context
    tables.root[:-1], tables.speculative[:-1] = 1, STEPS
    tables.drafts[:batch, :STEPS] = 1
    tables.looking[:batch, 0] = context  # ids of the prompt


def program_of(state: DeviceState, way: Way, batch: int) -> StepProgram:
    """With nothing but rounds of these sequences."""
    shape = StepShape(batch, way.width)
    inputs, results = (torch.zeros(WORDS, dtype=torch.int32, device=state.device) for _ in range(2))
    program = StepProgram(state, shape, inputs, results)
    program.blank()
    slots = torch.arange(batch, dtype=torch.int32, device=state.device)
    program._part["slots"].copy_(slots)
    program._part["sampled_slots"].copy_(slots.repeat_interleave(way.width))
    return program


def variant(state: DeviceState, way: Way) -> DeviceState:
    """Its state; the drafter's steps are those of the way until the next variant is made."""
    if way.drafting is not None:
        assert state.drafter is not None
        spec = state.drafter._specs[STEPS + 1]
        state.drafter._specs[STEPS + 1] = replace(spec, steps=way.drafting)
    drafter, lookup = (part if kept else None for part, kept in (
        (state.drafter, way.drafting is not None), (state.lookup, way.lookup),
    ))  # fmt: skip
    return replace(state, drafter=drafter, lookup=lookup)


def captured(state: DeviceState, way: Way, batch: int) -> Callable[[], None]:
    """What runs the step once."""
    program = program_of(variant(state, way), way, batch)

    def step() -> None:
        program.forward()
        program.rest(program.choose())

    return replayed(step, state.device)


def replayed(step: Callable[[], None], device: str) -> Callable[[], None]:
    """What runs a step once: its CUDA graph, or the step itself on a CPU. It has run before."""
    step()
    if device == "cpu":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return lambda: graph.replay()


def milliseconds(state: DeviceState, run: Callable[[], None], batch: int, replays: int) -> float:
    """Of one run, the mean of several in a row."""
    settle(state, batch)
    run()
    settle(state, batch)
    return mean_milliseconds(run, state.device, replays)


def mean_milliseconds(run: Callable[[], None], device: str, replays: int) -> float:
    """Of `replays` runs in a row; on a CPU, of one."""
    if device == "cpu":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / replays


def measured(state: DeviceState, batch: int) -> Iterator[dict[str, Any]]:
    """Every way at this batch, those in turn that are compared."""
    settle(state, batch)
    runs = {}
    for way in WAYS:
        with going_on(f"{way.name}, batch {batch}"):
            settle(state, batch)
            runs[way.name] = captured(state, way, batch)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            times[name].append(milliseconds(state, run, batch, REPLAYS))
    for name, found in times.items():
        yield {"batch": batch, "way": name, "ms": round(statistics.median(found), 4), "all": found}


def report(lines: list[dict[str, Any]]) -> Iterator[str]:
    """A row per batch."""
    for batch in sorted({line["batch"] for line in lines}):
        ms = {line["way"]: line["ms"] for line in lines if line["batch"] == batch}
        yield f"bs{batch}: " + ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items())
        if WHOLE in ms:
            yield f"  {ms[WHOLE] / LENGTH:.3f} ms per token"


@torch.inference_mode()
def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=list(CONTEXT), default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    given = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        shape = given.shape if given.device == "cuda" else TINY
        state = state_of(given.device, shape_folders(shape, Path(folder)), max(given.batches))
        for batch in given.batches:
            with going_on(f"batch {batch}"):
                for line in measured(state, batch):
                    lines.append(line)
                    append_line(given.out, line)
                print(*report([line for line in lines if line["batch"] == batch]), sep="\n", flush=True)
    print(*report(lines_of(given.out)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
