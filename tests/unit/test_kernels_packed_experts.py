"""Products of experts in four bits, against what their numbers mean in float64; planted faults are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from eyas.engine.kernels.experts.group import GroupedChoices, OneRow
from eyas.engine.kernels.experts.grouped import GroupedProducts
from eyas.engine.kernels.experts.grouped_packed import AHEAD_BYTES, plan_of
from eyas.engine.kernels.experts.grouped_task import shape_of
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile, key_of, most_blocks
from eyas.engine.kernels.products import fp4
from eyas.engine.kernels.products.fp4 import Fp4Weight
from eyas.engine.kernels.products.skinny import ProductLaunch
from eyas.engine.layers.activations import ACTIVATIONS, behind_a_gate
from tests.unit.biased_experts import KINDS, Biases, experts_of
from tests.unit.crossed import crossed
from tests.unit.fp4_formats import VALUES
from tests.unit.grouped_products import DEVICE, PDL, random
from tests.unit.packed_experts import BACK, DTYPE, FORTH, HIDDEN, PER_ROW, Numbers, biases, close, packed

TILES = {
    "few": GroupedTile(16, 64, 128, 4, 3),
    "split": GroupedTile(16, 32, 128, 4, 3, split=2),
    "tall": GroupedTile(64, 128, 128, 8, 2, group=2),
}


def meant(numbers: Numbers) -> torch.Tensor:
    values = torch.tensor(VALUES, dtype=torch.float64)[numbers[0].long()]
    return values * torch.exp2(numbers[1].double()).repeat_interleave(32, -1)


def run(x: torch.Tensor, experts: torch.Tensor, tile: GroupedTile | None, kind: str) -> list[torch.Tensor]:
    """What `gate_up` gives, by choice, and `down` of that."""
    gate, pair = KINDS[kind], (packed(FORTH), packed(BACK))
    added = [each.to(DEVICE, DTYPE) for each in biases()]
    shapes = shape_of(pair[0], gate), shape_of(pair[1], None)
    table = {key_of(shape, experts.numel()): tile for shape in shapes if tile}
    shared = GroupedProducts(ProductLaunch.on(DEVICE, pdl=PDL), table)
    order = shared.walked(experts, pair)
    inner = shared.gate_up(x.to(DEVICE, DTYPE), pair[0], order, PER_ROW, gate, added[0])
    assert isinstance(inner, torch.Tensor)
    by_choice = inner.clone()
    if isinstance(order, GroupedChoices):
        there = int((experts >= 0).sum())
        by_choice[order.order[:there].long()] = inner[:there]
    made = shared.down(inner, pair[1], order, added[1])
    assert not shared.launch.tickets.any()
    return [by_choice, made]


def computed(
    x: torch.Tensor,
    experts: torch.Tensor,
    kind: str,
    weights: tuple[Numbers, Numbers] = (FORTH, BACK),
    added: Biases | None = None,
) -> list[torch.Tensor]:
    whose, (gate_up, down) = experts.cpu().flatten().tolist(), map(meant, weights)
    forth, back = biases() if added is None else added
    each = torch.stack([row for row in x.double() for _ in range(PER_ROW)])
    both = torch.stack([gate_up[e] @ row for e, row in zip(whose, each, strict=True)])
    inner = behind_a_gate(ACTIVATIONS[kind])(both if forth is None else both + forth[whose])
    made = torch.stack([down[e] @ row for e, row in zip(whose, inner, strict=True)])
    return [inner, made if back is None else made + back[whose]]


@pytest.mark.parametrize(
    ("name", "kind"),
    crossed(TILES, KINDS, quick=lambda name, kind: kind == "clamped_swiglu"),
)
def test_packed_experts_are_what_their_numbers_mean(name: str, kind: str) -> None:
    rows = 70 if name == "tall" else 9
    x, experts = random(rows, HIDDEN, seed=rows), experts_of(rows)
    for found, expected in zip(run(x, experts, TILES[name], kind), computed(x, experts, kind), strict=True):
        close(found, expected)


@pytest.mark.parametrize("split", [1, 2])
def test_one_rows_choices_are_in_its_own_order(split: int) -> None:
    x, experts = random(1, HIDDEN, seed=5), torch.tensor([[3, 1]], dtype=torch.int32, device=DEVICE)
    found = run(x, experts, GroupedTile(16, 64, 128, 4, 3, split=split), "clamped_swiglu")
    for mine, expected in zip(found, computed(x, experts, "clamped_swiglu"), strict=True):
        close(mine, expected)
    with pytest.raises(AssertionError):
        close(found[1], computed(x, experts.flip(1), "clamped_swiglu")[1])


def test_choices_of_experts_elsewhere_are_left_out() -> None:
    """As on a rank that has some experts, whole: they are -1 there."""
    x, experts = random(9, HIDDEN, seed=7), experts_of(9)
    experts[::2, 0], experts[5] = -1, -1
    here = (experts.flatten() >= 0).cpu()
    found = run(x, experts, None, "clamped_swiglu")[1]
    expected = computed(x, experts.clamp(min=0), "clamped_swiglu")[1]
    close(found[here], expected[here])


def _halves_turned(numbers: Numbers) -> Numbers:
    return numbers[0].unflatten(2, (-1, 2)).flip(3).flatten(2), numbers[1]


def _parts_turned(numbers: Numbers) -> Numbers:
    """The stretches of 32 columns that a word holds, in another order."""
    return numbers[0].roll(32, 2), numbers[1]


def _signs_lost(numbers: Numbers) -> Numbers:
    return numbers[0] & 7, numbers[1]


def _neighbours_group(numbers: Numbers) -> Numbers:
    return numbers[0], numbers[1].roll(1, 2)


def _neighbours_row(numbers: Numbers) -> Numbers:
    return numbers[0], numbers[1].roll(1, 1)


def _neighbours_expert(numbers: Numbers) -> Numbers:
    return numbers[0], numbers[1].roll(1, 0)


FAULTS: list[Callable[[Numbers], Numbers]] = [
    _halves_turned, _parts_turned, _signs_lost, _neighbours_group, _neighbours_row, _neighbours_expert
]  # fmt: skip


def test_a_planted_fault_is_caught() -> None:
    x, experts = random(9, HIDDEN, seed=9), experts_of(9)
    found = run(x, experts, None, "clamped_swiglu")
    for fault in FAULTS:
        for which, weights in ((0, (fault(FORTH), BACK)), (1, (FORTH, fault(BACK)))):
            with pytest.raises(AssertionError):
                close(found[which], computed(x, experts, "clamped_swiglu", weights)[which])
    forth, back = biases()
    for which, added in ((0, (forth.roll(1, 0), back)), (1, (forth, back.roll(1, 0)))):
        with pytest.raises(AssertionError):
            close(found[which], computed(x, experts, "clamped_swiglu", added=added)[which])


def test_every_number_and_the_ends_of_scales() -> None:
    """Exact, up to the largest scale that a weight may have."""
    numbers = torch.arange(16, dtype=torch.uint8).repeat(32, 2)
    exponents = torch.arange(fp4.LARGEST - 31, fp4.LARGEST + 1, dtype=torch.int32)[:, None]
    part = fp4.packed(numbers, exponents, DTYPE)
    weight = part.room(1)
    weight.put(0, part)
    weight = replace(weight, words=weight.words.to(DEVICE), scales=weight.scales.to(DEVICE))
    shared = GroupedProducts(ProductLaunch.on(DEVICE, pdl=PDL))
    order = shared.group(torch.zeros(32, 1, dtype=torch.int32, device=DEVICE), (weight, weight))
    found = shared.each(torch.eye(32).to(DEVICE, DTYPE), weight, order, 1)
    assert torch.equal(found.double().cpu(), meant((numbers, exponents)).t())


@pytest.mark.parametrize(("experts", "rows", "steps"), [(32, 1, 4), (32, 8, 2), (32, 32, 2), (128, 32, 0)])
def test_all_programs_together_call_ahead_what_l2_keeps(experts: int, rows: int, steps: int) -> None:
    """Of gpt-oss's down: an H200 read much of 97 MB twice."""
    side, choices = 2880, 4 * rows
    words = torch.empty(experts, 23, side, 32, dtype=torch.int16, device="meta")
    weight = Fp4Weight(words, torch.empty(experts, 23, side, dtype=torch.int32, device="meta"), side, DTYPE)
    blocks = torch.empty(3 * most_blocks(choices, experts, 8) + 1, dtype=torch.int32, device="meta")
    order = GroupedChoices(blocks.new_empty(choices), blocks, 8) if rows > 1 else OneRow(blocks[:4], 8)
    products = GroupedProducts(ProductLaunch.on("meta", pdl=True))
    task = products.down_task(torch.empty(choices, side, dtype=DTYPE, device="meta"), weight, order)
    plan = plan_of(task, pdl=True)
    everyones = plan.ahead * task.most * plan.tiles * plan.split * plan.columns * plan.unit * 2
    assert plan.ahead == steps and everyones <= AHEAD_BYTES
