"""What the exact arithmetic must know of a GPU: `python -m tests.gpu.exact_first --out FILE`.

In under 200 s: whether cuBLAS, told not to split k, adds up as the narrow kernels do (then wide products may
stay with it, "plan B", else they need a kernel of their own, "plan A"); whether the matrix unit follows the
model of `tests.unit.tensor_core`; and what the exact narrow products and attention cost over today's. FILE
gets one JSON object a line; every one is printed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton

from eyas.bench.kernels.timing import graph_us
from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.kernels.attention.attend import attend
from eyas.engine.kernels.attention.exact_attend import ExactLaunch
from eyas.engine.kernels.attention.exact_paths import attend_exactly
from eyas.engine.kernels.attention.exact_prefill import ChunkCut, attend_chunks_exactly
from eyas.engine.kernels.attention.prefill import attend_chunks, tile_rows
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.products.skinny_tiles import ProductShape, stretches_of
from tests.bits.compare import Composition, differences
from tests.bits.models import CHUNK, ROWS, Model, Step
from tests.gpu.attend_bench import DIM, HEADS, KV_HEADS, LAYERS, Case, Pool, Prompt, queries_of
from tests.gpu.family_models import SIZES
from tests.gpu.skinny_bench import LAYER, LM_HEAD, Chain, Product, milliseconds, weights
from tests.unit.families import write_family
from tests.unit.tensor_core import multiply_add

UNSPLIT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
COUNTS = (129, 256, 257, 512, 1000, 2048, 4096)
TIMED = (2048, 4096)
MODELLED = (4, 128)  # rows and columns of a product that the model computes
CASES = (
    *(Case(f"bs{n} x {length}", (length,) * n) for length in (1024, 8192) for n in (1, 8, 32)),
    Case("bs128 x 1024", (1024,) * 128),
    Case("chain 4, bs32 x 1024", (1024,) * 32, 4),
    Case("tree 32, bs1 x 1024", (1024,), 32, True),
    Case("tree 32, bs32 x 1024", (1024,) * 32, 32, True),
)
PROMPTS = (Prompt("1024 causal", ((0, 1024),)), Prompt("8192 causal", ((0, 8192),)))
NARROW: list[list[Step]] = [
    [(CHUNK, 128), (CHUNK, 128), (CHUNK, 44)],
    [*((CHUNK, 33),) * 8, *((ROWS, 1),) * 36],
    [(CHUNK, 100), *((ROWS, 8),) * 25],
    [*((ROWS, 3),) * 100],
]
WIDE: list[list[Step]] = [[(CHUNK, 600)], *([(CHUNK, n), (CHUNK, 600 - n)] for n in (129, 200, 256, 311))]
WIDE += [[(CHUNK, 90), (CHUNK, 500), (ROWS, 8), (ROWS, 1), (ROWS, 1)]]
COUNTED = (1, 8, 32, 128)
Record = dict[str, Any]


# --- cuBLAS against the narrow kernels' order ------------------------------------------------------------


def cublas() -> Iterator[Record]:
    """Every weight of the 8B model by `torch.mm`, against the same rows by the narrow kernel."""
    settings = "unsplit" if os.environ.get("CUBLASLT_WORKSPACE_SIZE") == "1" else "as it is"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = settings == "as it is"
    for product in (*LAYER, LM_HEAD):
        x, weight = operands(product)
        ours = narrow(product, x, weight)
        if settings == "as it is":
            yield against_the_model(product, x, weight, ours)
        for count in (count for count in COUNTS if count <= len(x)):
            for dtype in (torch.float32, torch.bfloat16):
                theirs = by_cublas(product, x[:count], weight, dtype)
                differing = int((theirs != ours[:count].to(dtype)).sum())
                record = {"cublas": settings, "product": product.name, "m": count, "type": str(dtype)}
                yield record | {"differing": differing, "of": theirs.numel()}
                del theirs
        for count in (count for count in TIMED if count <= len(x)):
            us = graph_us([partial(by_cublas, product, x[:count], weight, torch.bfloat16)] * 4)
            speed = 2 * count * product.n * product.k / us / 1e6
            yield {"cublas": settings, "product": product.name, "m": count, "us": us, "tflops": speed}


def operands(product: Product) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of numbers of very different sizes, and a weight."""
    random = torch.Generator("cuda").manual_seed(1)
    most = 1000 if product is LM_HEAD else max(COUNTS)
    sizes = torch.randint(-10, 11, (most, product.k), generator=random, device="cuda")
    x = torch.randn(most, product.k, generator=random, device="cuda") * torch.exp2(sizes.float())
    weight = torch.randn(product.n, product.k, generator=random, device="cuda") * product.k**-0.5
    return x.bfloat16(), weight.bfloat16()


