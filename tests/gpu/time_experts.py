"""Experts and FP8 blocks on a GPU: are the kernels right, what do they cost, and what does a whole model?

    python -m tests.gpu.time_experts --out FILE [--seconds 240] [--parts kernels times engine]

Kernels are compared with plain torch on the GPU, at row counts from 1 to 4,096, and every comparison is shown
to notice a planted fault. Times are of launches in a CUDA graph, each of rows with other experts, so that
weights come from memory; beside them stands the floor, the bytes of the touched experts over 4.3 TB/s. Then a
model of Qwen3-30B-A3B's shape answers by `eyas bench one-batch`'s engine, with dummy weights: bf16, FP8.
A line of JSON is on disk as soon as it is known; a part that fails is told, and the next one follows.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from eyas.bench.kernels.timing import graph_us
from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.checkpoint.fp8 import RowRounding, widened
from eyas.engine.kernels.experts import combine, route
from eyas.engine.kernels.experts.group import GroupedChoices
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.launch.warm import KernelWarmup
from eyas.engine.kernels.products.blocks import Rows, StoredWeight, quantise
from eyas.engine.kernels.products.skinny import ProductLaunch
from eyas.engine.models.ops.device_step import product_float32
from tests.gpu.answer_experts import engine
from tests.gpu.report import Report

ROWS = (1, 2, 3, 8, 17, 32, 128, 512, 4096)
TIMED = (1, 2, 8, 32, 128, 512, 4096)
BYTES_PER_S, SETS = 4.3e12, 8  # sets of rows in a graph: their experts are others
WORST = 6e-3  # of a row, over its norm: bf16 rounds by 2e-3


@dataclass(frozen=True)
class Case:
    """One layer's experts, or one rank's share of them."""

    name: str
    hidden: int
    spec: ExpertsSpec
    fp8: bool
    powers: bool = False


def _spec(experts: int, per_row: int, width: int, **more: Any) -> ExpertsSpec:
    common: dict[str, Any] = {"scores": "softmax", "normalised": True}
    return ExpertsSpec(experts=experts, per_row=per_row, width=width, **(common | more))


V3: dict[str, Any] = {"scores": "sigmoid", "scale": 2.5, "corrected": True}
V3 |= {"groups": 8, "topk_groups": 4, "group_best": 2}
CASES = (
    Case("R8 fp8", 7168, _spec(256, 8, 256, **V3), True),
    Case("R8 ue8m0", 7168, _spec(256, 8, 256, **V3), True, True),
    Case("Qwen3-30B-A3B bf16", 2048, _spec(128, 8, 768), False),
    Case("Qwen3-30B-A3B fp8", 2048, _spec(128, 8, 768), True),
    Case("Mixtral-8x7B bf16", 4096, _spec(8, 2, 14336), False),
)
DENSE = ((2112, 7168), (7168, 2048), (4608, 7168), (7168, 2304), (160, 192))
"""n and k of FP8 products: R8's first, its way back, its dense gate and up, its down; and a ragged one."""


class Layer:
    """Weights, and the launches of one layer of experts, on "cuda" or "meta"."""

    def __init__(self, case: Case, device: str) -> None:
        spec, self.case, self.device = case.spec, case, device
        self._pdl = device != "cpu"  # where kernels are interpreted
        self.products = GroupedProducts(ProductLaunch.on(device, pdl=self._pdl))
        self.router = self.random(spec.experts, case.hidden) / case.hidden**0.5
        self.correction = None
        if spec.corrected:
            self.correction = torch.rand(spec.experts, device=device) * 0.2 - 0.1
        pair = ((spec.experts, 2 * spec.width, case.hidden), (spec.experts, case.hidden, spec.width))
        self.gate_up, self.down = (self.weight(*sizes) for sizes in pair)

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=self.device, dtype=torch.bfloat16)

    def weight(self, *sizes: int) -> StoredWeight:
        """Noise; in blocks with scales that differ by up to four times."""
        if not self.case.fp8:
            return StoredWeight(self.random(*sizes).div_(sizes[-1] ** 0.5))
        stored = torch.empty(*sizes, dtype=torch.float8_e4m3fn, device=self.device)
        for expert in stored.view(-1, *sizes[-2:]):
            expert.copy_(self.random(*sizes[-2:]).mul_(112).clamp_(-448, 448))
        shape = (*sizes[:-2], -(-sizes[-2] // 128), -(-sizes[-1] // 128))
        scales = torch.exp2(torch.randint(-1, 2, shape, device=self.device).float())
        return StoredWeight(stored, scales / (128 * sizes[-1] ** 0.5), RowRounding("block", self.case.powers))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], self.case.spec.experts, dtype=torch.float32, device=self.device)
        if self.device == "meta" and x.shape[0] > 128:
            return out
        padded = F.pad(self.router, (0, 0, 0, -self.router.shape[0] % 16))
        out = out.new_empty(x.shape[0], padded.shape[0])
        product_float32(x, padded, out, self.products.launch)
        return out

    def choose(self, logits: torch.Tensor) -> route.ChosenExperts:
        return route.choose(logits, self.case.spec, self.correction, pdl=self._pdl)

    def group(self, experts: torch.Tensor) -> GroupedChoices:
        return self.products.group(experts, (self.gate_up, self.down))

    def first(self, x: torch.Tensor, order: GroupedChoices) -> torch.Tensor:
        made = self.passed(x, order, GateActivation())
        assert isinstance(made, torch.Tensor)
        return made

    def passed(self, x: torch.Tensor, order: GroupedChoices, gate: GateActivation | None = None) -> Rows:
        """As `first`; rounded for `down`, where the tile can do that, if no gate is given."""
        gate = gate or GateActivation(rounding=self.down.rounding)
        return self.products.gate_up(x, self.gate_up, order, self.case.spec.per_row, gate)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """A layer's experts, from normalised rows to what is added."""
        chosen = self.choose(self.logits(x))
        order = self.group(chosen.experts)
        made = self.products.down(self.passed(x, order), self.down, order)
        return self.combine(made, chosen)

    def combine(self, made: torch.Tensor, chosen: route.ChosenExperts) -> torch.Tensor:
        return combine.combine(made, chosen.weights, None, self._pdl)


