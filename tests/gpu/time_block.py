"""Where the time of a round with a block of drafts goes on one GPU: whole captured steps, and without parts.

    python -m tests.gpu.time_block --out FILE [--heads block ids32k int4 peagle chain3] [--batches 1 8 32]

Milliseconds of a replayed step, 700 rows of context a sequence, drafts accepted by chance: blocks of 8 (a
DFlash head, 7 drafts, with the target's output head or one of 32,000 ids, and that with its layers in four
bits) at 5.0 tokens a round, a P-EAGLE head of four layers that drafts as many, and the EAGLE-3 chain of 3 at
3.0 that they stand beside. Each also without what it drafts, and so without the rows that the head keeps. A
token takes a step over the tokens of a round. `--drafts`: fewer than a block has, of which no more are then
accepted: how far a depth that adapts goes where all behind is refused. `--device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eyas.bench import shapes
from eyas.bench.output import append_line
from eyas.common.config import SpeculationConfig
from eyas.engine.device.executor import WORDS
from eyas.engine.device.program import DeviceState, StepProgram
from eyas.engine.device.step import StepShape
from eyas.engine.loading.device_build import build_state
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.startup import EngineStart
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo
from eyas.engine.speculation.synthetic import resolve
from tests.gpu.exact_rig import GPTQ
from tests.gpu.steady import engine_config, going_on
from tests.gpu.time_chain import CONTEXT, REPLAYS, TURNS, mean_milliseconds, replayed

TARGETS = {"block": {1: 0.95, 8: 1.05, 32: 1.75}, "chain3": {1: 1.60, 32: 2.25}}  # ms a token, served


@dataclass(frozen=True)
class Head:
    """A head and its drafts. `write`: its folder, for a shape; `length`: tokens a round."""

    name: str
    steps: int
    length: float
    write: Callable[[shapes.ModelShape, Path], None]


def in_four_bits(shape: shapes.ModelShape, folder: Path) -> None:
    """The head of 32,000 ids with its layers in four bits."""
    shapes.write_block_head(shape, folder, draft_vocab=shape.draft_vocab)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | GPTQ))


def in_one_pass(shape: shapes.ModelShape, folder: Path) -> None:
    """A P-EAGLE head."""
    shapes.write_head(shape, folder)
    path = folder / "config.json"
    own = {"parallel_drafting": True, "ptd_token_id": 1, "num_depths": 7, "num_hidden_layers": 4}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))


HEADS = {
    "block": Head("block", 7, 5.0, shapes.write_block_head),
    "ids32k": Head("ids32k", 7, 5.0, lambda s, f: shapes.write_block_head(s, f, draft_vocab=s.draft_vocab)),
    "int4": Head("int4", 7, 5.0, in_four_bits),
    "peagle": Head("peagle", 7, 5.0, in_one_pass),
    "chain3": Head("chain3", 3, 3.0, shapes.write_head),
}


def state_of(device: str, shape: str, head: Head, folder: Path, most: int) -> DeviceState:
    """An engine's, kernels compiled, without the engine."""
    sizes = shapes.SHAPES[shape]
    shapes.write_model(sizes, folder / "model")
    head.write(sizes, folder / head.name)
    rates = resolve(head.steps, (), head.length)
    spec = SpeculationConfig(head.steps, 1, head.steps + 1, synthetic_rates=rates)
    sizes_of = {"context_length": 1024, "max_running": most, "num_pages": most * 64, "chunk_tokens": 64}
    folders = {"model": str(folder / "model"), "draft": str(folder / head.name)}
    config = engine_config(device, speculation=spec, **folders, **sizes_of)
    start = EngineStart.of(config)
    loaded, ranks = EngineSpec.of(config, epoch=1), ProcessGroup(RankInfo(), config.device)
    state = build_state(loaded, ranks, start.phases)[1]
    start.wait_for_kernels()
    return state


