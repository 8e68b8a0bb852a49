"""Products of one row whose weights wait for it, against plain torch; planted faults are caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.kernels.experts.route import ChosenExperts
from eyas.engine.kernels.products import single
from eyas.engine.kernels.products.blocks import Rows, StoredWeight
from tests.unit.crossed import crossed
from tests.unit.grouped_products import DEVICE, PDL, act, in_kind, meant, random, rounded

EXPERTS, HIDDEN, WIDTH = 6, 400, 384  # no powers of two, and not all whole blocks
KINDS = ["float32", "blocks", "powers", "token", "tensor"]
TAKEN = (4, 0, -1, 3, 5)


def read(x: torch.Tensor, weight: StoredWeight) -> Rows:
    return weight.read(x.to(DEVICE))


def close(found: torch.Tensor, expected: torch.Tensor, most: float = 2e-6) -> None:
    error = (found.double().cpu() - expected).norm() / expected.norm()
    assert error < most, error


@pytest.mark.parametrize(
    ("shape", "kind"),
    crossed(
        [(272, 384), (48, 1536), (2112, 192)],
        KINDS,
        quick=lambda shape, kind: shape[0] == 48 and kind in ("blocks", "float32", "token"),
    ),
)
def test_a_dense_product(shape: tuple[int, int], kind: str) -> None:
    n, k = shape
    x, weight = random(1, k, seed=n), in_kind(random(n, k, seed=1) / k**0.5, kind)
    expected = rounded(x, weight) @ meant(weight).t()
    found = single.dense(read(x, weight), weight, PDL)
    close(found, expected)
    with pytest.raises(AssertionError):
        close(found.roll(1, 1), expected)
    if single.can_read(x, weight):  # rounds it, if need be
        assert torch.equal(single.dense(x.to(DEVICE), weight, PDL), found)


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_few_rows_meet_a_weight_one_after_the_other(rows: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, HIDDEN).to(dtype), StoredWeight(random(32, HIDDEN, seed=1).to(DEVICE, dtype))
    assert single.can_take(x, weight) and not single.can_take(random(9, HIDDEN), weight)
    found = single.dense(x.to(DEVICE), weight, PDL, torch.float32)
    close(found, x.double() @ meant(weight).t())


@pytest.mark.parametrize(
    ("kind", "gelu"),
    crossed(KINDS, [False, True], quick=lambda kind, gelu: (kind, gelu) == ("blocks", True)),
)
def test_a_gated_product(kind: str, gelu: bool) -> None:
    x, weight = random(1, HIDDEN), in_kind(random(2 * WIDTH, HIDDEN, seed=1) / HIDDEN**0.5, kind)
    expected = act(rounded(x, weight) @ meant(weight).t(), gelu)
    close(single.gated(read(x, weight), weight, None, gelu, PDL), expected)


def layer(kind: str) -> tuple[torch.Tensor, StoredWeight, StoredWeight, ChosenExperts]:
    """A row, its experts' weights, and which of them it chose; one choice is of none."""
    gate_up = in_kind(random(EXPERTS, 2 * WIDTH, HIDDEN, seed=1) / HIDDEN**0.5, kind)
    down = in_kind(random(EXPERTS, HIDDEN, WIDTH, seed=2) / WIDTH**0.5, kind)
    chosen = torch.tensor([TAKEN], dtype=torch.int32), random(1, len(TAKEN), seed=3).abs()
    return random(1, HIDDEN), gate_up, down, ChosenExperts(*(part.to(DEVICE) for part in chosen))


def inner_of(x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """Of every choice, float64; zeros of none."""
    row, each = rounded(x, weight), meant(weight)
    passed = [act(row @ each[e].t()) if e >= 0 else torch.zeros(1, WIDTH).double() for e in TAKEN]
    return torch.cat(passed)


def back_of(inner: torch.Tensor, weight: StoredWeight, shares: torch.Tensor) -> torch.Tensor:
    """[1, hidden], float64."""
    rows, each = rounded(inner, weight), meant(weight)
    made = [rows[i] @ each[e].t() * float(shares[0, i]) for i, e in enumerate(TAKEN) if e >= 0]
    return torch.stack(made).sum(0, keepdim=True)


@pytest.mark.parametrize("kind", crossed(KINDS, quick=lambda kind: kind == "blocks"))
def test_a_row_meets_its_experts(kind: str) -> None:
    x, weight, _, chosen = layer(kind)
    expected = inner_of(x, weight)
    found = single.gated(read(x, weight), weight, chosen.experts, pdl=PDL)
    taken = torch.tensor(TAKEN) >= 0
    close(found.cpu()[taken], expected[taken])
    with pytest.raises(AssertionError):  # a neighbour's expert
        close(found.cpu()[taken].roll(1, 0), expected[taken])


@pytest.mark.parametrize(
    ("fault", "kind"),
    crossed(
        ["", "shares", "experts", "weight"],
        ["float32", "blocks", "powers"],
        quick=lambda fault, kind: (fault, kind) in (("", "blocks"), ("", "float32"), ("shares", "blocks")),
    ),
)
def test_the_way_back_adds_experts_up(kind: str, fault: str) -> None:
    _, _, weight, chosen = layer(kind)
    assert single.can_round(weight)
    inner = random(len(TAKEN), WIDTH, seed=5)
    expected = back_of(inner, weight, chosen.weights.cpu())
    if fault == "shares":
        chosen = replace(chosen, weights=chosen.weights.roll(1, 1))
    if fault == "experts":
        chosen = replace(chosen, experts=chosen.experts.roll(1, 1))
    if fault == "weight":
        part = weight.stored if weight.scales is None else weight.scales
        part[TAKEN[0], -1] *= 2  # of the last rows of one expert
    found = single.back(inner.to(DEVICE), weight, chosen, PDL)
    error = (found.double().cpu() - expected).norm() / expected.norm()
    assert error > 1e-3 if fault else error < 2e-6


def test_the_way_back_adds_the_residual_and_leaves_sums() -> None:
    _, _, weight, chosen = layer("blocks")
    inner, residual = random(len(TAKEN), WIDTH, seed=5), random(1, HIDDEN, seed=6)
    found, sums = single.back_add(inner.to(DEVICE), weight, chosen, residual.to(DEVICE), PDL)
    expected = back_of(inner, weight, chosen.weights.cpu()) + residual
    close(found, expected)
    torch.testing.assert_close(sums[:, 0].sum().cpu(), found.square().sum().cpu())


def test_rows_that_no_program_holds_are_told() -> None:
    assert single.can_hold(long := StoredWeight(random(1, 4096))) and not single.can_hold(long, together=2)
    assert single.can_hold(in_kind(random(128, 8192), "blocks"))
    assert not single.can_round(in_kind(random(4, 128), "token"))
