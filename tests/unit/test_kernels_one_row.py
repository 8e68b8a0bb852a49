"""One row through its packed experts by products alone: as by a launch for each part of the way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.kernels.experts import combine, one_row, route
from eyas.engine.kernels.experts.group import OneRow
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import shape_of
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile, key_of
from eyas.engine.kernels.experts.one_row import JudgedRow
from eyas.engine.kernels.experts.route import ChosenExperts, Router
from eyas.engine.kernels.experts.route_rows import RouterProduct
from eyas.engine.kernels.experts.row_choice import RowChoice
from eyas.engine.kernels.products.skinny import ProductLaunch
from tests.unit.biased_experts import KINDS
from tests.unit.grouped_products import DEVICE, PDL, random
from tests.unit.packed_experts import BACK, CLOSE, DTYPE, EXPERTS, FORTH, HIDDEN, biases, packed
from tests.unit.router_kinds import EPS, SIGMOID, SOFTMAX

GATE = KINDS["clamped_swiglu"]
SCORED = {1: (1, HIDDEN), 2: (HIDDEN,), 3: (16, HIDDEN)}
SPECS = {
    "softmax": replace(SOFTMAX, experts=EXPERTS, per_row=2),
    "sigmoid": replace(SIGMOID, experts=EXPERTS, corrected=False, normalised=False),
}


def test_one_rows_norm_and_the_routers_product_in_one_launch() -> None:
    """Of as many of its rows as are wanted, a shared expert's among them, with their bias."""
    x, gain, weight = (random(*sides, seed=seed).to(DEVICE, DTYPE) for seed, sides in SCORED.items())
    bias = torch.randn(len(weight), device=DEVICE)
    router = Router(SPECS["softmax"], None, True, bias)
    normed, logits = one_row.score(x, RouterProduct(weight, gain, EPS, router), EXPERTS + 1, PDL)
    wide = x.float() * (x.float().square().mean() + EPS).rsqrt() * gain.float()
    assert torch.allclose(normed.float(), wide, rtol=CLOSE, atol=CLOSE) and logits.shape == (EXPERTS + 1,)
    assert torch.allclose(logits, (wide @ weight.float().t() + bias)[0, : EXPERTS + 1], rtol=1e-3, atol=1e-3)


class Layer:
    """A row, its router, and packed experts."""

    def __init__(self, name: str, split: int, uniform: bool = False) -> None:
        torch.manual_seed(len(name) + uniform)
        self.spec, self.uniform = SPECS[name], uniform
        self.weights = packed(FORTH), packed(BACK)
        self.biases = [each.to(DEVICE, DTYPE) for each in biases()]
        self.x, self.gain = (
            random(1, HIDDEN, seed=1).to(DEVICE, DTYPE),
            random(HIDDEN, seed=2).to(DEVICE, DTYPE),
        )
        self.router = random(8, HIDDEN, seed=3).to(DEVICE, DTYPE)
        bias = torch.randn(8, device=DEVICE) if self.spec.router_bias else None
        self.product = RouterProduct(
            self.router, self.gain, EPS, Router(self.spec, None, False, bias), uniform
        )
        tile, gates = GroupedTile(8, 64, 128, 4, 3, split=split), (GATE, None)
        shapes = (shape_of(weight, gate) for weight, gate in zip(self.weights, gates, strict=True))
        table = {key_of(shape, self.spec.per_row): tile for shape in shapes}
        self.products = GroupedProducts(ProductLaunch.on(DEVICE, pdl=PDL), table)

    def judged(self) -> JudgedRow:
        choice = RowChoice.of(self.spec, self.uniform)
        assert choice is not None and one_row.can_judge(1, HIDDEN, self.spec)
        return one_row.judge(self.x, self.product, choice, PDL)

    def inner(self, normed: torch.Tensor, order: OneRow) -> torch.Tensor:
        per_row, forth = self.spec.per_row, self.weights[0]
        made = self.products.gate_up(normed, forth, order, per_row, GATE, self.biases[0])
        assert isinstance(made, torch.Tensor)
        return made

    def way(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the experts' gates pass; the row at the end, and its sums of squares."""
        row = self.judged()
        order = row.order(8)
        inner = self.inner(row.normed, order)
        task = self.products.down_task(inner, self.weights[1], order, self.biases[1])
        out, sums = one_row.back_add(task, row, self.x, self.products.launch)
        assert not self.products.launch.tickets.any()
        return inner, out, sums

    def plain(self, normed: torch.Tensor, chosen: ChosenExperts) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by three launches."""
        order = OneRow(chosen.experts.view(-1), 8)
        inner = self.inner(normed, order)
        made = self.products.down(inner, self.weights[1], order, self.biases[1])
        return inner, combine.combine_add(made, chosen.weights, None, self.x, PDL)[0]

    def chosen(self, logits: torch.Tensor) -> ChosenExperts:
        router = replace(self.product.router, bias=None)
        return route.choose_local(logits[None], router, None, uniform=self.uniform)


@pytest.mark.parametrize(
    ("name", "split", "uniform"), [("softmax", 1, False), ("sigmoid", 2, False), ("softmax", 2, True)]
)
def test_a_row_goes_to_its_experts_and_back(name: str, split: int, uniform: bool) -> None:
    layer = Layer(name, split, uniform)
    x, row = layer.x.float(), layer.judged()
    normed = x * (x.square().mean() + EPS).rsqrt() * layer.gain.float()
    torch.testing.assert_close(row.normed.float(), normed, rtol=CLOSE, atol=CLOSE)
    logits = normed @ layer.router.float().t()
    if layer.product.router.bias is not None:
        logits += layer.product.router.bias
    torch.testing.assert_close(
        row.logits, logits[0, :EXPERTS], rtol=1e-2 if DTYPE is torch.bfloat16 else 1e-4, atol=1e-3
    )
    inner, out, sums = layer.way()
    expected = layer.plain(row.normed, layer.chosen(row.logits))
    for found, want in zip((inner, out), expected, strict=True):
        torch.testing.assert_close(found.float(), want.float(), rtol=10 * CLOSE, atol=10 * CLOSE)
    torch.testing.assert_close(sums[:, 0].sum(), out.float().square().sum(), rtol=1e-3, atol=0)
    swapped = layer.chosen(row.logits)
    swapped = ChosenExperts(swapped.experts, swapped.weights.flip(1) + 0.25)
    assert not torch.allclose(out.float(), layer.plain(row.normed, swapped)[1].float(), rtol=0.05)


@pytest.mark.parametrize("name", SPECS)
def test_of_equals_the_first_and_what_is_no_number_last(name: str) -> None:
    layer = Layer(name, 1)
    logits = torch.tensor([float("nan"), 0.5, 2.0, 2.0], device=DEVICE)
    choice = RowChoice.of(layer.spec, False)
    assert choice is not None
    found = layer.inner(layer.x, JudgedRow(layer.x, logits, choice).order(8))
    experts = [2, 3, 1][: layer.spec.per_row]
    order = OneRow(torch.tensor(experts, dtype=torch.int32, device=DEVICE), 8)
    assert torch.equal(found, layer.inner(layer.x, order))


def test_what_it_leaves_to_others() -> None:
    assert RowChoice.of(replace(SOFTMAX, groups=4, topk_groups=2), False) is None
    assert RowChoice.of(SIGMOID, False) is None and not one_row.can_judge(2, HIDDEN, SOFTMAX)
    assert not one_row.can_judge(1, 10000, SOFTMAX)
    assert not one_row.can_judge(1, HIDDEN, replace(SOFTMAX, experts=512))