def settle(state: DeviceState, steps: int, batch: int) -> None:
    """Sequences in the first slots, with pages and a context."""
    tables, context = state.tables, CONTEXT["cpu" if state.device == "cpu" else "cuda"]
    order = torch.arange(batch * 64, dtype=torch.int32).view(batch, 64)[:, : tables.pages.shape[1]]
    tables.pages[:batch, : order.shape[1]].copy_(order)
    tables.length[:batch] = context
    tables.root[:-1], tables.speculative[:-1] = 1, steps
    tables.drafts[:batch, :steps] = 1


def captured(state: DeviceState, head: Head, batch: int, *, drafting: bool) -> Callable[[], None]:
    """What runs the step once."""
    settle(state, head.steps, batch)
    whole = replace(state, lookup=None, drafter=state.drafter if drafting else None)
    inputs, results = (torch.zeros(WORDS, dtype=torch.int32, device=state.device) for _ in range(2))
    program = StepProgram(whole, StepShape(batch, head.steps + 1), inputs, results)
    program.blank()
    slots = torch.arange(batch, dtype=torch.int32, device=state.device)
    program._part["slots"].copy_(slots)
    program._part["sampled_slots"].copy_(slots.repeat_interleave(head.steps + 1))

    def step() -> None:
        settle_lengths(state, batch)
        program.forward()
        program.rest(program.choose())

    return replayed(step, state.device)


def settle_lengths(state: DeviceState, batch: int) -> None:
    """The context is as long in every replay."""
    state.tables.length[:batch].fill_(CONTEXT["cpu" if state.device == "cpu" else "cuda"])


def milliseconds(state: DeviceState, run: Callable[[], None]) -> float:
    """Of one run, the mean of several in a row."""
    if state.device != "cpu":
        run()
    return mean_milliseconds(run, state.device, REPLAYS)


def kernels(run: Callable[[], None]) -> Iterator[str]:
    """Microseconds of the kernels of a run, those of a name together, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[:30]:
        yield f"  {event.device_time_total:8.1f} us in {event.count:4d}: {event.key[:90]}"


def measured(state: DeviceState, head: Head, batch: int, *, profiled: bool) -> Iterator[dict[str, Any]]:
    """With drafts and without, in turn."""
    ways = {"drafts": True, "no drafts": False}
    runs = {name: captured(state, head, batch, drafting=drafting) for name, drafting in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            settle(state, head.steps, batch)
            times[name].append(milliseconds(state, run))
    for name, found in times.items():
        ms = statistics.median(found)
        yield {"head": head.name, "batch": batch, "way": name, "ms": round(ms, 4), "token": ms / head.length}
        if profiled:
            print(*kernels(runs[name]), sep="\n", flush=True)


def said(line: dict[str, Any]) -> str:
    """One line of results."""
    wanted = TARGETS.get(line["head"], {}).get(line["batch"], "-")
    figures = f"{line['ms']:.3f} ms, {line['token']:.3f} per token (served, wanted: {wanted})"
    return f"{line['head']} bs{line['batch']} {line['way']}: {figures}"


@torch.inference_mode()
def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=list(CONTEXT), default="cuda")
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="llama-3.1-8b")
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, metavar="N", help="(all that a head has)")
    parser.add_argument("--profile", action="store_true", help="the kernels of each step too")
    given = parser.parse_args()
    for name in given.heads:
        head = HEADS[name]
        if (drafts := given.drafts or head.steps) < head.steps:
            head = replace(
                head, name=f"{name} by {drafts}", steps=drafts, length=min(head.length, drafts + 1)
            )
        with tempfile.TemporaryDirectory() as folder:
            state = state_of(given.device, given.shape, head, Path(folder), max(given.batches))
            for batch in given.batches:
                with going_on(f"{name}, batch {batch}"):
                    for line in measured(state, head, batch, profiled=given.profile):
                        append_line(given.out, line)
                        print(said(line), flush=True)
        del state
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
