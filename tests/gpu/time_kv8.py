"""Attention over keys and values in FP8 against bf16: `python -m tests.gpu.time_kv8`.

In under a minute on one GPU, Llama-3.1-8B's heads: for each kernel one JSON line with the microseconds of a
call in a CUDA graph over either pool, how much faster FP8 is, the bandwidth of what is read, and the relative
errors against a softmax in float32: `error` over the numbers that are stored, `loss` over what was written.
Layers follow each other, so that none is in the cache. A ratio of 1.6 is the aim at 32 x 8,192.

`--try NAME:FIELD=NUMBER,... ...` measures kernels over FP8 by these tilings too, each the usual one but for
these fields: `--try attend:keys=64,warps=2 'chain of 4:parts=2' exact:warps=2,registers=168`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton

from eyas.bench.kernels.timing import graph_us
from eyas.engine.kernels.attention.attend import AttentionLaunch, QueryRows, attend
from eyas.engine.kernels.attention.attend_tiles import tiling_of
from eyas.engine.kernels.attention.exact_attend import AttentionCut, ExactLaunch
from eyas.engine.kernels.attention.exact_paths import attend_exactly
from eyas.engine.kernels.attention.exact_prefill import ChunkCut, attend_chunks_exactly
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.prefill import TILE, ChunkTiling, attend_chunks, chunk_tiling, tile_rows
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.kv.scaled import FP8, quantised

HEADS, KV_HEADS, DIM, PAGE, LAYERS = 32, 8, 128, 16, 4
DEVICE = "cuda"
MOST_PARTS = 16
WIDTHS = {"attend": 1, "chain of 4": 4, "exact": 1}
CHUNK = 2048

Kernel = Callable[..., torch.Tensor]  # of a PagedKv, by the usual tiling or another, or only compiled


@dataclass(frozen=True)
class Scene:
    """`batch` sequences of `rows` rows on scattered pages, the same in a pool of each type."""

    batch: int
    rows: int
    pools: dict[str, KvPool]
    tables: torch.Tensor
    written: torch.Tensor  # [2, rows, kv_heads, dim]: of the first sequence, in layer 0

    @classmethod
    def of(cls, batch: int, rows: int) -> Scene:
        """Random numbers; each row of a head has a size of its own."""
        each = -(-rows // PAGE)
        shape = PoolShape(KvFormat(LAYERS, KV_HEADS, DIM), 1 + batch * each, PAGE, torch.bfloat16, DEVICE)
        pools = {
            "bf16": KvPool(shape),
            "fp8": KvPool(PoolShape(shape.format, shape.pages, PAGE, FP8, DEVICE)),
        }
        tables = (torch.randperm(batch * each, device=DEVICE) + 1).int().view(batch, each)
        first = None
        for layer in range(LAYERS):
            for table in tables:
                places = (table[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten().long()
                fields = torch.randn(2, len(places), KV_HEADS, DIM, device=DEVICE)
                fields *= torch.rand(2, len(places), KV_HEADS, 1, device=DEVICE) * 3 + 0.1
                fields = fields.bfloat16()
                first = fields[:, :rows] if first is None else first
                for pool in pools.values():
                    pool.write(layer, pool.slots(places), *fields)
        assert first is not None
        return cls(batch, rows, pools, tables, first.float())

    def layers(self, kind: str) -> list[PagedKv]:
        """Every layer of a pool."""
        return [PagedKv(self.pools[kind].layer(layer), self.tables) for layer in range(LAYERS)]

    def expected(self, q: torch.Tensor, stored: bool) -> torch.Tensor:
        """The last of `q` [n, heads, dim] over all rows of the first sequence, as written or as `stored`."""
        keys, values = self.written
        if stored:
            keys, values = (x.float() * scale[..., None] for x, scale in map(quantised, (keys, values)))
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
        scores = torch.einsum("hd,khd->hk", q[-1].float(), keys) * DIM**-0.5
        return torch.einsum("hk,khd->hd", scores.softmax(-1), values)

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels' names."""
        count = min(CHUNK, self.rows)
        return (*WIDTHS, f"prompt of {count}", f"exact prompt of {count}")

    def kernels(self) -> dict[str, tuple[Kernel, torch.Tensor]]:
        """Each with the queries of the first sequence, of which the last sees all of its rows."""
        made = {name: self._few(width, name == "exact") for name, width in WIDTHS.items()}
        count = min(CHUNK, self.rows)
        made[f"prompt of {count}"] = self._prompt(count, attend_chunks)
        made[f"exact prompt of {count}"] = self._prompt(count, attend_chunks_exactly)
        return made

    def _few(self, width: int, exact: bool) -> tuple[Kernel, torch.Tensor]:
        slots, kv = torch.arange(self.batch, dtype=torch.int32, device=DEVICE), self.layers("fp8")[0]
        queries = QueryRows(slots, torch.full_like(slots, self.rows - width), width)
        q = torch.randn(self.batch * width, HEADS, DIM, device=DEVICE).bfloat16()
        if exact:
            shared = ExactLaunch.on(kv, HEADS, self.batch, pdl=True)
            return partial(_few_rows, lambda kv, *rest: attend_exactly(q, kv, queries, *rest), shared), q[
                :width
            ]
        parts = MOST_PARTS * self.batch * width * HEADS
        launch = AttentionLaunch.on(kv, HEADS, self.batch, width, pdl=True)
        launch = replace(launch, parts=launch.parts.new_empty(parts, DIM), lses=launch.lses.new_empty(parts))
        return partial(_few_rows, lambda kv, *rest: attend(q, kv, queries, *rest), launch), q[:width]

    def _prompt(self, count: int, chunks: Callable[..., torch.Tensor]) -> tuple[Kernel, torch.Tensor]:
        q = torch.randn(count, HEADS, DIM, device=DEVICE).bfloat16()
        tiles = {}
        for rows in (64, TILE, 2 * TILE):
            most = tile_rows(HEADS, KV_HEADS, rows)
            cuts = [
                (0, i, self.rows - count + i, min(most, count - i)) for i in reversed(range(0, count, most))
            ]
            tiles[rows] = torch.tensor(cuts, dtype=torch.int32, device=DEVICE)
        return partial(_chunks, chunks, q, tiles), q


