"""How the exact kernels could be cut: `python -m tests.gpu.exact_variants --out FILE`.

Each way beside the fast kernel, in about 70 s: attention of rounds and of prompts by several cuts; what many
rows pass between their products; products `o` and `down` of many rows by one fold of k and by two, and
whether other calls of cuBLAS give the same bits; the narrow products with `o` in one fold and in two. FILE
gets one JSON object a line; every one is printed as well. All times are microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton

from eyas.bench.kernels.timing import graph_us
from eyas.engine.kernels.attention.attend import attend
from eyas.engine.kernels.attention.exact_attend import AttentionCut, ExactLaunch
from eyas.engine.kernels.attention.exact_paths import attend_exactly
from eyas.engine.kernels.attention.exact_prefill import ChunkCut, attend_chunks_exactly
from eyas.engine.kernels.attention.prefill import attend_chunks, tile_rows
from eyas.engine.kernels.products import exact_wide, rows, skinny, skinny_tiles
from eyas.engine.kernels.products.skinny_tiles import ProductTile
from tests.gpu.attend_bench import Case, Pool, Prompt, queries_of
from tests.gpu.skinny_bench import DIM, EPS, HEADS, HIDDEN, INNER, KV_HEADS, LAYER, Chain, weights

DEVICE = "cuda"
UNSPLIT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
ROUNDS = (
    Case("bs1 x 256", (256,)),
    Case("bs1 x 1024", (1024,)),
    Case("bs4 x 7900", (7900,) * 4),
    Case("bs32 x 256", (256,) * 32),
    Case("bs32 x 380", (380,) * 32),
    Case("bs32 x 1100", (1100,) * 32),
    Case("chain 4, bs1 x 256", (256,), 4),
    Case("chain 4, bs32 x 256", (256,) * 32, 4),
)
SHARED = tuple(AttentionCut(16, shares, 4, registers=128) for shares in (1, 2, 3, 4, 8, 16))
STAGED = tuple(
    AttentionCut(16, shares, warps, stages, registers)
    for shares in (2, 4)
    for warps, stages, registers in ((2, 2, None), (4, 2, 168), (4, 2, None), (4, 3, 168))
)
PROMPTS = (
    Prompt("8 of 1024", ((0, 1024),) * 8),
    Prompt("2048 after 6144", ((6144, 2048),)),
    Prompt("8192 causal", ((0, 8192),)),
)
CHUNKS = (ChunkCut(), ChunkCut(stages=2), ChunkCut(64, 4, 2), ChunkCut(64, 4, 3), ChunkCut(64, 8, 3))
WIDE = (256, 1024, 2048, 4096)
NARROW = (1, 8, 32, 64, 128)
O_TILES = tuple(
    ProductTile(64, depth, warps, stages)
    for depth, warps, stages in ((128, 8, 4), (128, 4, 4), (64, 8, 6), (256, 4, 3), (256, 8, 2))
)
Record = dict[str, Any]
Call = Callable[..., object]


# --- attention -------------------------------------------------------------------------------------------


def attention() -> Iterator[Record]:
    pool = Pool()
    fast = pool.launch(ROUNDS)
    most = max(len(case.lengths) * case.width for case in ROUNDS)
    exact = ExactLaunch.on(pool.layer(0), HEADS, most, pdl=True)
    ahead = replace(fast, compile_only=True), replace(exact, compile_only=True)
    at_once([call for case in ROUNDS for call in ways_of(pool, case, *ahead).values()])
    for case in ROUNDS:
        pool.seat([length + case.width for length in case.lengths])
        for name, call in ways_of(pool, case, fast, exact).items():
            us = graph_us([partial(call, i) for i in range(16)], replays=7)
            yield {"attention": case.name, "way": name, "us": round(us, 2)}
    yield from prompts(pool)


def ways_of(pool: Pool, case: Case, fast: Any, exact: ExactLaunch) -> dict[str, Call]:
    """Each takes a layer; the exact ones are named after their cuts."""
    queries = queries_of(case, 0)
    q = torch.randn(len(case.lengths) * case.width, HEADS, DIM, device=DEVICE).bfloat16()

    def today(layer: int = 0) -> None:
        attend(q, pool.layer(layer), queries, fast)

    def exactly(layer: int = 0, cut: AttentionCut | None = None) -> None:
        attend_exactly(q, pool.layer(layer), queries, exact, cut)

    usual = AttentionCut.of(len(case.lengths), case.rows, KV_HEADS)
    others = SHARED if case.width > 1 else (*SHARED, *STAGED)
    cuts = {name_of(cut): partial(exactly, cut=cut) for cut in others}
    return {"fast": today, f"exact, as it is: {name_of(usual)}": exactly} | cuts


def name_of(cut: AttentionCut) -> str:
    return f"{cut.shares} shares, {cut.warps} warps, {cut.stages} stages, {cut.registers} registers"


def prompts(pool: Pool) -> Iterator[Record]:
    tiles = {prompt: tiles_of(prompt) for prompt in PROMPTS}
    q = torch.randn(8192, HEADS, DIM, device=DEVICE).bfloat16()
    first = tiles[PROMPTS[0]]
    at_once(
        [partial(attend_chunks, q, pool.layer(0), first, compile_only=True)]
        + [partial(attend_chunks_exactly, q, pool.layer(0), first, cut, True) for cut in CHUNKS]
    )
    for prompt in PROMPTS:
        pool.seat([prefix + count for prefix, count in prompt.chunks])
        calls: dict[str, Call] = {"fast": partial(attend_chunks, tiles=tiles[prompt])}
        for cut in CHUNKS:
            name = f"{cut.rows} rows, {cut.warps} warps, {cut.stages} stages"
            calls[name] = partial(attend_chunks_exactly, tiles=tiles[prompt], cut=cut)
        for name, call in calls.items():
            us = graph_us([partial(call, q, pool.layer(i)) for i in range(4)], replays=7)
            yield {"prompt": prompt.name, "way": name, "us": round(us, 1), "speed": prompt.speed(us).strip()}


def tiles_of(prompt: Prompt) -> torch.Tensor:
    """The longest first, as the engine orders them."""
    most, found, begins = tile_rows(HEADS, KV_HEADS), [], 0
    for slot, (prefix, count) in enumerate(prompt.chunks):
        found += [(slot, begins + at, prefix + at, min(most, count - at)) for at in range(0, count, most)]
        begins += count
    found.sort(key=lambda tile: -tile[2])
    return torch.tensor(found, dtype=torch.int32, device=DEVICE)


# --- many rows -------------------------------------------------------------------------------------------


def wide() -> Iterator[Record]:
    launch = replace(skinny.ProductLaunch.on(DEVICE, pdl=True, exact=True), cublas=True)
    matrices = {"o": normal(HIDDEN, HIDDEN), "down": normal(HIDDEN, INNER)}
    for m in WIDE:
        for name, weight in matrices.items():
            x, residual = normal(m, weight.shape[1]), normal(m, HIDDEN)
            yield {"m": m, "product": name} | same_bits(x, weight)
            for way, call in settled(x, weight, residual, launch).items():
                us = graph_us([call] * 4, replays=7)
                yield {"m": m, "product and what follows": name, "way": way, "us": round(us, 1)}
        for name, pair in row_kernels(m).items():
            us = [round(graph_us([call] * 4, replays=7), 1) for call in pair]
            yield {"m": m, "row kernel": name, "fast": us[0], "exact": us[1]}


def halves(matrix: torch.Tensor) -> torch.Tensor:
    """[rows, k] -> [2, rows, k / 2]."""
    return matrix.unflatten(1, (2, -1)).transpose(0, 1)


def by_bmm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Both halves of k by one call: float32 [2, m, n]."""
    return torch.bmm(halves(x), halves(weight).transpose(1, 2), out_dtype=torch.float32)


