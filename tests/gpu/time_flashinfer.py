"""flashinfer on one GPU: seconds to compile from nothing, prompt attention checked, decode's times.

    python -m tests.gpu.time_flashinfer --out DIR

Llama-3.1-8B's heads (32 and 8 of 128), bf16, pages of 16, over the layers of a page-major pool. Needs a
Hopper GPU, nvcc and ninja.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eyas.bench.kernels.timing import graph_us
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import PoolShape

if TYPE_CHECKING:
    from eyas.engine.attention.flashinfer_backend import Fa3Build

HEADS, KV_HEADS, DIM, PAGE, DTYPE = 32, 8, 128, 16, torch.bfloat16
MIXED = [[(0, 37), (1000, 128), (16, 1), (4096, 512), (0, 300), (63, 65)], [(5, 900), (0, 16), (8191, 2)]]
DECODES = [(1, 1024, 32), (8, 8192, 8), (32, 1024, 8), (128, 4096, 4)]  # batch, rows, layers of the pool
WORKSPACE_BYTES = 128 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = cache  # before flashinfer is imported
        figures: dict[str, Any] = {}
        build = _compile(figures, Path(cache))
        decode_build = threading.Thread(target=_compile_decode, args=(figures,))
        decode_build.start()
        _check(build)
        decode_build.join()
        _time_decode(figures)
    out.mkdir(parents=True, exist_ok=True)
    (out / "flashinfer.json").write_text(json.dumps(figures, indent=1))


# --- compiling -------------------------------------------------------------------------------------------


def _compile(figures: dict[str, Any], cache: Path) -> Fa3Build:
    began = time.perf_counter()
    from eyas.engine.attention.flashinfer_backend import Fa3Build

    _tell(figures, "import_s", time.perf_counter() - began)
    build = Fa3Build(DTYPE, DIM, "cuda")
    build.wait()
    _tell(figures, "fa3_compile_s", build.seconds)
    for log in cache.rglob(".ninja_log"):
        for line in log.read_text().splitlines()[1:]:
            start, end, _, target, _ = line.split("\t")
            print(f"  {(int(end) - int(start)) / 1e3:6.1f} s  {Path(target).name[-60:]}", flush=True)
    return build


def _compile_decode(figures: dict[str, Any]) -> None:
    """The FA2 template, which is what tensor-core decode runs on."""
    import flashinfer

    began = time.perf_counter()
    types = (DTYPE, DTYPE, DTYPE, torch.int32)
    flashinfer.prefill.get_batch_prefill_module("fa2", *types, DIM, DIM, 0, False, False, False)
    _tell(figures, "fa2_compile_s", time.perf_counter() - began)


# --- prompts ---------------------------------------------------------------------------------------------


def _check(build: Fa3Build) -> None:
    """Chunks with and without prefixes on scattered pages against a plain softmax; two plans back to back."""
    from eyas.engine.attention.flashinfer_backend import PrefillAttention

    shape = PoolShape(KvFormat(3, KV_HEADS, DIM), 2048, PAGE, DTYPE, "cuda")
    pool = torch.randn(shape.sizes, device="cuda", dtype=DTYPE)
    attention = PrefillAttention(HEADS, shape, DIM**-0.5, build)
    done = []
    for sizes in MIXED:
        spans = _spans(sizes, shape.pages)
        rows = sum(count for _, count in sizes)
        q = torch.randn(rows + 5, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=DTYPE)[:, :HEADS]
        out = torch.full((rows + 5, HEADS, DIM), 7.0, device="cuda", dtype=DTYPE)
        attention.plan(spans)
        attention.run(q, pool[:, 1], out)
        done.append((spans, q, out))
    for spans, q, out in done:
        wanted = torch.cat([_plain(span, part, pool[:, 1]) for span, part in _parts(spans, q)])
        error = (out[:-5].float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        print(f"  relative error {float(error):.5f}", flush=True)
        assert float(error) < 0.01
        assert bool((out[-5:] == 7.0).all()), "rows beyond the plan were written"


def _spans(sizes: list[tuple[int, int]], pages: int) -> list[QuerySpan]:
    random.seed(0)
    free = random.sample(range(pages), pages)
    return [QuerySpan([free.pop() for _ in range(-(-sum(s) // PAGE))], *s) for s in sizes]


def _parts(spans: list[QuerySpan], q: torch.Tensor) -> list[tuple[QuerySpan, torch.Tensor]]:
    parts = q[: sum(span.count for span in spans)].split([span.count for span in spans])
    return list(zip(spans, parts, strict=True))


def _plain(span: QuerySpan, q: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    """float32 [count, HEADS, DIM], from the definition."""
    end = span.start + span.count
    k, v = layer[torch.tensor(span.pages, device="cuda")].float().transpose(0, 1).flatten(1, 2)[:, :end]
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * DIM**-0.5
    own = torch.arange(span.start, end, device="cuda")[:, None]
    scores.masked_fill_(torch.arange(end, device="cuda") > own, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


# --- decode ----------------------------------------------------------------------------------------------


def _time_decode(figures: dict[str, Any]) -> None:
    """Tensor-core decode in CUDA graphs, one launch for each layer of the pool."""
    for batch, rows, layers in DECODES:
        us = _decode_us(batch, rows // PAGE, layers)
        read = 2 * batch * rows * KV_HEADS * DIM * DTYPE.itemsize
        _tell(figures, f"decode_{batch}_x_{rows}", {"us": us, "gb_s": read / us / 1e3})


def _decode_us(batch: int, pages_each: int, layers: int) -> float:
    sizes = (batch * pages_each, layers, 2, PAGE, KV_HEADS, DIM)
    pool = torch.empty(sizes, device="cuda", dtype=DTYPE).normal_()
    wrapper = _decode_plan(batch, pages_each)
    q = torch.randn(batch, HEADS, DIM, device="cuda", dtype=DTYPE)
    out = torch.empty_like(q)
    return graph_us([lambda i=i: wrapper.run(q, pool[:, i], out=out) for i in range(layers)])


def _decode_plan(batch: int, pages_each: int) -> Any:
    import flashinfer

    def ints(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32).cuda()

    first_page = torch.arange(batch + 1) * pages_each
    pages, last = ints(torch.randperm(batch * pages_each)), ints(torch.full((batch,), PAGE))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=ints(first_page),
        paged_kv_indices_buffer=pages.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    wrapper.plan(ints(first_page).cpu(), pages, last.cpu(), HEADS, KV_HEADS, DIM, PAGE, q_data_type=DTYPE)
    return wrapper


def _tell(figures: dict[str, Any], name: str, value: Any) -> None:
    figures[name] = value
    shown = {k: round(v, 1) for k, v in value.items()} if isinstance(value, dict) else round(value, 1)
    print(f"{name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
