"""Rows that come to their experts in one launch: as by a launch for each part of the way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.kernels.experts import route, route_rows
from eyas.engine.kernels.experts.group import GroupedChoices, OrderSizes, group
from eyas.engine.kernels.experts.route import ChosenExperts, Router
from eyas.engine.kernels.products.skinny import MAX_ROWS, ProductLaunch, SkinnyInput
from eyas.engine.layers import routing
from tests.unit.crossed import crossed
from tests.unit.router_kinds import EPS, HIDDEN, SIGMOID, SOFTMAX

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PDL = torch.cuda.is_available() and not triton.knobs.runtime.interpret
SPECS = {"softmax": SOFTMAX, "sigmoid": SIGMOID}
SIZES = ((9, 0), (11, 8), (16, 2), (19, 8), (32, 2))  # rows, and how many of them a block has
CROSSED = crossed(
    SPECS,
    SIZES,
    [False, True],
    quick=lambda kind, size, uniform: (kind == "softmax") == (uniform == (SIZES.index(size) % 2 == 0)),
)
"""Each pair of values is in a quick one."""


def router_of(spec: ExpertsSpec, shared: bool) -> Router:
    bias = torch.randn(16, device=DEVICE) if spec.router_bias else None
    correction = torch.randn(spec.experts, device=DEVICE) if spec.corrected else None
    return Router(spec, correction, shared, bias)


def same(found: ChosenExperts, expected: ChosenExperts, experts: int, rows: int) -> None:
    """The choices, and their order as `group` puts them in it."""
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-6)
    if found.order is not None:
        in_order(found.order, group(expected.experts, experts, rows))


def in_order(found: GroupedChoices, expected: GroupedChoices) -> None:
    assert torch.equal(found.order, expected.order)
    assert (found.rows, found.most) == (expected.rows, expected.most)
    count = int(expected.blocks[-1])
    assert int(found.blocks[-1]) == count > 1
    for each in range(3):
        own = slice(each * found.most, each * found.most + count)
        assert torch.equal(found.blocks[own], expected.blocks[own])


def by_chance(
    plain: ChosenExperts, logits: torch.Tensor, found: ChosenExperts, router: Router
) -> ChosenExperts:
    """Experts as far from each other as they can be, from one on that the last bit of a logit decides, and
    the router's weights of them."""
    spec = router.spec
    apart = torch.arange(spec.per_row, device=DEVICE) * spec.experts // spec.per_row
    experts = ((found.experts[:, :1] + apart) % spec.experts).int()
    logits = logits[:, : spec.experts]
    if router.bias is not None:
        logits = logits + router.bias[: spec.experts]
    weights = routing.weights_of(routing.SCORES[spec.scores](logits), experts.long(), spec)
    behind = slice(spec.per_row, None)
    return ChosenExperts(
        torch.cat((experts, plain.experts[:, behind]), 1), torch.cat((weights, plain.weights[:, behind]), 1)
    )


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("kind", "size", "uniform"), CROSSED)
def test_rows_are_taken_to_their_experts(
    kind: str, size: tuple[int, int], uniform: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, (rows, height) = SPECS[kind], size
    if rows in (16, 19):  # as many programs as they cannot be at once: each has more rows
        monkeypatch.setattr(route_rows, "_AT_ONCE", 0)
    shared, launch = spec.per_row == 3, ProductLaunch.on(DEVICE, pdl=PDL)
    router = router_of(spec, shared)
    x, gain = torch.randn(rows, HIDDEN, device=DEVICE), torch.randn(HIDDEN, device=DEVICE)
    weight = torch.randn(16, HIDDEN, device=DEVICE) * HIDDEN**-0.5
    sums = torch.full((3, MAX_ROWS), float("nan"), device=DEVICE)
    sums[:, :rows] = x.square().view(rows, 3, -1).sum(2).t()
    product = route_rows.RouterProduct(weight, gain, EPS, router, uniform)
    order = OrderSizes(spec.experts + shared, height) if height else None
    assert route_rows.can_take(rows, spec, shared, HIDDEN)
    for _ in range(2):  # the ticket is there again
        normed, chosen = route_rows.take(SkinnyInput(x, sums), product, order, launch)
        expected = x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * gain
        torch.testing.assert_close(normed, expected)
        logits = expected @ weight.t()
        plain = route.choose_local(logits, router, None)
        same(
            chosen,
            by_chance(plain, logits, chosen, router) if uniform else plain,
            spec.experts + shared,
            height,
        )
    assert (chosen.order is None) == (height == 0) and not launch.tickets.any()
    if not uniform:
        assert not torch.equal(chosen.experts, route.choose_local(logits.roll(1, 1), router, None).experts)


def test_of_equals_the_first_and_what_is_no_number_last() -> None:
    router = Router(replace(SOFTMAX, router_bias=False))
    x, weight = torch.eye(9, HIDDEN, device=DEVICE), torch.zeros(16, HIDDEN, device=DEVICE)
    weight[[3, 7], 0] = 1.0
    weight[5, 1] = float("nan")
    product = route_rows.RouterProduct(weight, torch.ones(HIDDEN, device=DEVICE), EPS, router)
    sums = torch.ones(1, MAX_ROWS, device=DEVICE)
    _, chosen = route_rows.take(SkinnyInput(x, sums), product, None, ProductLaunch.on(DEVICE, pdl=PDL))
    assert chosen.experts[:3].tolist() == [[3, 7, 0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_what_it_leaves_to_others() -> None:
    assert route_rows.can_take(16, SOFTMAX, True, HIDDEN)
    assert not route_rows.can_take(17, SOFTMAX, True, HIDDEN)
    assert not route_rows.can_take(33, replace(SOFTMAX, per_row=2), False, HIDDEN)
    assert not route_rows.can_take(8, SOFTMAX, False, HIDDEN)
    assert not route_rows.can_take(12, replace(SOFTMAX, groups=4, topk_groups=2), False, HIDDEN)
    assert not route_rows.can_take(12, SOFTMAX, False, 10000)
    assert not route_rows.can_take(12, replace(SOFTMAX, experts=7, per_row=2), False, HIDDEN)
