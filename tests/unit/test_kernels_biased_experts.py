"""Products of experts with biases behind them and a clamped gate, against plain torch in every kernel."""

from __future__ import annotations

import pytest
import torch

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.kernels.experts import route
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_task import shape_of
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile, key_of
from eyas.engine.kernels.products.blocks import StoredWeight
from eyas.engine.kernels.products.skinny import ProductLaunch
from eyas.engine.layers.activations import ACTIVATIONS, behind_a_gate
from tests.unit.biased_experts import KINDS, Biases, experts_of
from tests.unit.crossed import crossed
from tests.unit.grouped_products import DEVICE, PDL, close, random

EXPERTS, PER_ROW, HIDDEN, WIDTH = 4, 2, 192, 128
FAR = 6.0
"""The inputs are so large that gates and ups reach their limits."""

TILES = {
    "few": GroupedTile(16, 64, 32, 4, 3, split=3),
    "swept": GroupedTile(16, 64, 64, 4, 3),
    "wide": GroupedTile(64, 64, 64, 8, 2),
}


def weights() -> tuple[StoredWeight, StoredWeight]:
    gate_up = random(EXPERTS, 2 * WIDTH, HIDDEN, seed=1) * (FAR / HIDDEN**0.5)
    down = random(EXPERTS, HIDDEN, WIDTH, seed=2) / WIDTH**0.5
    return StoredWeight(gate_up.to(DEVICE)), StoredWeight(down.to(DEVICE))


def biases() -> tuple[torch.Tensor, torch.Tensor]:
    return random(EXPERTS, 2 * WIDTH, seed=3), random(EXPERTS, HIDDEN, seed=4)


def run(x: torch.Tensor, experts: torch.Tensor, tile: GroupedTile, kind: str) -> list[torch.Tensor]:
    """What `gate_up` gives, by choice, and `down` of that."""
    gate, pair, added = KINDS[kind], weights(), [each.to(DEVICE) for each in biases()]
    shapes = shape_of(pair[0], gate), shape_of(pair[1], None)
    table = {key_of(shape, experts.numel()): tile for shape in shapes}
    shared = GroupedProducts(ProductLaunch.on(DEVICE, pdl=PDL), table)
    order = shared.group(experts, pair)
    inner = shared.gate_up(x.to(DEVICE), pair[0], order, PER_ROW, gate, added[0])
    assert isinstance(inner, torch.Tensor)
    by_choice = torch.empty_like(inner)
    by_choice[order.order.long()] = inner
    return [by_choice, shared.down(inner, pair[1], order, added[1])]


def computed(x: torch.Tensor, experts: torch.Tensor, added: Biases, kind: str) -> list[torch.Tensor]:
    whose, (gate_up, down) = experts.cpu().flatten().tolist(), weights()
    each = torch.stack([row for row in x.double() for _ in range(PER_ROW)])
    both = torch.stack([gate_up.stored[e].double().cpu() @ row for e, row in zip(whose, each, strict=True)])
    if added[0] is not None:
        both += added[0][whose]
    inner = behind_a_gate(ACTIVATIONS[kind])(both)
    made = torch.stack([down.stored[e].double().cpu() @ row for e, row in zip(whose, inner, strict=True)])
    return [inner, made if added[1] is None else made + added[1][whose]]


@pytest.mark.parametrize(
    ("name", "kind"),
    crossed(TILES, KINDS, quick=lambda name, kind: kind == "clamped_swiglu"),
)
def test_biases_and_the_gate_are_those_of_a_rows_own_experts(name: str, kind: str) -> None:
    rows = 70 if name == "wide" else 9
    x, experts, (forth, back) = random(rows, HIDDEN, seed=rows), experts_of(rows), biases()
    found = run(x, experts, TILES[name], kind)
    for mine, other in zip(found, computed(x, experts, (forth, back), kind), strict=True):
        close(mine, other, "float32")
    wrong: list[Biases] = [(None, back), (forth.roll(1, 0), back), (forth.roll(WIDTH, 1), back)]
    for added in wrong:  # none; that of the neighbour's expert; up's beside gate
        with pytest.raises(AssertionError):
            close(found[0], computed(x, experts, added, kind)[0], "float32")
    for last in (None, back.roll(1, 0)):
        with pytest.raises(AssertionError):
            close(found[1], computed(x, experts, (forth, last), kind)[1], "float32")
    if kind == "clamped_swiglu":
        with pytest.raises(AssertionError):
            close(found[0], computed(x, experts, (forth, back), "silu")[0], "float32")


@pytest.mark.parametrize("side", ["gates", "ups", "ups below"])
def test_each_limit_of_the_clamped_gate_is_reached(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin without one of the limits gives others, so a kernel without it would be noticed."""

    def unlimited(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate if side == "gates" else gate.clamp(max=7.0)
        up = up.clamp(None if side == "ups below" else -7.0, None if side == "ups" else 7.0)
        return (up + 1.0) * gate * torch.sigmoid(1.702 * gate)

    x, experts = random(9, HIDDEN, seed=9), experts_of(9)
    found = run(x, experts, TILES["few"], "clamped_swiglu")
    monkeypatch.setitem(ACTIVATIONS, "clamped_swiglu", unlimited)
    with pytest.raises(AssertionError):
        close(found[0], computed(x, experts, biases(), "clamped_swiglu")[0], "float32")


def test_a_routers_bias_is_added_to_its_logits() -> None:
    spec = ExpertsSpec(width=16, experts=12, per_row=3, scores="softmax", normalised=True)
    logits, bias = random(5, 16, seed=1).to(DEVICE), random(16, seed=2).to(DEVICE) * 3.0
    found = route.choose_local(logits, route.Router(spec, bias=bias), None)
    expected = route.choose(logits + bias, spec)
    assert torch.equal(found.experts, expected.experts)
    assert torch.equal(found.weights, expected.weights)
    assert not torch.equal(found.experts, route.choose(logits, spec).experts)