def _few_rows(
    attend: Callable[..., torch.Tensor], launch: AttentionLaunch | ExactLaunch, kv: PagedKv,
    tiling: Any = None, compile_only: bool = False,
) -> torch.Tensor:  # fmt: skip
    return attend(kv, replace(launch, compile_only=compile_only), tiling)


def _chunks(
    chunks: Callable[..., torch.Tensor], q: torch.Tensor, tiles: dict[int, torch.Tensor], kv: PagedKv,
    tiling: Any = None, compile_only: bool = False,
) -> torch.Tensor:  # fmt: skip
    rows = tiling.rows if isinstance(tiling, ChunkTiling) else TILE
    return chunks(q, kv, tiles[rows], tiling, compile_only)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    return float((found.float() - expected).norm() / expected.norm())


@torch.inference_mode()
def measure(scene: Scene, name: str) -> dict[str, object]:
    """One kernel over both pools, in turn, twice; the sooner of each counts."""
    kernel, q = scene.kernels()[name]
    us = {kind: 1e9 for kind in scene.pools}
    for _ in range(2):
        for kind in us:
            calls = [lambda kv=kv: kernel(kv) for kv in scene.layers(kind)]
            us[kind] = min(us[kind], graph_us(calls))
    found = kernel(scene.layers("fp8")[0])
    last = found[len(q) - 1]
    rows = scene.rows * (1 if "prompt" in name else scene.batch)
    page_bytes = {kind: pool.shape.page_bytes / LAYERS / PAGE for kind, pool in scene.pools.items()}
    return {
        "kernel": name,
        "us": {kind: round(one, 1) for kind, one in us.items()},
        "faster": round(us["bf16"] / us["fp8"], 3),
        "gb_s": {kind: round(rows * page_bytes[kind] / us[kind] / 1e3) for kind in us},
        "error": round(relative_error(last, scene.expected(q, stored=True)), 5),
        "loss": round(relative_error(last, scene.expected(q, stored=False)), 5),
    }


def usual(name: str, batch: int) -> Any:
    """The tiling by which a kernel goes over FP8."""
    if name == "exact":
        return AttentionCut.of(batch, HEADS // KV_HEADS, KV_HEADS)
    if name in WIDTHS:
        return tiling_of(batch, WIDTHS[name] * HEADS // KV_HEADS, KV_HEADS, DIM, True)
    return ChunkCut() if "exact" in name else chunk_tiling(DIM)


def tilings_of(scene: Scene, wanted: list[str]) -> list[tuple[str, str, Any]]:
    """Kernels and tilings given as `main`'s parser takes them."""
    found = []
    for one in wanted:
        prefix, _, fields = one.partition(":")
        name = next(name for name in scene.names if name.startswith(prefix))
        changed = {key: int(number) for key, _, number in (f.partition("=") for f in fields.split(",") if f)}
        found.append((name, fields, replace(usual(name, scene.batch), **changed)))
    return found


def compile_ahead(scene: Scene, tilings: list[tuple[str, str, Any]]) -> None:
    """All at once; what does not compile fails again when it is run."""
    kernels = scene.kernels()
    pool = ThreadPoolExecutor()
    with pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for kernel, _ in kernels.values():
            for kind in scene.pools:
                kernel(scene.layers(kind)[0], None, compile_only=True)
        for name, _, tiling in tilings:
            kernels[name][0](scene.layers("fp8")[0], tiling, compile_only=True)


@torch.inference_mode()
def attempt(scene: Scene, name: str, fields: str, tiling: Any) -> dict[str, object]:
    """A kernel over FP8 by one tiling; a failure is a finding."""
    (kernel, q), kvs = scene.kernels()[name], scene.layers("fp8")
    facts: dict[str, object] = {"kernel": name, "fields": fields}
    try:
        last = kernel(kvs[0], tiling)[len(q) - 1]
        facts["error"] = round(relative_error(last, scene.expected(q, stored=True)), 5)
        facts["us"] = round(graph_us([partial(kernel, kv, tiling) for kv in kvs]), 1)
    except Exception as failure:
        facts["failed"] = f"{type(failure).__name__}: {failure}"[:200]
    return facts


def main() -> None:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--try", nargs="+", default=[], dest="tilings", metavar="NAME:FIELD=NUMBER,...")
    given = parser.parse_args()
    torch.manual_seed(0)
    scene = Scene.of(given.batch, given.rows)
    facts = {"gpu": torch.cuda.get_device_name(), "batch": given.batch, "rows": given.rows}
    tilings = tilings_of(scene, given.tilings)
    compile_ahead(scene, tilings)
    for name in scene.names:
        print(json.dumps(facts | measure(scene, name)), flush=True)
    for one in tilings:
        print(json.dumps(attempt(scene, *one)), flush=True)
    for pool in scene.pools.values():
        pool.close()


if __name__ == "__main__":
    main()