def by_addmm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The second half added onto the first by cuBLAS: float32 [m, n]."""
    (a, b), (u, v) = halves(x), halves(weight)
    first = torch.mm(a, u.t(), out_dtype=torch.float32)
    return torch.addmm(first, b, v.t(), out_dtype=torch.float32)


def by_two(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each half of k by a call of its own: float32 [2, m, n]."""
    made = torch.empty(2, x.shape[0], weight.shape[0], device=x.device)
    for part, columns, out in zip(halves(x), halves(weight), made, strict=True):
        torch.mm(part, columns.t(), out_dtype=torch.float32, out=out)
    return made


def same_bits(x: torch.Tensor, weight: torch.Tensor) -> Record:
    """Whether other calls give the bits of two products that are added up."""
    made = by_two(x, weight)
    found: Record = {}
    for name, call, expected in (("bmm", by_bmm, made), ("addmm", by_addmm, made[0] + made[1])):
        try:
            found[f"{name} has the same bits"] = bool(torch.equal(call(x, weight), expected))
        except (RuntimeError, TypeError) as error:
            found[f"{name} has the same bits"] = str(error)[:200]
    return found


def settled(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, launch: skinny.ProductLaunch
) -> dict[str, Call]:
    """A product, and what adds it to the residual."""
    settle = partial(exact_wide.settle, residual, EPS, pdl=True)
    normed = rows.NormInput(EPS)
    return {
        "fast": lambda: rows.add_norm(torch.mm(x, weight.t()), residual, normed, pdl=True),
        "one fold": lambda: settle(torch.mm(x, weight.t())),
        "two folds": lambda: settle(by_two(x, weight)),
        "two folds, one call": lambda: settle(by_bmm(x, weight)),
        "two folds, the second onto the first": lambda: settle(by_addmm(x, weight)),
        "two folds, added up before": lambda: settle(exact_wide.total(by_two(x, weight), x.dtype)),
        "as it is": lambda: settle(exact_wide.shares(x, weight, launch)),
    }