def stretches(product: Product) -> int:
    """Into how many the exact arithmetic cuts this weight's k."""
    return stretches_of(ProductShape("linear", 128, product.n, product.k, product.n))


def narrow(product: Product, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x . weight^T in float32, as the exact narrow kernel adds it up."""
    out = torch.empty(x.shape[0], product.n, device="cuda")
    launch = skinny.ProductLaunch.on("cuda", pdl=False, exact=True)
    for rows, found in zip(x.split(skinny.MAX_ROWS), out.split(skinny.MAX_ROWS), strict=True):
        skinny.linear(skinny.SkinnyInput(rows), weight, found, launch)
    return out


def by_cublas(product: Product, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same, each stretch of k by one call; where there are two their float32 results are added."""
    count = stretches(product)
    if count == 1 and dtype != torch.float32:
        return torch.mm(x, weight.t())
    columns = product.k // count
    total: torch.Tensor | None = None
    for part, rows in zip(x.split(columns, 1), weight.split(columns, 1), strict=True):
        found = torch.mm(part, rows.t(), out_dtype=torch.float32)
        total = found if total is None else total.add_(found)
    assert total is not None
    return total.to(dtype)


def against_the_model(product: Product, x: torch.Tensor, weight: torch.Tensor, ours: torch.Tensor) -> Record:
    """Of a corner of the product: how many elements are not those of the model of the matrix unit."""
    rows, columns = MODELLED
    a, b = x[:rows].float().cpu().numpy(), weight[:columns].float().cpu().numpy().T
    zeros, stretch = ours.new_zeros(rows, columns).cpu().numpy(), product.k // stretches(product)
    parts = [
        multiply_add(a[:, k : k + stretch], b[k : k + stretch], zeros) for k in range(0, product.k, stretch)
    ]
    expected = torch.from_numpy(sum(parts[1:], parts[0])).cuda()
    differing = int((expected != ours[:rows, :columns]).sum())
    return {"model": product.name, "differing": differing, "of": rows * columns}


# --- whole forwards --------------------------------------------------------------------------------------


def forwards() -> Iterator[Record]:
    """Positions whose logits differ between steps: of narrow steps alone, and with wide ones, by cuBLAS."""
    with TemporaryDirectory() as name:
        write_family(Path(name), "llama", **SIZES)
        model = Model(Path(name), True, WeightPlacement("cuda", torch.bfloat16))
        for ways, steps in (("narrow", NARROW), ("wide", WIDE)):
            runs = [Composition(str(way), partial(model.logits, way)) for way in steps]
            found = differences(runs)
            record = {"forward": ways, "steps": len(steps), "differing": len(found)}
            yield record | {"first": [str(difference) for difference in found[:3]]}


# --- what the exact kernels cost -------------------------------------------------------------------------


def costs() -> Iterator[Record]:
    """Today's kernels beside the exact ones, in graphs, with programmatic dependent launch."""
    pool = Pool()
    yield from attention_costs(pool)
    yield from prompt_costs(pool)
    del pool
    yield from product_costs()


def product_costs() -> Iterator[Record]:
    layers = {product.name: weights(product) for product in LAYER}
    launches = {exact: skinny.ProductLaunch.on("cuda", pdl=True, exact=exact) for exact in (False, True)}
    chains = {m: Chain(layers, m) for m in COUNTED}
    ahead = [replace(launch, compile_only=True) for launch in launches.values()]
    at_once([partial(chain.fused, launch) for chain in chains.values() for launch in ahead])
    for m, chain in chains.items():
        ms = {exact: milliseconds([partial(chain.fused, launch)]) for exact, launch in launches.items()}
        yield {"products": m, "fast_ms": ms[False], "exact_ms": ms[True], "cost": ms[True] / ms[False] - 1}


def attention_costs(pool: Pool) -> Iterator[Record]:
    fast = pool.launch(CASES)
    rows = max(len(case.lengths) * case.width for case in CASES)
    exact = ExactLaunch.on(pool.layer(0), HEADS, rows, pdl=True)
    ahead = replace(fast, compile_only=True), replace(exact, compile_only=True)
    at_once([call for case in CASES for call in both(pool, case, *ahead)])
    for case in CASES:
        pool.seat([length + case.width for length in case.lengths])
        layers = range(LAYERS)
        pair = both(pool, case, fast, exact)
        us = [graph_us([partial(call, i) for i in layers], replays=7) for call in pair]
        yield {"attention": case.name, "fast_us": us[0], "exact_us": us[1], "cost": us[1] / us[0] - 1}


def both(pool: Pool, case: Case, fast: Any, exact: ExactLaunch) -> tuple[Callable[..., Any], ...]:
    """A case by today's kernel and by the exact one, over a layer's keys."""
    queries = queries_of(case, 0)
    q = torch.randn(len(case.lengths) * case.width, HEADS, DIM, device="cuda").bfloat16()

    def today(layer: int = 0) -> None:
        attend(q, pool.layer(layer), queries, fast)

    def exactly(layer: int = 0) -> None:
        attend_exactly(q, pool.layer(layer), queries, exact)

    return today, exactly


def prompt_costs(pool: Pool) -> Iterator[Record]:
    for prompt in PROMPTS:
        (prefix, count), most = prompt.chunks[0], tile_rows(HEADS, KV_HEADS)
        pool.seat([prefix + count])
        q = torch.randn(count, HEADS, DIM, device="cuda").bfloat16()
        starts = range((count - 1) // most * most, -1, -most)  # the longest first
        tiles = torch.tensor(
            [(0, at, prefix + at, min(most, count - at)) for at in starts], dtype=torch.int32, device="cuda"
        )
        fast = graph_us([partial(attend_chunks, q, pool.layer(i), tiles) for i in range(4)], replays=7)
        for stages in (2, 3):
            call = partial(attend_chunks_exactly, tiles=tiles, cut=ChunkCut(stages=stages))
            us = graph_us([partial(call, q, pool.layer(i)) for i in range(4)], replays=7)
            record = {"prompt": prompt.name, "stages": stages, "fast_us": fast, "exact_us": us}
            yield record | {"cost": us / fast - 1}


def at_once(calls: list[Callable[[], Any]]) -> None:
    """Compiles in parallel what these would launch."""
    pool = ThreadPoolExecutor(os.cpu_count())
    with pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for call in calls:
            call()


# --- the command -----------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[], Iterator[Record]]] = {"cublas": cublas, "forwards": forwards, "costs": costs}
RUNS = (("cublas", UNSPLIT), ("forwards", UNSPLIT), ("cublas", {}), ("costs", {}))  # the decisive ones first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS, help="one part alone, in this process")
    args = parser.parse_args()
    if args.part is None:  # cuBLAS reads its variables once, before it first runs
        for part, variables in RUNS:
            command = [sys.executable, "-m", "tests.gpu.exact_first", "--out", str(args.out), "--part", part]
            subprocess.run(command, env={**os.environ, **variables}, check=False)
        return
    began = time.monotonic()
    with args.out.open("a") as file:
        for record in PARTS[args.part]():
            line = json.dumps(record | {"s": round(time.monotonic() - began, 1)})
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()


if __name__ == "__main__":
    main()
