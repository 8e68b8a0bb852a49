"""Whole engines of hybrids' shapes on one GPU: steps, prompts, an MTP layer, an agent's turns, exact rows.

    python -m tests.gpu.time_hybrids --out FILE [--shapes qwen3.5-27b] [--ways plain mtp] [--parts steps]

Dummy weights. A way is an engine in a process of its own, for which tiles are searched once, as a first
start does, and whose kernels are compiled before, all ways side by side: `plain`, with uniform routing;
`mtp`, whose drafts are accepted by chance, 2.5 tokens per round; `routed`, plain with the routers' own
choices; `exact`, the same in exact arithmetic. Parts: `steps`, milliseconds per token at 1, 32 and 128
sequences beside the floor, the bytes of the weights that a step touches, and of states read and written,
over 4.3 TB/s; `prompts`, tokens per second of 4,096 and 32,760, and their products as a share of 700
TFLOP/s, without and with those of attention; `agent`, the time to the first token of 40 turns, 95 % of each
of which are the turn before, with what is cached and without; `profile`, the kernels of steps, and of
prompts and of a turn by --loads p4k p32k turn.
FILE gets a line of JSON whenever something is known, ratios between ways last.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from eyas.bench.shapes import ModelShape
from eyas.common.config import EngineConfig, SpeculationConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.loading.first_tiles import search_first
from eyas.engine.loading.startup import EngineStart, StartPhases
from eyas.engine.models.table import read_model
from eyas.engine.speculation.synthetic import resolve
from tests.gpu.exact_cost import Load, Timed
from tests.gpu.lines import lines_of, say
from tests.gpu.time_shapes import SMALL, Shape, kernels, launched, mixing_numbers, most_time, written
from tests.gpu.ways import run_way, run_ways

STEPS, LENGTH = 2, 2.5  # of an MTP layer: drafts in a row, tokens per round
FLOPS = 700e12
TURNS, SHARED, NEW = 40, 0.95, 8
WAYS = ("plain", "mtp", "routed", "exact")
PARTS = ("steps", "prompts", "agent", "profile")
LOADS = (Load("bs1", 128, 256, 1, 1), Load("bs32", 128, 256, 32, 32), Load("bs128", 128, 256, 128, 128))
PROMPTS = (Load("p4k", 4096, 1, 12, 4, per_second=True), Load("p32k", 32760, 1, 2, 1, per_second=True))


def _qwen(kind: str, sizes: ModelShape, value_heads: int, experts: tuple[int, int] | None = None) -> Shape:
    """A shape with heads of 256, and states of 128 by 128; `experts`: how many, and how many a row takes."""
    stated: dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": {"Qwen3Next": "qwen3_next", "Qwen3_5Moe": "qwen3_5_moe", "Qwen3_5": "qwen3_5"}[kind],
        "rope_scaling": None,
        "rope_theta": 1e7,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "mtp_num_hidden_layers": 1,
    }
    if experts is not None:
        stated |= {"num_experts": experts[0], "num_experts_per_tok": experts[1]}
        stated |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    return Shape(replace(sizes, head_dim=256), stated)


SHAPES = {
    "qwen3-next-80b-24": _qwen("Qwen3Next", ModelShape(2048, 5120, 24, 16, 2, vocab=151936), 32, (512, 10)),
    "qwen3.5-35b-a3b": _qwen("Qwen3_5Moe", ModelShape(2048, 5120, 40, 16, 2, vocab=248320), 32, (256, 8)),
    "qwen3.5-27b": _qwen("Qwen3_5", ModelShape(5120, 17408, 64, 24, 4, vocab=248320), 48),
}
"""Of the first, whose weights are larger than a GPU, half of the layers."""

TINY = {"num_experts": 8, "linear_num_value_heads": 16, "num_experts_per_tok": 2}


def config_of(args: argparse.Namespace, way: str, folder: str) -> EngineConfig:
    """Of one engine. On a CPU plain torch, which is always exact."""
    options: dict[str, Any] = {"max_running": args.running, "num_pages": args.pages}
    options["context_length"] = 40960
    if args.small:
        options |= {"max_running": 4, "num_pages": 512, "context_length": 2048}
    if args.chunk:
        options["chunk_tokens"] = args.chunk
    if way == "mtp":
        spec = SpeculationConfig(
            steps=STEPS, draft_tokens=STEPS + 1, synthetic_rates=resolve(STEPS, (), LENGTH)
        )
        options |= {"draft": folder, "speculation": spec}
    if args.device != "cpu":
        options |= {"cuda_graph_bs": tuple(sorted({1, 4, 32, args.running}))}
        options |= {"uniform_experts": way in ("plain", "mtp"), "deterministic": way == "exact"}
    usual: dict[str, Any] = {"draft": None, "load_format": "dummy", "worker": "unified", "transfer": "none"}
    return resolve_engine(args.device, model=folder, **usual | options)


def steps(engine: Timed, shape: Shape, config: ModelConfig, args: argparse.Namespace) -> Iterator[Any]:
    """Milliseconds per token; a request that drafts has several a step."""
    for load in LOADS:
        if load.name in args.loads:
            load = replace(load, prompt=40, answer=8, count=2, at_once=2) if args.small else load
            first, figure = (round(engine.measured(load, seed), 4) for seed in (1, 2))
            ms = shape.floor_ms(config, load.at_once)
            floor = {"floor ms": round(ms, 4), "times": round(figure / ms, 3)}
            yield {"load": load.name, "ms": figure, "the first time": first, **floor}


def prompts(engine: Timed, shape: Shape, config: ModelConfig, args: argparse.Namespace) -> Iterator[Any]:
    numbers = sum(
        mixing_numbers(layer, config.hidden_size)
        + 3
        * config.hidden_size
        * (
            layer.feed_forward.width * layer.feed_forward.per_row + layer.feed_forward.shared_width
            if isinstance(layer.feed_forward, ExpertsSpec)
            else layer.feed_forward.width
        )
        for layer in config.layers
    )
    for load in PROMPTS:
        load = replace(load, prompt=load.prompt // 64, count=2, at_once=2) if args.small else load
        first, figure = (round(engine.measured(load, load.prompt + seed), 1) for seed in (3, 4))
        pairs = load.prompt / 2 * sum(layer.delta is None for layer in config.layers)  # of a row
        attention = 4 * shape.sizes.heads * shape.sizes.head_dim * pairs
        shares = [figure * flops / FLOPS for flops in (2 * numbers, 2 * numbers + attention)]
        line = {"load": load.name, "tokens/s": figure, "the first time": first}
        yield line | {"share of products": round(shares[0], 3), "with attention": round(shares[1], 3)}


def agent(engine: Timed, shape: Shape, config: ModelConfig, args: argparse.Namespace) -> Iterator[Any]:
    """Prompts that grow by a twentieth; with nothing cached each begins with another token: of these
    every fifth is asked, since all of them take long.
    """
    medians = {}
    for cached in (True, False):
        dice, times = random.Random(5), []
        draw = partial(dice.randrange, 10, config.vocab_size - 300)
        text = [draw() for _ in range(40 if args.small else 4096)]
        for turn in range(4 if args.small else TURNS):
            params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
            prompt, answer = text if cached else [draw(), *text[1:]], text[:NEW]
            if cached or args.small or turn % 5 == 0:
                request = GenerationRequest(f"agent {cached} {turn}", tuple(prompt), params)
                seconds, answer = engine.answered(request)
                times.append(1e3 * seconds)
            text = text + answer
            text += [draw() for _ in range(max(int(len(text) * (1 / SHARED - 1)) - NEW, 1))]
        medians[cached] = statistics.median(times[1:])
        how = {"load": "agent", "cached": cached, "turns": len(times), "last prompt": len(text)}
        yield how | {"ttft p50 ms": round(medians[cached], 2), "last ms": round(times[-1], 2)}
    yield {"load": "agent", "times faster": round(medians[False] / medians[True], 2)}


def profiles(engine: Timed, shape: Shape, config: ModelConfig, args: argparse.Namespace) -> Iterator[Any]:
    """Of a step; of a prompt; and of a turn that goes on from a cached state, by 600 tokens up to its first
    one.
    """
    if args.device == "cpu":
        return
    for load in LOADS:
        if load.name in args.loads:
            yield from ({"load": load.name, **line} for line in kernels(engine, load))
    for load in PROMPTS:
        if load.name in args.loads:
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                rate = engine.measured(replace(load, count=load.at_once), load.prompt + 8)
            ms = load.at_once * (load.prompt + load.answer) / rate * 1e3
            yield {"load": load.name, "prompts": load.at_once, **busy(seen, ms)}
            yield from ({"load": load.name, **line} for line in most_time(seen, load.at_once))
    if "turn" in args.loads:
        dice, params = random.Random(9), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        text = [dice.randrange(10, config.vocab_size - 300) for _ in range(13200)]
        for number, end in enumerate((12000, 12600)):
            engine.answered(GenerationRequest(f"before {number}", tuple(text[:end]), params))
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            seconds, _ = engine.answered(GenerationRequest("turn", tuple(text), params))
        yield {"turn": busy(seen, 1e3 * seconds)}
        yield from ({"load": "turn", **line} for line in most_time(seen, 1))


def busy(seen: profile, ms: float) -> dict[str, float]:
    """Of what took `ms` on the host: the time of kernels, and from the first one's begin to the last one's
    end.
    """
    every = launched(seen)
    spent = sum(event.time_range.elapsed_us() for event in every)
    edges = [edge for e in every for edge in (e.time_range.start, e.time_range.end)] or [0]
    whole = {"ms": round(ms, 1), "kernels ms": round(spent / 1e3, 1), "launches": len(every)}
    return whole | {"first to last ms": round((max(edges) - min(edges)) / 1e3, 1)}


DO = dict(zip(PARTS, (steps, prompts, agent, profiles), strict=True))


def measure(args: argparse.Namespace) -> None:
    """One way of one shape, in this process."""
    began, [name], [way] = time.monotonic(), args.shapes, args.ways
    logging.basicConfig(level=logging.INFO)
    config = config_of(args, way, args.folder)
    search_first(config, StartPhases())
    EngineStart.of(config).wait_for_kernels()
    if args.compile:
        return
    engine, about = Timed(config), {"shape": name, "way": way}
    memory = round(torch.cuda.memory_allocated() / 1e9, 1) if args.device != "cpu" else 0
    say(args.out, about | {"ready s": round(time.monotonic() - began, 1), "GB": memory})
    model = read_model(Path(args.folder), load_format="dummy")
    for part in args.parts:
        if part in ("steps", "profile") or way == "plain" or (part == "prompts" and way != "mtp"):
            for line in DO[part](engine, SHAPES[name], model, args):
                say(args.out, about | line)
    sys.stdout.flush()
    os._exit(0)


def ratios(out: Path) -> Iterator[dict[str, Any]]:
    """Plain over MTP in time, and exact over fast."""
    lines = lines_of(out)
    found = {(line["shape"], line["way"], line["load"]): line for line in lines if "ms" in line}
    found |= {(line["shape"], line["way"], line["load"]): line for line in lines if "tokens/s" in line}
    for (shape, way, load), line in found.items():
        for base, other, what in (("plain", "mtp", "times faster"), ("routed", "exact", "time over fast")):
            before = found.get((shape, base, load))
            if way == other and before is not None and "ms" in line:
                pair = (before, line) if other == "mtp" else (line, before)
                yield {"shape": shape, "load": load, what: round(pair[0]["ms"] / pair[1]["ms"], 3)}
            elif way == other and before is not None:
                yield {"shape": shape, "load": load, what: round(before["tokens/s"] / line["tokens/s"], 3)}


def command(args: argparse.Namespace, shape: str, way: str, folder: str) -> list[str]:
    words = [sys.executable, "-m", "tests.gpu.time_hybrids", "--out", str(args.out), "--folder", folder]
    words += ["--shapes", shape, "--ways", way, "--device", args.device, "--pages", str(args.pages)]
    words += ["--running", str(args.running), "--chunk", str(args.chunk)]
    return [*words, "--parts", *args.parts, "--loads", *args.loads, *["--small"] * args.small]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3.5-35b-a3b"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["plain", "mtp"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["steps", "prompts", "agent"])
    parser.add_argument("--loads", nargs="+", default=["bs1", "bs32", "bs128"])
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything (%(default)g)")
    parser.add_argument("--device", default="cuda", help="cpu: plain torch, to try the script")
    parser.add_argument("--layers", type=int, default=0, help="of a model, a multiple of 4 (0: all)")
    parser.add_argument("--small", action="store_true", help="small matrices and loads, to try it")
    parser.add_argument("--pages", type=int, default=8000)
    parser.add_argument("--running", type=int, default=128, help="requests at once, at most (%(default)d)")
    parser.add_argument("--chunk", type=int, default=0, help="rows of a step with prompts (the engine's own)")
    parser.add_argument("--folder", help="one way alone, in this process")
    parser.add_argument("--compile", action="store_true", help="only kernels")
    args = parser.parse_args()
    if args.folder:
        run_way(measure, args)
        return 0
    ends_at = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        commands = []
        for name in args.shapes:
            written(SHAPES[name], Path(folder, name), args.layers, small=args.small, sizes=SMALL | TINY)
            commands += [command(args, name, way, str(Path(folder, name))) for way in args.ways]
        failed = run_ways(commands, ends_at, args)
    for line in ratios(args.out) if args.out.exists() else ():
        say(args.out, line)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
