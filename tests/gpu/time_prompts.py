"""Prompts by whole engines on one GPU, beside the floors of their products and of attention.

    python -m tests.gpu.time_prompts --out FILE [--shapes 8b 8b-fp8 rank8] [--ways fast exact] [--layers 20]

Dummy weights, uniform routing; `rank8` is one rank of eight of DeepSeek-V3. A way of a shape is an engine in
a process of its own, whose kernels are compiled before, all side by side. Prompts of --rows tokens follow
each other, each a step of its own unless steps have more rows: tokens per second; the floor, operations of
products over the rate of a product of 8,192 cubed on this machine, in bf16 or in FP8 blocks, and of attention
over 551 TFLOP/s (FlashAttention 3 on an H200); then the kernels by the time that they take of a layer. The
rate counts twice: of some products, and after a while of them, when a GPU draws all the power that it may,
as under prompts that follow each other. A line of JSON is in FILE as soon as it is known.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from eyas.bench.kernels.timing import graph_us
from eyas.bench.shapes import SHAPES as LLAMAS
from eyas.common.config import EngineConfig, resolve_engine
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.products import vendor
from eyas.engine.kernels.products.blocks import StoredWeight, quantise
from eyas.engine.loading.startup import EngineStart
from tests.gpu.answer_latent import SIZES, write_rank
from tests.gpu.exact_cost import Load, Timed
from tests.gpu.exact_rig import KINDS
from tests.gpu.lines import say
from tests.gpu.time_shapes import Shape, launched, most_time, written
from tests.gpu.ways import run_way, run_ways

ATTENTION_FLOPS = 551e12
SIDE = 8192  # of the product whose rate the floors take
LONG_S = 1.0  # of products, whose rate is then what power leaves
WAYS = ("fast", "exact")
AT_ONCE = 8


@dataclass(frozen=True)
class Prompted:
    """A model. `layers`: of the whole one; `numbers`: that a row meets in a layer's products; `each`:
    operations of attention for a pair of rows, in a layer; `write`: a folder of as many layers.
    """

    layers: int
    numbers: int
    each: int
    fp8: bool
    write: Callable[[Path, int, bool], None]

    def floor_ms(self, rows: int, layers: int, flops: float) -> tuple[float, float]:
        """Of products, and of attention."""
        products = 2 * self.numbers * rows * layers / flops
        return 1e3 * products, 1e3 * self.each * rows * (rows + 1) / 2 * layers / ATTENTION_FLOPS


def _llama(kind: str) -> Prompted:
    sizes = LLAMAS["llama-3.1-8b"]
    heads = 2 * (sizes.heads + sizes.kv_heads) * sizes.head_dim
    numbers = sizes.hidden * (heads + 3 * sizes.intermediate)
    shape = Shape(sizes, KINDS[kind])

    def write(folder: Path, layers: int, small: bool) -> None:
        written(shape, folder, layers, small=small)

    return Prompted(sizes.layers, numbers, 4 * sizes.heads * sizes.head_dim, kind == "fp8", write)


def _rank() -> Prompted:
    """All layers count as if they had experts."""
    hidden, heads, latent = 7168, SIZES["num_attention_heads"], SIZES["kv_lora_rank"]
    mixing = hidden * (1536 + latent + 64) + heads * (1536 * 192 + latent * 256 + 128 * hidden)
    experts = 3 * hidden * SIZES["moe_intermediate_size"] * (SIZES["num_experts_per_tok"] + 1)

    def write(folder: Path, layers: int, _small: bool) -> None:
        write_rank(folder, layers)

    return Prompted(61, mixing + experts + hidden * 256, 2 * heads * (192 + 128), True, write)


SHAPES = {"8b": _llama("dense"), "8b-fp8": _llama("fp8"), "rank8": _rank()}


def idle(seen: profile) -> Iterator[dict[str, Any]]:
    """From the first launch to the last, how long the GPU did nothing; and its longest pauses."""
    events = launched(seen)
    pauses, last = [], events[0]
    for event in events[1:]:
        pauses.append((event.time_range.start - last.time_range.end, last.name[:40], event.name[:40]))
        last = max(last, event, key=lambda each: each.time_range.end)
    waited = sum(max(us, 0) for us, *_ in pauses)
    span = last.time_range.end - events[0].time_range.start
    yield {"first to last ms": round(span / 1e3, 2), "idle ms": round(waited / 1e3, 2)}
    for us, before, after in sorted(pauses, reverse=True)[:6]:
        yield {"idle us": round(us, 1), "behind": before, "before": after}


def config_of(args: argparse.Namespace, way: str, folder: str) -> EngineConfig:
    """Of one engine. On a CPU plain torch, which is always exact."""
    options: dict[str, Any] = {}
    if args.device != "cpu":
        options = {
            "prefill_attention_backend": args.prompts,
            "uniform_experts": way == "fast",
            "cuda_graph_bs": (1, AT_ONCE),
        }
        options |= {"deterministic": way == "exact"}
    chunk, pages = args.chunk or args.rows, (AT_ONCE + 2) * (args.rows // 16 + 2)
    return resolve_engine(
        args.device, model=folder, draft=None, load_format="dummy", worker="unified", transfer="none",
        context_length=args.rows + 64, chunk_tokens=chunk, max_running=AT_ONCE, mixed_tokens=0,
        num_pages=pages, **options,
    )  # fmt: skip


def flops(fp8: bool) -> tuple[float, float]:
    """The rate of a product of `SIDE` cubed here: of some, and in the middle of a second of them."""
    x, weight = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product: Callable[[], torch.Tensor] = lambda: torch.mm(x, weight.t())  # noqa: E731
    if fp8:
        scales = torch.ones(SIDE // 128, SIDE // 128, device="cuda")
        stored = StoredWeight(weight.to(torch.float8_e4m3fn), scales, RowRounding("block"))
        rows = quantise(x, RowRounding("block"))
        product = lambda: vendor.product(rows, stored)  # noqa: E731
    some = graph_us([product] * 4)
    long = graph_us([product] * 4, int(LONG_S * 1e6 / (4 * some)))
    return 2e6 * SIDE**3 / some, 2e6 * SIDE**3 / long


def measure(args: argparse.Namespace) -> None:
    """One way of one shape, in this process."""
    began, [name], [way] = time.monotonic(), args.shapes, args.ways
    logging.basicConfig(level=logging.WARNING)
    config, shape, about = config_of(args, way, args.folder), SHAPES[name], {"shape": name, "way": way}
    EngineStart.of(config).wait_for_kernels()
    if args.compile:
        return
    on_gpu = args.device != "cpu"
    rate, long = flops(shape.fp8) if on_gpu else (1e12, 1e12)
    engine = Timed(config)
    rates = [round(each / 1e12) for each in (rate, long)]
    say(args.out, about | {"ready s": round(time.monotonic() - began, 1), "TFLOP/s": rates})
    load = Load("prompts", args.rows, 1, args.count, min(AT_ONCE, args.count), per_second=True)
    first, figure = (round(engine.measured(load, seed), 1) for seed in (1, 2))
    apart = engine.apart_ms()
    layers = args.layers or shape.layers
    floors = shape.floor_ms(args.rows, layers, rate)
    ms = 1e3 * (args.rows + 1) / figure
    line = {
        "rows": args.rows,
        "chunk": args.chunk or args.rows,
        "layers": layers,
        "tokens/s": figure,
        "the first time": first,
    }
    line |= {"ms": round(ms, 2), "us per layer": round(1e3 * ms / layers, 1)}
    line |= {"floor ms": [round(floor, 2) for floor in floors], "share": round(sum(floors) / ms, 3)}
    line |= {"share under power": round(sum(shape.floor_ms(args.rows, layers, long)) / ms, 3)}
    say(args.out, about | line | {"ms between first tokens": apart})
    if on_gpu and not args.bare:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            engine.measured(Load("profiled", args.rows, 1, 4, 4, per_second=True), 3)
        for line in idle(seen):
            say(args.out, about | line)
        for line in most_time(seen, 4 * layers):  # of a layer, in the mean
            say(args.out, about | line)
    sys.stdout.flush()
    os._exit(0)


def command(args: argparse.Namespace, shape: str, way: str, folder: str) -> list[str]:
    words = [sys.executable, "-m", "tests.gpu.time_prompts", "--out", str(args.out), "--folder", folder]
    words += ["--shapes", shape, "--ways", way, "--device", args.device, "--rows", str(args.rows)]
    words += ["--chunk", str(args.chunk), "--prompts", args.prompts]
    return [*words, "--layers", str(args.layers), "--count", str(args.count), *["--bare"] * args.bare]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["fast"])
    parser.add_argument("--rows", type=int, default=4096, help="of a prompt (%(default)d)")
    parser.add_argument("--chunk", type=int, default=0, help="rows of a step (0: those of a prompt)")
    parser.add_argument("--count", type=int, default=12, help="prompts that are timed (%(default)d)")
    parser.add_argument("--layers", type=int, default=0, help="of a model (0: all)")
    parser.add_argument("--prompts", choices=("triton", "cudnn", "flashinfer"), default="triton")
    parser.add_argument("--bare", action="store_true", help="no profile")
    parser.add_argument("--seconds", type=float, default=150.0, help="for everything (%(default)g)")
    parser.add_argument("--device", default="cuda", help="cpu: plain torch, to try the script")
    parser.add_argument("--small", action="store_true", help="small matrices, to try it")
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
            SHAPES[name].write(Path(folder, name), args.layers or SHAPES[name].layers, args.small)
            commands += [command(args, name, way, str(Path(folder, name))) for way in args.ways]
        return int(run_ways(commands, ends_at, args))


if __name__ == "__main__":
    sys.exit(main())
