"""Experts by the default verbs on a GPU: the kernels' results, and CUDA graphs that read nothing of the host.

pytest -m gpu tests/gpu/test_default_experts_on_gpu.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.formats.dense import DenseProjection
from eyas.engine.kernels.experts import combine
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.products.blocks import NormedRows, StoredWeight
from eyas.engine.kernels.products.skinny import ProductLaunch
from eyas.engine.layers.activations import ACTIVATIONS, behind_a_gate
from eyas.engine.models.ops import expert_products
from eyas.engine.models.ops.device_machine import router_tiles
from eyas.engine.models.ops.device_step import Forward, LayerContext
from eyas.engine.models.ops.parts import ExpertsPart, GatedPart, OutPart, RouterPart
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
EXPERTS, PER_ROW, HIDDEN, WIDTH = 16, 4, 256, 128
CLOSE = 1e-2  # of a row, over its norm: products are rounded to bf16 before the gate here
SPEC = ExpertsSpec(
    width=WIDTH,
    experts=EXPERTS,
    per_row=PER_ROW,
    scores="sigmoid",
    normalised=True,
    scale=2.5,
    corrected=True,
    groups=4,
    topk_groups=2,
    group_best=2,
)


def noise(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device=DEVICE)


class Layer:
    """Routes rows and sums what experts make of them, with a gate that kernels know or an unknown one."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        router, correction = noise(EXPERTS, HIDDEN).mul_(0.1), torch.randn(EXPERTS, device=DEVICE)
        forth = DenseProjection(StoredWeight(noise(EXPERTS, 2 * WIDTH, HIDDEN).div_(HIDDEN**0.5)))
        back = DenseProjection(StoredWeight(noise(EXPERTS, HIDDEN, WIDTH).div_(WIDTH**0.5)))
        tiles = router_tiles(EXPERTS, HIDDEN)
        self.router = RouterPart(SPEC, router, None, correction, tiles, range(EXPERTS), False)
        gated = GatedPart(forth, behind_a_gate(ACTIVATIONS["silu"]), GateActivation(), False)
        self.known = ExpertsPart(gated, OutPart(back), PER_ROW)
        self.unknown = replace(self.known, gated=replace(gated, gate=None))
        launch, group = ProductLaunch.on(DEVICE, pdl=True), ProcessGroup(RankInfo(), "cpu")
        context = LayerContext(group, launch, None, {})  # type: ignore[arg-type]
        self._step = Forward(None, context)  # type: ignore[arg-type]

    def __call__(self, x: torch.Tensor, part: ExpertsPart) -> torch.Tensor:
        routed = expert_products.routed(NormedRows(x), self.router, self._step)
        made = expert_products.made(routed, part, self._step)
        return combine.combine(made, routed.chosen.weights, pdl=True)


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return float(error.max())


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_defaults_are_the_kernels(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Layer(), noise(rows, HIDDEN)
    expected = layer(x, layer.known)
    monkeypatch.setattr(expert_products, "KNOWN_SCORES", ())
    found = layer(x, layer.unknown)
    assert worst(found, expected) < CLOSE < worst(found.roll(1, 1), expected)


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_a_graph_of_defaults_takes_other_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases, and scores that no kernel has: what is captured is what is launched one by one."""
    monkeypatch.setattr(expert_products, "KNOWN_SCORES", ())
    layer, x = Layer(), noise(rows, HIDDEN)
    gated, out = layer.unknown.gated, layer.unknown.out
    biased = replace(
        layer.unknown,
        gated=replace(gated, bias=noise(EXPERTS, 2 * WIDTH)),
        out=replace(out, bias=noise(EXPERTS, HIDDEN)),
    )
    layer(x, biased)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = layer(x, biased)
    for _ in range(2):
        x.copy_(noise(rows, HIDDEN))
        graph.replay()
        assert torch.equal(made, layer(x.clone(), biased))
        assert worst(made, layer(x, layer.unknown)) > CLOSE