def row_kernels(m: int) -> dict[str, tuple[Call, Call]]:
    """The fast one and the exact one."""
    raw, gate_up, scales = normal(m, (HEADS + 2 * KV_HEADS) * DIM), normal(m, 2 * INNER), normal(m).float()
    q, places = normal(m, HEADS, DIM), torch.arange(m, device=DEVICE)
    angles = torch.rand(m, DIM // 2, device=DEVICE)
    rotation = skinny.RotaryInput(angles, angles, places)
    pool = normal(-(-m // 16), 2, 2, 16, KV_HEADS, DIM)
    kv, heads = skinny.KvRows(pool[:, 1], places), rows.HeadLayout(HEADS, KV_HEADS, DIM)
    after = exact_wide.AfterQkv(pdl=True)
    return {
        "rope_write": (
            lambda: rows.rope_write(raw, heads, q, rotation, kv, True),
            lambda: exact_wide.rope_write(raw, scales, after, q, rotation, kv),
        ),
        "act_mul": (
            lambda: rows.act_mul(gate_up, pdl=True),
            lambda: exact_wide.act_mul(gate_up, scales, pdl=True),
        ),
    }


# --- few rows --------------------------------------------------------------------------------------------


def narrow() -> Iterator[Record]:
    layers = {product.name: weights(product) for product in LAYER}
    chains = {m: Chain(layers, m) for m in NARROW}
    usual = skinny_tiles.stretches_of
    ways = (("fast", False, 1), ("exact, o in one fold", True, 1), ("exact, o in two", True, 2))
    for name, exact, folds in ways:
        launch = skinny.ProductLaunch.on(DEVICE, pdl=True, exact=exact)
        with patch.object(skinny_tiles, "stretches_of", partial(o_in, folds, usual)):
            ahead = replace(launch, compile_only=True)
            at_once([partial(chain.fused, ahead) for chain in chains.values()])
            for m, chain in chains.items():
                us = graph_us([partial(chain.fused, launch)], replays=7)
                yield {"narrow products, rows": m, "way": name, "us": round(us, 1)}
    yield from o_by_tiles(layers["o"], skinny.ProductLaunch.on(DEVICE, pdl=True, exact=True))


def o_in(count: int, usual: Callable[[Any], int], shape: skinny_tiles.ProductShape) -> int:
    """Into how many folds k is cut, where `o` has this many."""
    return count if (shape.n, shape.k) == (HIDDEN, HIDDEN) else usual(shape)


def added(
    m: int,
    tile: ProductTile,
    into: tuple[torch.Tensor, ...],
    weight: torch.Tensor,
    launch: skinny.ProductLaunch,
) -> None:
    """`o`, as narrow steps add it. `into`: what it reads, the residual, and its sums of squares."""
    cut, (x, residual, sums) = replace(launch, tiles={("linear", m, HIDDEN, HIDDEN): tile}), into
    skinny.linear(skinny.SkinnyInput(x), weight, residual, cut, skinny.LinearEnd(residual, sums))


def o_by_tiles(matrices: list[torch.Tensor], launch: skinny.ProductLaunch) -> Iterator[Record]:
    """One fold of k by 64 programs: how should they go?"""
    calls: dict[tuple[int, ProductTile], Callable[[torch.Tensor, skinny.ProductLaunch], None]] = {}
    for m in (64, 128):
        x, residual = normal(m, HIDDEN), normal(m, HIDDEN)
        sums = torch.empty(HIDDEN // skinny.sum_group(HIDDEN), skinny.MAX_ROWS, device=DEVICE)
        for tile in O_TILES:
            calls[m, tile] = partial(added, m, tile, (x, residual, sums))
    ahead = replace(launch, compile_only=True)
    at_once([partial(call, matrices[0], ahead) for call in calls.values()])
    for (m, tile), call in calls.items():
        us = graph_us([partial(call, weight, launch) for weight in matrices], replays=7)
        yield {"o alone, rows": m, "tile": astuple(tile), "us": round(us, 2)}


def normal(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device=DEVICE)


def at_once(calls: list[Call]) -> None:
    """Compiles in parallel what these would launch."""
    pool = ThreadPoolExecutor(os.cpu_count())
    with pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for call in calls:
            call()


PARTS: dict[str, Callable[[], Iterator[Record]]] = {"wide": wide, "attention": attention, "narrow": narrow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="these parts alone")
    args = parser.parse_args()
    os.environ.update(UNSPLIT)  # before the first product
    began = time.monotonic()
    with args.out.open("a") as file:
        for part in args.only:
            for record in PARTS[part]():
                line = json.dumps(record | {"s": round(time.monotonic() - began, 1)})
                print(line, flush=True)
                file.write(line + "\n")
                file.flush()


if __name__ == "__main__":
    main()