def recipe() -> None:
    """Every launch, on "meta", so that all kernels are compiled at once."""
    for case in CASES:
        layer = Layer(case, "meta")
        for rows in ROWS:
            layer.whole(x := layer.random(rows, case.hidden))
            layer.first(x, layer.group(layer.choose(layer.logits(x)).experts))
            combine.combine_add(
                layer.random(rows * case.spec.per_row, case.hidden),
                torch.empty(rows, case.spec.per_row, device="meta"),
                None,
                layer.random(rows, case.hidden),
                True,
            )
    layer = Layer(CASES[0], "meta")
    for n, k in DENSE:
        weight = layer.weight(n, k)
        for rows in ROWS:
            layer.products.dense(layer.random(rows, k), weight)


# --- right or wrong --------------------------------------------------------------------------------------


def meant(weight: StoredWeight, expert: int | None = None) -> torch.Tensor:
    """What a weight, or one expert's, stands for: float32."""
    if weight.scales is None:
        return (weight.stored if expert is None else weight.stored[expert]).float()
    if expert is None:
        return widened(weight.stored, weight.scales)
    return widened(weight.stored[expert], weight.scales[expert])


def rounded(x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """Rows as a product with this weight reads them, by the rule: float32."""
    wide = x.float()
    if weight.rounding is None:
        return wide
    cut = F.pad(wide, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    largest = cut.abs().amax(2, keepdim=True).clamp(min=1e-4)
    scales = largest / torch.full_like(largest, 448.0)  # by a number, CUDA multiplies with its reciprocal
    if weight.rounding.powers:
        scales = torch.exp2(scales.log2().ceil())
    return ((cut / scales).to(torch.float8_e4m3fn).float() * scales).flatten(1)[:, : x.shape[1]]


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, over its norm; infinite where something is no number."""
    error = ((found.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-20)).max().item()
    return error if error == error else float("inf")


def plain_products(
    layer: Layer, x: torch.Tensor, experts: torch.Tensor, inner: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gate_up` by choice, and `down` of `inner` (by choice): expert by expert, in float32."""
    spec, flat = layer.case.spec, experts.flatten()
    rows, read = rounded(x, layer.gate_up), rounded(inner, layer.down)
    first = torch.empty(flat.shape[0], spec.width, device=layer.device)
    second = torch.empty(flat.shape[0], layer.case.hidden, device=layer.device)
    for expert in flat.unique().tolist():
        at = (flat == expert).nonzero()[:, 0]
        gate, up = (rows[at // spec.per_row] @ meant(layer.gate_up, expert).t()).chunk(2, 1)
        first[at] = F.silu(gate) * up
        second[at] = read[at] @ meant(layer.down, expert).t()
    return first, second


def plain_choice(layer: Layer, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights, by sorting."""
    spec, logits = layer.case.spec, logits[:, : layer.case.spec.experts]
    scores = 1.0 / (1.0 + torch.exp(-logits)) if spec.scores == "sigmoid" else logits.softmax(1)
    wanted = scores if layer.correction is None else scores + layer.correction
    if spec.topk_groups < spec.groups:
        grouped = wanted.unflatten(1, (spec.groups, -1))
        good = grouped.topk(spec.group_best, -1).values.sum(-1)
        kept = good.sort(stable=True, descending=True).indices[:, : spec.topk_groups]
        closed = torch.ones_like(good, dtype=torch.bool).scatter_(1, kept, False)
        wanted = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)
    experts = wanted.sort(stable=True, descending=True, dim=1).indices[:, : spec.per_row]
    weights = scores.gather(1, experts)
    if spec.normalised:
        weights = weights / weights.sum(1, keepdim=True)
    return experts, weights * spec.scale


def poisoned(layer: Layer, inner: torch.Tensor, order: GroupedChoices) -> torch.Tensor:
    """`down`, in memory that was full of NaN."""
    torch.full((inner.shape[0], layer.case.hidden), float("nan"), dtype=inner.dtype, device=inner.device)
    return layer.products.down(inner, layer.down, order)


def rounds(layer: Layer, passed: Rows, inner: torch.Tensor) -> bool:
    """Whether what the gate passes is what `quantise` makes of it, to the bit."""
    found, plain = (layer.down.read(made) for made in (passed, inner))
    if isinstance(found, torch.Tensor) or isinstance(plain, torch.Tensor):
        return found is passed and torch.equal(found, plain)
    same = torch.equal(found.stored.view(torch.uint8), plain.stored.view(torch.uint8))
    return same and torch.equal(found.scales, plain.scales)


def check_layer(layer: Layer, rows: int) -> dict[str, Any]:
    """Every kernel's worst error, and whether planted faults are noticed."""
    x, spec = layer.random(rows, layer.case.hidden), layer.case.spec
    logits = layer.logits(x)
    exact = x.float() @ layer.router.float().t()
    chosen = layer.choose(logits)
    experts, weights = plain_choice(layer, logits)
    order = layer.group(chosen.experts)
    flat = chosen.experts.flatten()
    same_order = torch.equal(order.order.long(), flat.long().sort(stable=True).indices)
    sorted_inner = layer.first(x, order)
    inner = torch.empty_like(sorted_inner)
    inner[order.order.long()] = sorted_inner
    made = poisoned(layer, sorted_inner, order)
    first, second = plain_products(layer, x, chosen.experts, inner)
    mixed = layer.combine(made, chosen)
    total = torch.einsum("rkh,rk->rh", made.float().unflatten(0, (rows, -1)), chosen.weights)
    shifted = GroupedChoices(order.order.roll(1), order.blocks, order.rows)
    dropped = GroupedChoices(order.order, order.blocks.clone(), order.rows)
    dropped.blocks[2 * order.most] -= 1  # one choice that no block has
    errors = {
        "router": worst(logits[:, : spec.experts], exact),
        "gate_up": worst(inner, first),
        "down": worst(made, second),
        "combine": worst(mixed, total),
        "weights": worst(chosen.weights, weights),
    }
    same = (chosen.experts.long() == experts).float().mean().item()
    to_the_bit = rounds(layer, layer.passed(x, order), sorted_inner)
    passed = max(errors.values()) < WORST and errors["router"] < 1e-4 and same_order and to_the_bit
    power = {
        "a neighbour's expert": worst(inner, first.roll(1, 0)),
        "a dropped choice": worst(poisoned(layer, sorted_inner, dropped), second),
    }
    if rows > 1:
        power["an offset"] = worst(layer.first(x, shifted), sorted_inner.float())
    noticed = all(value > 10 * WORST for value in power.values())
    told = {"noticed": noticed, "same_experts": same, "rounding_to_the_bit": to_the_bit}
    return {"ok": bool(passed and noticed and same > 0.999), **told, **errors}


def check_scale(layer: Layer, rows: int) -> dict[str, Any]:
    """A single wrong scale of a single block is noticed."""
    assert layer.gate_up.scales is not None
    x = layer.random(rows, layer.case.hidden)
    experts = layer.choose(layer.logits(x)).experts
    order = layer.group(experts)
    before = layer.first(x, order).float()
    scales = layer.gate_up.scales.clone()
    scales[int(experts[0, 0]), 0, 0] *= 4.0
    spoilt = replace(layer.gate_up, scales=scales)
    after = layer.products.gate_up(x, spoilt, order, layer.case.spec.per_row, GateActivation())
    return {"ok": worst(after, before) > 3 * WORST, "error": worst(after, before)}


def check_dense(n: int, k: int) -> dict[str, Any]:
    """An FP8 product at every number of rows, and its rows' rounding to the bit."""
    layer = Layer(Case("dense", 128, _spec(2, 1, 128), True), "cuda")
    weight, errors = layer.weight(n, k), {}
    same = True
    for rows in ROWS:
        x = layer.random(rows, k)
        found = quantise(x, RowRounding("block"))
        each = found.scales.repeat_interleave(128, 1)[:, :k]
        same &= torch.equal(found.stored.float() * each, rounded(x, weight))
        expected = rounded(x, weight) @ meant(weight).t()
        errors[rows] = worst(layer.products.dense(x, weight), expected)
        assert worst(layer.products.dense(x, weight).roll(1, 1), expected) > 10 * WORST
    return {"ok": max(errors.values()) < WORST and same, "rounding_to_the_bit": same, "errors": errors}


# --- times -----------------------------------------------------------------------------------------------


def times(layer: Layer, rows: int) -> dict[str, Any]:
    """Microseconds of each launch, of all of a layer, and the floor."""
    spec, case = layer.case.spec, layer.case
    sets = []
    for _ in range(SETS):
        x = layer.random(rows, case.hidden)
        chosen = layer.choose(layer.logits(x))
        order = layer.group(chosen.experts)
        inner = layer.passed(x, order)
        made = layer.products.down(inner, layer.down, order)
        sets.append((x, layer.logits(x), chosen, order, inner, made))
    calls: dict[str, list[Callable[[], object]]] = {
        "router": [lambda s=s: layer.logits(s[0]) for s in sets],
        "choose": [lambda s=s: layer.choose(s[1]) for s in sets],
        "group": [lambda s=s: layer.group(s[2].experts) for s in sets],
        "gate_up": [lambda s=s: layer.passed(s[0], s[3]) for s in sets],
        "down": [lambda s=s: layer.products.down(s[4], layer.down, s[3]) for s in sets],
        "combine": [lambda s=s: layer.combine(s[5], s[2]) for s in sets],
        "layer": [lambda s=s: layer.whole(s[0]) for s in sets],
    }
    found: dict[str, Any] = {name: round(graph_us(each), 2) for name, each in calls.items()}
    touched = sum(len(s[2].experts.unique()) for s in sets) / SETS
    one = 3 * spec.width * case.hidden * (1 if case.fp8 else 2)
    flops = 6 * rows * spec.per_row * spec.width * case.hidden
    found |= {"experts": touched, "floor": round(touched * one / BYTES_PER_S * 1e6, 2)}
    found["tflops"] = round(flops / (found["gate_up"] + found["down"]) / 1e6, 1)
    return found


# --- the command -----------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--parts", nargs="+", default=["kernels", "times", "engine"])
    args = parser.parse_args(argv)
    report = Report(args.out, args.seconds)
    began = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False
    report.run("compile", lambda: {"kernels": KernelWarmup(
        "tests.gpu.time_experts:recipe", (), 90, os.cpu_count() or 1).wait().kernels})  # fmt: skip
    print(f"     compiled in {time.monotonic() - began:.0f} s", flush=True)
    if "kernels" in args.parts:
        for n, k in reversed(DENSE):
            report.run(f"dense {n} x {k}", lambda n=n, k=k: check_dense(n, k))
    for case in CASES:
        if {"kernels", "times"} & set(args.parts):
            _measure(report, case, args.parts)
    if "engine" in args.parts:
        for fp8 in (False, True):
            _answer(report, fp8)
    print(f"{'FAIL' if report.failed else 'PASS'}: {report.failed} parts failed", flush=True)
    return int(bool(report.failed))


def _measure(report: Report, case: Case, parts: list[str]) -> None:
    layers: list[Layer] = []
    report.run(f"{case.name}: weights", lambda: layers.append(Layer(case, "cuda")) or {})
    if not layers:
        return
    (layer,) = layers
    if "kernels" in parts:
        for rows in ROWS:
            report.run(f"{case.name}, {rows} rows", lambda rows=rows: check_layer(layer, rows))
        if case.fp8:
            report.run(f"{case.name}: a wrong scale", lambda: check_scale(layer, 8))
    if "times" in parts and not case.powers:
        for rows in TIMED:
            report.run(f"{case.name}, us at {rows} rows", lambda rows=rows: times(layer, rows))


def _answer(report: Report, fp8: bool) -> None:
    name = "Qwen3-30B-A3B " + ("fp8" if fp8 else "bf16")
    try:
        for line in engine(fp8, report.left):
            report.tell(name, line)
    except Exception:
        traceback.print_exc()
        report.tell(name, {"ok": False, "error": traceback.format_exc()[-800:]})


if __name__ == "__main__":
    sys.exit(main())
