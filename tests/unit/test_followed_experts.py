"""What a run in another precision may follow: near ties of routers, and nothing that a wrong one chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.kernels.experts.route import ChosenExperts
from eyas.engine.kernels.products.blocks import NormedRows
from eyas.engine.layers import routing
from eyas.engine.models.ops import expert_products
from eyas.engine.models.ops.parts import Routed, RouterPart
from tests.gpu.followed_experts import TakenExperts

EXPERTS, PER_ROW, HIDDEN, ROWS = 8, 2, 32, 200
NOISE = 0.01


def part(scores: str, corrected: bool = False, groups: int = 1) -> RouterPart:
    """A router; rows of its weight beyond the experts are zeros. Half of `groups` are chosen from."""
    spec = ExpertsSpec(
        width=16,
        experts=EXPERTS,
        per_row=PER_ROW,
        scores=scores,
        normalised=True,
        scale=1.0,
        corrected=corrected,
        groups=groups,
        topk_groups=max(groups // 2, 1),
        group_best=1 if groups == 1 else 2,
    )
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(EXPERTS, HIDDEN, generator=generator) * HIDDEN**-0.5
    correction = torch.randn(EXPERTS, generator=generator) * 0.2 if corrected else None
    filled = torch.cat((weight, torch.zeros(8, HIDDEN)))
    bias = torch.randn(2 * EXPERTS, generator=generator) * 0.3
    return RouterPart(spec, filled, bias, correction, {}, range(EXPERTS), shared=True)


def route(rows: NormedRows, router: RouterPart, step: Any, judged: NormedRows | None = None) -> Routed:
    """In plain torch, with a shared expert behind the others."""
    logits = ((judged or rows).plain @ router.weight.T + router.bias)[:, :EXPERTS]
    found = routing.choose(routing.SCORES[router.spec.scores](logits), router.spec, router.correction)
    experts = torch.nn.functional.pad(found.experts, (0, 1), value=EXPERTS).int()
    weights = torch.nn.functional.pad(found.weights, (0, 1), value=1.0)
    return Routed(rows, ChosenExperts(experts, weights))


def layers(router: RouterPart, noise: float) -> list[ChosenExperts]:
    """The choices of three layers, of rows that are not quite those of another run."""
    generator, made = torch.Generator().manual_seed(5), []
    for _ in range(3):
        x = torch.randn(ROWS, HIDDEN, generator=generator)
        x = x + torch.randn(ROWS, HIDDEN, generator=generator) * noise
        made.append(expert_products.routed(NormedRows(x), router, None).chosen)
    return made


@contextmanager
def plain() -> Iterator[TakenExperts]:
    with patch.object(expert_products, "routed", route):
        yield TakenExperts()


ROUTERS = [
    part("softmax"),
    part("softmax", corrected=True),
    part("sigmoid", corrected=True),
    part("sigmoid", corrected=True, groups=4),
    part("sparse_mixer"),
]


@pytest.mark.parametrize("router", ROUTERS)
def test_near_ties_are_followed(router: RouterPart) -> None:
    with plain() as taken:
        with taken.recorded():
            first = layers(router, 0.0)
        own = layers(router, NOISE)
        with taken.followed():
            second = layers(router, NOISE)
    sets = [[each.experts.sort(1).values for each in run] for run in (first, own, second)]
    assert any(not torch.equal(a, b) for a, b in zip(*sets[:2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(sets[0], sets[2], strict=True))
    for one, other in zip(first, second, strict=True):
        assert (one.weights.sort(1).values - other.weights.sort(1).values).abs().max() < 0.2


def wrong_bias(router: RouterPart) -> RouterPart:
    assert router.bias is not None
    return replace(router, bias=torch.zeros_like(router.bias))


def two_exchanged(router: RouterPart) -> RouterPart:
    return replace(router, weight=router.weight[[1, 0, *range(2, 2 * EXPERTS)]])


def no_correction(router: RouterPart) -> RouterPart:
    return replace(router, correction=None)


def no_groups(router: RouterPart) -> RouterPart:
    return replace(router, spec=replace(router.spec, groups=1, topk_groups=1))


def other_weights(router: RouterPart) -> RouterPart:
    """The experts are right, and their weights those of another temperature."""
    assert router.bias is not None
    return replace(router, weight=router.weight * 3, bias=router.bias * 3)


@pytest.mark.parametrize(
    ("router", "fault"),
    [
        (part("softmax"), wrong_bias),
        (part("softmax"), two_exchanged),
        (part("softmax"), other_weights),
        (part("softmax", corrected=True), no_correction),
        (part("sigmoid", corrected=True), no_correction),
        (part("sigmoid", corrected=True, groups=4), no_correction),
        (part("sigmoid", corrected=True, groups=4), no_groups),
        (part("sparse_mixer"), two_exchanged),
    ],
)
def test_a_wrong_router_is_not_followed(router: RouterPart, fault: Any) -> None:
    with plain() as taken:
        with taken.recorded():
            layers(router, 0.0)
        with pytest.raises(AssertionError, match="better|took other"), taken.followed():
            layers(fault(router), NOISE)


def test_an_expert_that_is_no_near_tie_is_not_followed_in_one_row() -> None:
    def wrong(rows: NormedRows, router: RouterPart, step: Any, judged: NormedRows | None = None) -> Routed:
        made = route(rows, router, step, judged)
        best, second, shared = made.chosen.experts[7].tolist()
        made.chosen.experts[7, 0] = next(i for i in range(EXPERTS) if i not in (best, second, shared))
        return made

    router = part("softmax")
    with plain() as taken:
        with taken.recorded():
            layers(router, 0.0)
        with patch.object(expert_products, "routed", wrong):
            with pytest.raises(AssertionError, match="better"), taken.followed():
                layers(router, NOISE)


def test_a_run_of_fewer_forwards_is_none_that_follows() -> None:
    with plain() as taken:
        with taken.recorded():
            layers(part("softmax"), 0.0)
        with pytest.raises(AssertionError, match="fewer"), taken.followed():
            pass
