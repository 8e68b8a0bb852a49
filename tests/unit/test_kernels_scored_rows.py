"""Rows that add their residual, and are rounded and scored for experts at once: as by a launch for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.experts import route, scored_rows
from eyas.engine.kernels.experts.route import Router
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products.blocks import widened
from eyas.engine.kernels.products.rows import NormInput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS, HIDDEN = 1e-3, 640
BLOCKS = RowRounding("block")
SPEC = ExpertsSpec(
    width=16,
    experts=24,
    per_row=4,
    scores="sigmoid",
    normalised=True,
    scale=2.5,
    corrected=True,
    groups=4,
    topk_groups=2,
    group_best=2,
)
SIMPLE = replace(SPEC, scores="softmax", corrected=False, groups=1, topk_groups=1)


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device=DEVICE)


@pytest.mark.parametrize(
    ("m", "spec", "waits", "shared", "powers"),
    [
        pytest.param(1, SPEC, True, True, False, id="one row"),
        pytest.param(7, SIMPLE, False, False, True, id="powers of two, nothing to add"),
        pytest.param(30, SPEC, True, True, False, id="more rows"),
    ],
)
def test_rows_are_as_their_norm_leaves_them(
    m: int, spec: ExpertsSpec, waits: bool, shared: bool, powers: bool
) -> None:
    torch.manual_seed(m)
    x, added, gain = random(m, HIDDEN) * 3, random(m, HIDDEN) if waits else None, random(HIDDEN)
    weight = random(32, HIDDEN) / HIDDEN**0.5
    router = Router(spec, random(spec.experts) if spec.corrected else None, shared)
    norm = NormInput(EPS, gain, RowRounding("block", powers=powers))
    whole = x if added is None else x + added
    normed = row_kernels.normed(whole, norm)
    expected = route.choose_local(normed.plain @ weight.T, router, None)
    scored = scored_rows.score((x, added), norm, weight, router)
    early = widened(scored.rounded).clone()
    chosen = scored_rows.choose(scored, router, EPS)
    torch.testing.assert_close(scored.residual, whole)
    assert torch.equal(chosen.experts, expected.experts)
    torch.testing.assert_close(chosen.weights, expected.weights, rtol=1e-4, atol=1e-5)
    assert normed.rounded is not None
    found, as_before = widened(scored.rounded), widened(normed.rounded)
    if powers:  # of two others, perhaps, since the whole row's factor comes behind them
        as_before = normed.plain
    error = (found - as_before).norm() / as_before.norm()
    assert error < (0.04 if powers else 0.003)
    assert (early - as_before).norm() / as_before.norm() > 0.3


def test_chance_chooses_by_the_same_bits() -> None:
    torch.manual_seed(1)
    x, gain, weight = random(4, HIDDEN), random(HIDDEN), random(24, HIDDEN)
    scored = scored_rows.score((x, None), NormInput(EPS, gain, BLOCKS), weight, Router(SPEC))
    chosen = scored_rows.choose(scored, Router(SPEC), EPS, uniform=True)
    apart = torch.tensor([[0, 6, 12, 18]], device=DEVICE).expand(4, 4)
    assert torch.equal((chosen.experts - chosen.experts[:, :1]) % 24, apart)


@pytest.mark.parametrize(
    ("m", "rounding", "router"),
    [
        (33, BLOCKS, Router(SPEC)),
        (4, RowRounding("token"), Router(SPEC)),
        (4, None, Router(SPEC)),
        (4, BLOCKS, Router(SPEC, bias=torch.zeros(24))),
    ],
)
def test_others_go_another_way(m: int, rounding: RowRounding | None, router: Router) -> None:
    assert scored_rows.can_score(4, HIDDEN, BLOCKS, Router(SPEC))
    assert not scored_rows.can_score(m, HIDDEN, rounding, router)
