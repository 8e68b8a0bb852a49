"""Every kernel of experts and FP8 blocks compiles for Hopper, for narrow and wide steps. Nothing runs."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.backends.nvidia.compiler import get_ptxas

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.checkpoint.quantized import RowScales
from eyas.engine.formats.fp8 import Fp8Projection
from eyas.engine.kernels.experts import combine, route
from eyas.engine.kernels.experts.group import group
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.launch.warm import KernelWarmup
from eyas.engine.kernels.products import single
from eyas.engine.kernels.products.blocks import StoredWeight, quantise
from eyas.engine.kernels.products.fp4 import PARTS, UNIT, Fp4Weight
from eyas.engine.kernels.products.rows import NormInput, normed
from eyas.engine.kernels.products.skinny import ProductLaunch
from eyas.engine.parallel.one_shot import OneShot
from eyas.engine.parallel.row_exchange import RowExchange

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HIDDEN = 7168
V3 = ExpertsSpec(
    width=256,
    experts=256,
    per_row=8,
    scores="sigmoid",
    normalised=True,
    scale=2.5,
    corrected=True,
    groups=8,
    topk_groups=4,
    group_best=2,
)
PLAIN = ExpertsSpec(width=256, experts=8, per_row=2, scores="softmax", normalised=True)


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta")


def weight_of(*sizes: int, rows: RowScales) -> StoredWeight:
    """`rows`: how those are rounded that meet it; "": it is bf16."""
    if not rows:
        return StoredWeight(empty(*sizes))
    if rows != "block":
        parts = empty(*sizes, dtype=torch.float8_e4m3fn), empty(*sizes[:-1], dtype=torch.float32)
        return StoredWeight(*parts, RowRounding(rows, scale=0.5))
    scales = (*sizes[:-2], -(-sizes[-2] // 128), -(-sizes[-1] // 128))
    stored = empty(*sizes, dtype=torch.float8_e4m3fn)
    return StoredWeight(stored, empty(*scales, dtype=torch.float32), RowRounding("block"))


def routed() -> None:
    for spec, rows in ((V3, 3), (PLAIN, 300)):
        correction = empty(spec.experts, dtype=torch.float32) if spec.corrected else None
        logits = empty(rows, spec.experts, dtype=torch.float32)
        for uniform in (False, True):
            chosen = route.choose(logits, spec, correction, shared=uniform, uniform=uniform, pdl=True)
            held = route.LocalExperts(range(spec.experts // 2), range(rows), empty(rows, dtype=torch.int32))
            route.choose_local(
                logits, route.Router(spec, correction, uniform), held, uniform=uniform, pdl=True
            )
        table, loads = empty(spec.experts, 3, dtype=torch.int32), empty(spec.experts, dtype=torch.int32)
        held = replace(held, copies=route.ExpertCopies(table, loads))
        route.choose_local(logits, route.Router(spec, correction), held, pdl=True)
        group(chosen.experts, spec.experts + 1, 64, pdl=True)
        made = empty(chosen.experts.numel(), HIDDEN)
        combine.combine(made, chosen.weights, combine.BesideRows(empty(rows, HIDDEN)), pdl=True)
        combine.combine_local(made, chosen.weights, chosen.experts, pdl=True)
        if rows < 128:
            combine.combine_add(made, chosen.weights, None, empty(rows, HIDDEN), pdl=True)
    for count in (64, 4096, 40_000):
        group(empty(count, dtype=torch.int32), V3.experts + 1, 64, pdl=True)


def exchanged() -> None:
    """Rows of two ranks, together and summed for their owners."""
    one_shot = OneShot(1, empty(2, dtype=torch.int64), pdl=True)
    one_shot.join(empty(3, HIDDEN), empty(6, HIDDEN))
    one_shot.join(empty(16, dtype=torch.int32), empty(32, dtype=torch.int32))
    one_shot.sum_for_owners(empty(6, HIDDEN), empty(3, HIDDEN))
    rows = RowExchange(1, empty(2, dtype=torch.int64), pdl=True)
    rows.gather(empty(300, HIDDEN), empty(600, HIDDEN))
    rows.sum_for_owners(empty(600, HIDDEN), empty(300, HIDDEN))


def bf16() -> None:
    products("")


def fp8() -> None:
    products("block")


def channels() -> None:
    products("token")
    quantise(empty(3, HIDDEN), RowRounding("tensor", scale=0.5), pdl=True)


def products(rows: RowScales) -> None:
    """Few rows, with k split; and many."""
    shared = GroupedProducts(ProductLaunch.on("meta", pdl=True))
    gate_up = weight_of(V3.experts, 2 * V3.width, HIDDEN, rows=rows)
    down = weight_of(V3.experts, HIDDEN, V3.width, rows=rows)
    for count in (2, 4096):
        experts = empty(count, V3.per_row, dtype=torch.int32)
        order, gate = shared.group(experts, (gate_up, down)), GateActivation(rounding=down.rounding)
        how = NormInput(1e-6, empty(HIDDEN), gate_up.rounding)
        read = normed(empty(count, HIDDEN), how, pdl=True).read_by(gate_up.rounding)
        inner = shared.gate_up(read, gate_up, order, V3.per_row, gate)
        assert isinstance(inner, torch.Tensor) == (rows != "block")
        shared.down(inner, down, order)
        for many in (count, 16):
            weight, x = weight_of(2112, HIDDEN, rows=rows), empty(many, HIDDEN)
            Fp8Projection(weight).apply(x, shared) if rows else shared.dense(x, weight)


def packed() -> None:
    """gpt-oss's experts in MXFP4, with biases and a clamped gate: for one row, few and many."""
    experts, width, gate = 32, 2880, GateActivation(clamped=True)
    shared = GroupedProducts(ProductLaunch.on("meta", pdl=True))
    steps = -(-width // (PARTS * UNIT))
    weights = [
        Fp4Weight(
            empty(experts, steps, n, UNIT, dtype=torch.int16),
            empty(experts, steps, n, dtype=torch.int32),
            width,
            torch.bfloat16,
        )
        for n in (2 * width, width)
    ]
    for count in (1, 32, 4096):
        order = shared.group(empty(count, 4, dtype=torch.int32), (weights[0], weights[1]))
        bias = empty(experts, 2 * width)
        inner = shared.gate_up(empty(count, width), weights[0], order, 4, gate, bias)
        shared.down(inner, weights[1], order, empty(experts, width))


def one_row() -> None:
    """Of every type that experts have, and few rows of a router."""
    for rows in RowScales.__args__:
        gate_up = weight_of(V3.experts + 1, 2 * V3.width, HIDDEN, rows=rows)
        down = weight_of(V3.experts + 1, HIDDEN, V3.width, rows=rows)
        chosen = route.ChosenExperts(empty(9, dtype=torch.int32), empty(9, dtype=torch.float32))
        x = empty(1, HIDDEN)
        read = gate_up.read(x, pdl=True)
        inner = single.gated(read, gate_up, chosen.experts, pdl=True)
        if single.can_round(down):
            single.back(inner, down, chosen, pdl=True)
            single.back_add(inner, down, chosen, x, pdl=True)
        single.dense(read, weight_of(2112, HIDDEN, rows=rows), pdl=True)
    single.dense(empty(8, HIDDEN), StoredWeight(empty(V3.experts, HIDDEN)), True, torch.float32)


def spills(code: Path) -> bool:
    """Whether a kernel has more numbers than its registers hold."""
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(code), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "bytes spill stores" in said
    return " 0 bytes spill stores" not in said


PRODUCTS = "product_kernel", "_by_depth", "_sweep"
KERNELS = {"routed": 25, "exchanged": 4, "bf16": 11, "fp8": 15, "channels": 14, "one_row": 15, "packed": 12}


@pytest.mark.parametrize(("recipe", "kernels"), KERNELS.items())
def test_kernels_compile(recipe: str, kernels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what the warm-up sets is undone
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    KernelWarmup(f"tests.unit.test_experts_code:{recipe}", (), 90, processes=2).wait()
    found = [path.read_text() for path in tmp_path.rglob("*.ptx")]
    assert len(found) == kernels
    assert not any(map(spills, tmp_path.rglob("*.ptx")))
    if recipe not in ("routed", "exchanged", "one_row", "packed"):
        products = [code for code in found if any(name in code for name in PRODUCTS)]
        tall = PRODUCTS[1:] if recipe != "bf16" else PRODUCTS[1:2]  # in bf16 k has more than two steps
        assert all(any(name in code for code in products) for name in tall)
        assert all("wgmma" in code and ("e4m3" in code) == (recipe != "bf16") for code in products)
        assert all(".local" not in code for code in products)
        assert any("_few" in code and "mma.sync" in code for code in found) == (recipe == "fp8")
        assert sum("prefetch.global.L2" in code for code in products) == 1  # dense, of few rows
