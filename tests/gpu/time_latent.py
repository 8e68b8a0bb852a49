"""Latent attention on a GPU: right, and how fast: `python -m tests.gpu.time_latent --out FILE`.

In under 240 s on one H200. First every kernel against torch in float32, then each beside the time of the
bytes that it must read, by CUDA graphs; then one rank of eight of DeepSeek-V3 as a whole engine, with dummy
weights and uniform routing. FILE gets one JSON object a line, which is printed as well; a part that fails
prints its traceback, and the others go on. The last line says PASS or FAIL.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eyas.bench.kernels.timing import graph_us
from eyas.engine.kernels.attention.attend_tiles import AttentionTiling
from eyas.engine.kernels.latent import latent_products, latent_rows
from tests.gpu.latent_bench import (
    COPY_BYTES_PER_US,
    HEADS,
    LATENT,
    PLAIN,
    ROTATED,
    VALUE,
    WIDTH,
    Case,
    FirstRows,
    PromptStep,
    Step,
)

CLOSE = 0.02  # of the root mean square of what is expected: bf16 weights, results and products
CONTEXTS = (1, 63, 64, 1000, 8192)
COUNTS = (1, 3, 8, 33, 128)
TIMED = [
    *(Case(batch, context) for batch in (1, 8, 32, 128) for context in (768, 8192)),
    *(Case(batch, 768, 3) for batch in (1, 8, 32)),
    Case(8, 768, 8, tree=True),
    Case(1, 65536),
]
TILINGS = {
    16: [
        AttentionTiling(16, keys, parts, warps, stages)
        for keys, warps, stages in ((32, 4, 2), (32, 4, 4), (64, 4, 2), (64, 8, 2), (16, 4, 4))
        for parts in (8, 32)
    ],
    64: [
        AttentionTiling(64, keys, parts, 8, stages)
        for keys, stages in ((32, 2), (16, 4), (64, 1))
        for parts in (4, 8)
    ],
}

Record = dict[str, Any]
Part = Callable[[], Iterator[Record]]


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of what is expected; infinite where something is not."""
    if not found.isfinite().all():
        return float("inf")
    return float((found.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def judged(name: str, found: torch.Tensor, expected: torch.Tensor) -> Record:
    error = error_of(found, expected)
    return {"check": name, "error": error, "ok": error < CLOSE}


def check_rows(device: str, counts: tuple[int, ...] = COUNTS) -> Iterator[Record]:
    """The kernels before attention."""
    for m in counts:
        rows = FirstRows(m, device)
        norms = latent_rows.InnerNorms(rows.gains[0], rows.gains[1], 1e-6)
        queries = latent_rows.write_latents(rows.x, norms, rows.rotation, rows.kv)
        yield judged(f"queries' norm, {m} rows", queries, rows.normed(rows.x[:, :1536], rows.gains[1]))
        kept = rows.kv.layer.reshape(-1, WIDTH)[:m]
        yield judged(f"rows kept, {m} rows", kept, rows.kept())
        found = latent_products.absorb(rows.q, rows.keys, rows.rotation)
        yield judged(f"into latents, {m} rows", found, rows.absorbed())


def check_attention(
    device: str, counts: tuple[int, ...] = COUNTS, contexts: tuple[int, ...] = CONTEXTS
) -> Iterator[Record]:
    for context in contexts:
        cases = [Case(count, context) for count in counts]
        cases += [Case(3, context, 4), Case(8, context, 4), Case(2, context, 15, tree=True)]
        cases += [Case(1, context, 63, tree=True)]
        for case in cases:
            step = Step(case, device, layers=2)
            yield judged(case.name, step.attend(1), step.expected(1))
            wrong = error_of(step.attend(0), step.expected(1))
            yield {"check": f"{case.name}, power", "error": wrong, "ok": wrong > 10 * CLOSE}


def check_prompts(
    device: str, chunks: tuple[tuple[int, int], ...] = ((0, 1), (0, 333), (0, 700), (4096, 700))
) -> Iterator[Record]:
    """Both forms, from queries to values."""
    for prefix, count in chunks:
        step = PromptStep(prefix, count, device, layers=2)
        rows = sorted({0, count // 3, count // 2, count - 1})
        expected = step.expected(1, rows)
        yield judged(f"chunk of {count} behind {prefix}, absorbed", step.absorbed(1)[rows], expected)
        if step.expands:
            found = step.expanded(1)[rows]
            yield judged(f"chunk of {count} behind {prefix}, expanded", found, expected)
            wrong = error_of(step.expanded(0)[rows], expected)
            yield {"check": f"chunk of {count}, power", "error": wrong, "ok": wrong > 10 * CLOSE}


def time_rows() -> Iterator[Record]:
    for m in (1, 8, 32, 128):
        rows = FirstRows(m, "cuda")
        norms = latent_rows.InnerNorms(rows.gains[0], rows.gains[1], 1e-6)
        keys = [torch.randn_like(rows.keys) for _ in range(61)]
        write = partial(latent_rows.write_latents, rows.x, norms, rows.rotation, rows.kv, True)
        into = [partial(latent_products.absorb, rows.q, key, rows.rotation, True) for key in keys]
        yield {"time": f"norms and rows kept, {m} rows", "us": graph_us([write] * 61)}
        floor = HEADS * PLAIN * LATENT * 2 / COPY_BYTES_PER_US
        yield {"time": f"into latents, {m} rows", "us": graph_us(into), "floor_us": floor}


def time_attention() -> Iterator[Record]:
    for case in TIMED:
        step = Step(case, "cuda")
        step.with_pdl()
        layers = range(step.pool.layers)
        alone = graph_us([partial(step.only_attend, layer) for layer in layers])
        whole = graph_us([partial(step.attend, layer) for layer in layers])
        floor = case.floor_us + HEADS * VALUE * LATENT * 2 / COPY_BYTES_PER_US
        yield {"time": case.name, "us": whole, "attention_us": alone, "floor_us": floor}


def time_prompts() -> Iterator[Record]:
    """From queries to values; TFLOP/s are those of attention's two products."""
    for prefix, count in ((0, 1024), (0, 4096), (4096, 4096)):
        step = PromptStep(prefix, count, "cuda")
        for form, each in (("absorbed", 2 * LATENT + ROTATED), ("expanded", PLAIN + ROTATED + VALUE)):
            way = step.absorbed if form == "absorbed" else step.expanded
            us = graph_us([partial(way, layer) for layer in range(min(4, step.pool.layers))], replays=5)
            flops = 2 * HEADS * each * step.pairs
            yield {"time": f"chunk of {count} behind {prefix}, {form}", "us": us, "tflops": flops / us / 1e6}


def time_tilings() -> Iterator[Record]:
    """Of other cuts than the usual: whether the rule should be another."""
    for case in (
        Case(1, 768),
        Case(32, 768),
        Case(128, 768),
        Case(8, 8192),
        Case(8, 768, 4),
        Case(32, 768, 4),
    ):
        step = Step(case, "cuda")
        step.with_pdl()
        for tiling in TILINGS[16 if case.width == 1 else 64]:
            calls = [partial(step.attend, layer, tiling) for layer in range(step.pool.layers)]
            try:
                us = graph_us(calls, replays=5)
            except Exception as error:  # one that does not fit is one less
                yield {"tiling": case.name, "cut": str(tiling), "failed": repr(error)[:200]}
            else:
                yield {"tiling": case.name, "cut": str(tiling), "us": us}


def run(parts: dict[str, Part], say: Callable[[Record], None], deadline: float) -> bool:
    """Part by part. False if one failed, or one of its checks did."""
    fine = True
    for name, part in parts.items():
        began = time.monotonic()
        if began > deadline:
            say({"part": name, "skipped": "no time is left"})
            continue
        try:
            for record in part():
                fine = fine and record.get("ok", True)
                say({"part": name} | record)
        except Exception:
            fine = False
            say({"part": name, "traceback": traceback.format_exc()})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        say({"part": name, "seconds": time.monotonic() - began})
    return fine


def answers(end: float) -> Iterator[Record]:
    """One rank of DeepSeek-V3 with all layers; if that fails, with a few."""
    for layers in (61, 12):
        left = end - time.monotonic()
        if left < 30:
            yield {"layers": layers, "skipped": "no time is left"}
            return
        whole = True
        for record in _answer(layers, left):
            whole = whole and record.get("ok", True)
            yield record
        if whole:
            return


def _answer(layers: int, seconds: float) -> Iterator[Record]:
    """What the process says, as it says it; `ok` is whether it ended well."""
    command = [sys.executable, "-m", "tests.gpu.answer_latent", str(layers)]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        watch = threading.Timer(seconds, process.kill)
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        ok = process.wait() == 0
        watch.cancel()
        said.seek(0)
        yield {"layers": layers, "ok": ok} | ({} if ok else {"said": said.read()[-6000:]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.monotonic()
    parts: dict[str, Part] = {
        "rows": partial(check_rows, "cuda", (*COUNTS, 4096)),
        "attention": partial(check_attention, "cuda"),
        "prompts": partial(check_prompts, "cuda"),
        "time rows": time_rows,
        "time attention": time_attention,
        "time prompts": time_prompts,
        "engine": partial(answers, began + 225),
        "time tilings": time_tilings,
    }
    with asked.out.open("a") as file, torch.inference_mode():

        def say(record: Record) -> None:
            text = record.pop("traceback", None)
            print(json.dumps(record) if text is None else text, flush=True)
            print(json.dumps(record | ({"traceback": text} if text else {})), file=file, flush=True)

        fine = run(parts, say, began + 200)
        say({"verdict": "PASS" if fine else "FAIL"})
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
