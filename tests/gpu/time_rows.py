"""Sampling and the row kernels on a GPU: do they do as specified, and what do the latter cost?

    python -m tests.gpu.time_rows --out DIR

Times are of a launch in a CUDA graph of many, medians of replays; bytes are those that must move at least.
The shapes are those of Llama-3.1-8B. Every line is printed as it is found, and all are saved as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from eyas.bench.kernels.timing import graph_us
from eyas.common.params import SamplingParams
from eyas.engine.kernels.products import rows
from eyas.engine.kernels.products.skinny import KvRows, RotaryInput
from eyas.engine.kernels.sampling import sample
from eyas.engine.sampling import sampler

HIDDEN, INNER, VOCAB, PAGE = 4096, 14336, 128_256, 16
HEADS = rows.HeadLayout(32, 8, 128)
LAUNCHES, REPLAYS = 20, 15  # of a kernel in a graph, of the graph
EPS = 1e-5
PEAKED, FLAT = 4.0, 1.0  # standard deviations of logits: nuclei of tens of ids, and of tens of thousands

WAYS = {
    "greedy": (SamplingParams(temperature=0.0), PEAKED),
    "temperature": (SamplingParams(seed=1), PEAKED),
    "top_p 0.95": (SamplingParams(seed=1, top_p=0.95), PEAKED),
    "top_k 20, top_p 0.95": (SamplingParams(seed=1, top_k=20, top_p=0.95), PEAKED),
    "top_p 0.95, flat": (SamplingParams(seed=1, top_p=0.95), FLAT),
    "top_k 20, top_p 0.95, flat": (SamplingParams(seed=1, top_k=20, top_p=0.95), FLAT),
    "min_p 0.05": (SamplingParams(seed=1, min_p=0.05), PEAKED),
}

Call = Callable[[], object]


class Sampling:
    """N rows, each with its own slot of the given parameters and its own seed."""

    def __init__(self, params: list[SamplingParams], vocab: int, scale: float) -> None:
        n = len(params)
        self.rows = [
            sampler.SampledRow(SamplingParams(**{**_fields(p), "seed": 2**40 + i}), 0, 100 + i, (), (), ())
            for i, p in enumerate(params)
        ]
        self.tables = SimpleNamespace(
            **{name: _column([getattr(p, name) for p in params], torch.float32) for name in _FLOATS},
            top_k=_column([p.top_k for p in params], torch.int32),
            seed=_column([2**40 + i for i in range(n)], torch.int64),
            choice=_column([0] * n, torch.int32),
        )
        slots, places = (
            _column(list(range(n)), torch.int32),
            _column([100 + i for i in range(n)], torch.int32),
        )
        self.who = sample.SampledRows(slots, places)
        self.logits = torch.randn(n, vocab, device="cuda") * scale
        self.out = torch.full((n,), -1, dtype=torch.int32, device="cuda")

    def choose(self, pdl: bool) -> None:
        sample.choose(self.logits, self.who, self.tables, self.out, pdl)


_FLOATS = ("temperature", "top_p", "min_p")


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def _column(values: list, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cuda")


def agreement() -> Iterator[str]:
    """Tokens of mixed rows against the plain sampler's, which runs on the CPU."""
    for scale, name in ((PEAKED, "peaked"), (FLAT, "flat")):
        job = Sampling([params for params, _ in WAYS.values()] * 5, VOCAB, scale)
        job.choose(pdl=False)
        tokens = job.out.tolist()
        expected = sampler.sample(job.logits.cpu(), job.rows).tokens
        different = [i % len(WAYS) for i in range(len(tokens)) if tokens[i] != expected[i]]
        yield f"choose, {name}: {len(different)} of {len(tokens)} tokens differ {different}"
        job.choose(pdl=True)
        yield f"choose, {name}: overlapped launches give the same: {job.out.tolist() == tokens}"
    x, residual = (torch.randn(100, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    total = x + residual
    normed = rows.add_norm(x, residual, rows.NormInput(EPS)).plain
    error = (normed.float() - F.rms_norm(total, (HIDDEN,), None, EPS).float()).abs().max().item()
    yield f"add_norm: the sum is torch's: {torch.equal(total, residual)}; largest difference {error:.1e}"


def row_times() -> Iterator[tuple[str, float, int]]:
    """(what, microseconds, least bytes)."""
    layer = torch.empty(1024, 2, 2, PAGE, HEADS.kv, HEADS.dim, device="cuda", dtype=torch.bfloat16)[:, 0]
    table = torch.randn(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16)
    gain = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(2, 16_384, HEADS.dim // 2, device="cuda")
    for m in (1, 8, 64, 256, 2048, 8192):
        x, residual = (torch.randn(m, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        qkv = torch.randn(m, (HEADS.q + 2 * HEADS.kv) * HEADS.dim, device="cuda", dtype=torch.bfloat16)
        gate_up = torch.randn(m, 2 * INNER, device="cuda", dtype=torch.bfloat16)
        q = torch.empty(m, HEADS.q, HEADS.dim, device="cuda", dtype=torch.bfloat16)
        places = torch.randperm(1024 * PAGE, device="cuda")[:m].to(torch.int32)
        rotation, kv = RotaryInput(*angles, places), KvRows(layer, places)
        tokens = torch.randint(VOCAB, (m,), device="cuda", dtype=torch.int32)
        calls: dict[str, tuple[Call, int]] = {
            "norm": (lambda x=x: rows.norm(x, EPS, gain), 2 * x.nbytes),
            "add_norm": (
                lambda x=x, r=residual: rows.add_norm(x, r, rows.NormInput(EPS)).plain,
                4 * x.nbytes,
            ),
            "embed": (lambda t=tokens: rows.embed(t, table), 2 * x.nbytes),
            "act_mul": (lambda g=gate_up: rows.act_mul(g), gate_up.nbytes * 3 // 2),
            "rope_write": (lambda a=(qkv, HEADS, q, rotation, kv): rows.rope_write(*a), 2 * qkv.nbytes),
        }
        if m <= 64:
            calls["embed, sums, overlapped"] = (
                lambda t=tokens: rows.embed(t, table, sums=True, pdl=True),
                2 * x.nbytes,
            )
            calls["norm, overlapped"] = lambda x=x: rows.norm(x, EPS, gain, pdl=True), 2 * x.nbytes
        for name, (call, least) in calls.items():
            yield f"{name} m {m}", microseconds(call), least


def microseconds(call: Call) -> float:
    """Of one `call`, the median over replays of a graph of many."""
    return graph_us([call] * LAUNCHES, REPLAYS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=38.0, help="stop after so long")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began, found = time.monotonic(), {}
    for line in agreement():
        print(f"{time.monotonic() - began:5.1f} s  {line}", flush=True)
    for name, us, least in row_times():
        found[name] = {"us": us, "gb_per_s": least / us / 1e3}
        print(f"{name:60s} {us:8.2f} us {least / us / 1e3:7.0f} GB/s", flush=True)
        (args.out / "time_rows.json").write_text(json.dumps(found, indent=1))
        if time.monotonic() - began > args.seconds:
            return print("out of time")


if __name__ == "__main__":
    main()
