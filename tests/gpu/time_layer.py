"""Where a decoding step's time goes on one GPU: whole captured forwards, and the same without each kernel.

    python -m tests.gpu.time_layer --out FILE [--layers 8] [--batches 1 8 32 128] [--context 768]

A few layers of one rank of eight of DeepSeek-V3, with dummy weights in FP8 blocks and uniform routing; more
than L2 holds, so that weights come from memory. A row's place alone chooses its experts: 9, 57, 161 and 249
of them at 1, 8, 32 and 128 sequences, whatever the last bits of its numbers are. Kernels overlap, so their
own durations say little; what a step saves when a kernel is left out is what it costs. Microseconds per
layer, a line of JSON for each. `--timeline`: when each kernel of a layer in the middle begins and ends
instead, and the microseconds between the end of the one before and its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch.profiler import ProfilerActivity, profile

from eyas.bench.kernels.timing import graph_us
from eyas.bench.output import append_line
from eyas.engine.attention.latent import PagedLatents
from eyas.engine.attention.rows import RowLimits
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.checkpoint.weights import DummyWeights, WeightPlacement
from eyas.engine.kernels.experts import (
    back_rounded,
    combine,
    combine_rounded,
    grouped,
    grouped_sweep,
    grouped_wide,
    route,
    scored_rows,
)
from eyas.engine.kernels.latent import latent_attend, latent_products, latent_query, latent_rows
from eyas.engine.kernels.products import blocks, few, single, skinny
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.ops.device_step import LayerContext
from eyas.engine.models.table import read_model
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo
from tests.gpu.answer_latent import write_rank

PAGE = 16
KERNELS = {
    "norm": [(row_kernels, "_norm")],
    "products": [
        (grouped, "product_kernel"),
        (grouped_wide, "_by_depth"),
        (grouped_sweep, "_sweep"),
        (few, "_few"),
        (single, "_products"),
        (single, "_back"),
        (back_rounded, "_back_rounded"),
        (latent_query, "_query"),
    ],
    "norms and kept row": [(latent_rows, "_write")],
    "into latents": [(latent_products, "_absorb")],
    "attention": [(latent_attend, "_attend")],
    "out of latents": [
        (latent_products, "_add_up"),
        (latent_products, "_values"),
        (latent_products, "_values_of_row"),
    ],
    "rounding": [(blocks, "_quantise")],
    "router": [(skinny, "linear_kernel"), (scored_rows, "_score")],
    "sum of experts": [(combine, "_combine"), (combine_rounded, "_combine_rounded")],
}
FIXED = {"choice": (route, "choose"), "order": (grouped, "group")}
"""What others read as addresses: in its place stands what it once said."""
Line = dict[str, Any]


@triton.jit
def by_place(logit, row):
    """In the place of `row_choice.by_chance`: a number that a row's place alone decides."""
    x = row.to(tl.uint32) * 0x9E3779B1 + 37
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return ((x ^ (x >> 16)) >> 1).to(tl.int32)


class Bench:
    """The model, a pool, and sequences that decode."""

    def __init__(self, layers: int, most: int, context: int, device: str = "cuda") -> None:
        self._context, self._layers, self._device = context, layers, device
        with tempfile.TemporaryDirectory() as folder:
            write_rank(Path(folder), layers)
            told = json.loads((Path(folder) / "config.json").read_text())
            (Path(folder) / "config.json").write_text(json.dumps(told | {"first_k_dense_replace": 0}))
            config = read_model(folder, "dummy")
        pages = -(-(context + 1) // PAGE)
        self._tables = torch.arange(most * pages, dtype=torch.int32, device=device).view(most, pages) + 1
        shape = PoolShape(config.kv_format, 1 + most * pages, PAGE, torch.bfloat16, device)
        on_gpu = device == "cuda"
        attention = PagedLatents(self._tables, config.num_heads, shape, RowLimits(most, 1), pdl=on_gpu)
        launch, group = skinny.ProductLaunch.on(device, pdl=on_gpu), ProcessGroup(RankInfo(), device)
        whole = LayerContext.on(device, config, group, launch, attention)
        weights = DummyWeights(placement=WeightPlacement(device, torch.bfloat16), quantized=config.quantized)
        self._model = Decoder(config, weights, DeviceMachine(replace(whole, uniform_experts=True)))
        self._pool = None if device == "meta" else KvPool(shape)

    def step(self, batch: int) -> Callable[[], object]:
        """A forward of as many sequences."""
        slots = torch.arange(batch, dtype=torch.int32, device=self._device)
        at = torch.full_like(slots, self._context)
        kept = self._tables[:batch, self._context // PAGE] * PAGE + self._context % PAGE
        rows = ForwardRows(slots * 7 + 11, at, kept.int(), DecodeRows(slots, at))
        return lambda: self._model.forward(rows, self._pool)

    def us(self, batch: int, without: str = "") -> float:
        """Of a layer."""
        with ExitStack() as stack:
            for module, name in KERNELS.get(without, ()):
                kernel = getattr(module, name)
                stack.enter_context(mock.patch.object(kernel, "launch", lambda *_, **__: None))
            if without in FIXED:
                module, name = FIXED[without]
                fixed = self._said(module, name, batch)
                stack.enter_context(mock.patch.object(module, name, lambda *_, **__: fixed))
            return graph_us([self.step(batch)]) / self._layers

    def timeline(self, batch: int) -> Iterator[Line]:
        """Of the kernels between the first norms of two layers, in the order of their ends."""
        graph, step = torch.cuda.CUDAGraph(), self.step(batch)
        step()
        with torch.cuda.graph(graph):
            step()
        for _ in range(3):
            graph.replay()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            graph.replay()
            torch.cuda.synchronize()
        found = sorted((e.time_range.end, e.time_range.start, e.name) for e in seen.events())
        each = len(found) // self._layers
        middle = found[each * (self._layers // 2) :][: each + 2]
        for (before, *_), (end, start, name) in pairwise(middle):
            began, ended = (round(at - middle[0][0], 2) for at in (start, end))
            times = {"begins": began, "ends": ended, "us": round(end - before, 2)}
            yield {"batch": batch, "kernel": name[:40]} | times

    def _said(self, module: Any, name: str, batch: int) -> object:
        """What that function answers in a step."""
        real, said = getattr(module, name), []

        def listening(*args: Any, **options: Any) -> object:
            said.append(real(*args, **options))
            return said[-1]

        with mock.patch.object(module, name, listening):
            self.step(batch)()
        torch.cuda.synchronize()
        return said[0] if said else None

    def lines(self, batch: int, parts: bool) -> Iterator[Line]:
        """The whole, then what each kernel costs, then the rest."""
        rest = whole = self.us(batch)
        yield {"batch": batch, "us per layer": round(whole, 2)}
        if not parts:
            return
        for name in (*KERNELS, *FIXED):
            cost = whole - self.us(batch, name)
            rest -= cost
            yield {"batch": batch, "kernel": name, "us per layer": round(cost, 2)}
        yield {"batch": batch, "kernel": "what they hide from each other", "us per layer": round(rest, 2)}


@torch.inference_mode()
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=768)
    parser.add_argument("--whole", action="store_true", help="without the parts")
    parser.add_argument("--timeline", action="store_true")
    given = parser.parse_args()
    with mock.patch.object(route, "by_chance", by_place):
        bench = Bench(given.layers, max(given.batches), given.context)
        for batch in given.batches:
            lines = bench.timeline(batch) if given.timeline else bench.lines(batch, not given.whole)
            for line in lines:
                print(json.dumps(line), flush=True)
                append_line(given.out, line)


if __name__ == "__main__":
    main()
