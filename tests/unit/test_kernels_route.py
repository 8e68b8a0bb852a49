"""The router's choice and the order of grouped products, against the plain router and a plain sort."""

from __future__ import annotations

import pytest
import torch

from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.kernels.experts import route
from eyas.engine.kernels.experts.group import GroupedChoices, group
from eyas.engine.layers.linear import Linear
from eyas.engine.models.ops import expert_products
from eyas.engine.models.ops.parts import RouterPart
from eyas.engine.models.ops.torch_ops import routed
from eyas.engine.parallel.expert_places import SpreadExperts
from eyas.engine.parallel.expert_plan import NONE, ExpertSlots
from tests.unit.crossed import crossed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def spec(experts: int, per_row: int, **changes: object) -> ExpertsSpec:
    plain = {"scores": "softmax", "normalised": False, "width": 16}
    return ExpertsSpec(experts=experts, per_row=per_row, **(plain | changes))  # type: ignore[arg-type]


V3 = {"scores": "sigmoid", "normalised": True, "scale": 2.5, "corrected": True}
ROUTERS = {
    "qwen": spec(128, 8, normalised=True),
    "shares": spec(8, 2),
    "mixtral": spec(8, 2, normalised=True),
    "v2-lite": spec(64, 6, scale=1.0),
    "v2": spec(160, 6, scale=16.0, groups=8, topk_groups=3),
    "v3": spec(256, 8, groups=8, topk_groups=4, group_best=2, **V3),
    "kimi": spec(384, 8, **V3),
}


def logits_of(rows: int, experts: int, *, ties: bool = False) -> torch.Tensor:
    found = torch.randn(rows, experts, generator=torch.Generator().manual_seed(rows + experts))
    return found.mul_(2).round_() if ties else found


def routes(
    router: ExpertsSpec, logits: torch.Tensor, shift: float = 0.0
) -> tuple[route.ChosenExperts, torch.Tensor, torch.Tensor]:
    """What the kernel chooses, and the plain router's experts and weights."""
    generator = torch.Generator().manual_seed(3)
    correction = (torch.rand(router.experts, generator=generator) - 0.5) * 0.6 + shift
    plain = correction if router.corrected else None
    part = RouterPart(
        router, Linear(torch.eye(router.experts)), None, plain, {}, range(router.experts), False
    )
    given = correction.to(DEVICE) if router.corrected else None
    return route.choose(logits.to(DEVICE), router, given), *routed(logits, part)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_router_chooses_as_the_plain_one(name: str) -> None:
    """Also with scores that a correction makes negative, and with many that are equal."""
    router = ROUTERS[name]
    for rows, shift in ((7, 0.0), (3, -2.0), (3, -4.0)):
        found, experts, weights = routes(router, logits_of(rows, router.experts), shift)
        assert torch.equal(found.experts.cpu().long(), experts)
        torch.testing.assert_close(found.weights.cpu(), weights, rtol=3e-6, atol=0.0)


@pytest.mark.parametrize("name", ["shares", "v3"])
def test_a_shared_expert_comes_last_and_whole(name: str) -> None:
    router = ROUTERS[name]
    logits = logits_of(5, router.experts).to(DEVICE)
    correction = torch.linspace(-0.2, 0.2, router.experts, device=DEVICE) if router.corrected else None
    alone, found = (route.choose(logits, router, correction, shared=shared) for shared in (False, True))
    assert torch.equal(found.experts[:, :-1], alone.experts)
    assert torch.equal(found.weights[:, :-1], alone.weights)
    assert (found.experts[:, -1] == router.experts).all() and (found.weights[:, -1] == 1.0).all()


def test_a_shared_expert_may_have_a_share() -> None:
    """The sigmoid of the logit behind the experts', which no expert's weight takes part in."""
    router = spec(8, 2, normalised=True, shared_share=True)
    logits = logits_of(5, 16).to(DEVICE) * 9
    alone = route.choose(logits[:, :8].contiguous(), router)
    found = route.choose(logits, router, shared=True)
    assert torch.equal(found.experts[:, :-1], alone.experts)
    assert torch.equal(found.weights[:, :-1], alone.weights)
    assert (found.experts[:, -1] == 8).all()
    torch.testing.assert_close(found.weights[:, -1], logits[:, 8].sigmoid(), rtol=3e-6, atol=0.0)


@pytest.mark.parametrize("name", ["shares", "v3"])
def test_every_choice_is_of_the_rank_that_has_the_expert(name: str) -> None:
    """Two ranks, of which the second also has a row of padding: it chooses none of either's."""
    router, rows = ROUTERS[name], 3
    logits = logits_of(2 * rows, router.experts).to(DEVICE)
    correction = torch.linspace(-0.2, 0.2, router.experts, device=DEVICE) if router.corrected else None
    whole, each = route.choose(logits, router, correction, shared=True), router.experts // 2
    kv_rows = torch.tensor([0, 7, 3, 4, -1, 9], dtype=torch.int32, device=DEVICE)
    for rank in range(2):
        held = route.LocalExperts(
            range(each * rank, each * (rank + 1)), range(rows * rank, rows * (rank + 1)), kv_rows
        )
        found = route.choose_local(logits, route.Router(router, correction, True), held)
        assert torch.equal(found.weights, whole.weights)
        wanted = whole.experts - each * rank
        wanted[(wanted < 0) | (wanted >= each)] = -1
        wanted[:, -1] = -1
        wanted[rows * rank : rows * (rank + 1), -1] = each
        wanted[4] = -1
        assert torch.equal(found.experts, wanted)


@pytest.mark.parametrize("name", ["shares", "v3"])
def test_a_choice_goes_to_one_copy_of_its_expert(name: str) -> None:
    """Two ranks, replicas on both, a row of padding; the kernel, plain torch and the specification."""
    router, rows = ROUTERS[name], 20
    logits = logits_of(2 * rows, router.experts).to(DEVICE)
    correction = torch.linspace(-0.2, 0.2, router.experts, device=DEVICE) if router.corrected else None
    whole, half = route.choose(logits, router, correction, shared=True), router.experts // 2
    slots = ExpertSlots(router.experts, 2, 4)
    busy = whole.experts[:, :-1].flatten().bincount(minlength=router.experts).cpu()
    first, second = (
        part.argsort(descending=True)[:4].tolist() for part in (busy[:half], busy[half : router.experts])
    )
    replicas = (NONE, *(half + expert for expert in second[:3]), *first)
    kv_rows = torch.arange(2 * rows, dtype=torch.int32, device=DEVICE)
    kv_rows[4] = -1
    taken, loads = torch.zeros(slots.ranks * slots.each), torch.zeros(router.experts)
    turns = torch.arange(2 * rows) // rows + torch.arange(2 * rows) % rows
    for rank in range(2):
        places = SpreadExperts(slots, rank, 1, DEVICE).of("a layer")
        places.set(replicas)
        held = route.LocalExperts(
            *(places.own, range(rows * rank, rows * (rank + 1)), kv_rows),
            route.ExpertCopies(places.table, places.loads),
        )
        found = route.choose_local(logits, route.Router(router, correction, True), held)
        assert torch.equal(found.weights, whole.weights)
        choices = whole.experts[:, :-1].cpu().long()
        placed = places.placed(choices.to(DEVICE), turns.to(DEVICE)).cpu()
        wanted = placed - slots.each * rank
        wanted[(wanted < 0) | (wanted >= slots.each)] = -1
        wanted[4] = -1
        assert torch.equal(found.experts[:, :-1].cpu().long(), wanted)
        taken += (wanted[wanted >= 0] + slots.each * rank).bincount(minlength=len(taken))
        counted = places.loads.clone()
        loads += counted.cpu()
        by_torch = expert_products._numbers_here(whole.experts.long(), router.experts, held)
        assert torch.equal(by_torch, found.experts.long())
        assert torch.equal(places.loads, 2 * counted), "both count alike"
    valid = kv_rows.cpu() >= 0
    assert torch.equal(loads, choices[valid].flatten().bincount(minlength=router.experts).float())
    owners = torch.from_numpy(slots.owners(replicas))
    each = torch.zeros(router.experts).index_add_(0, owners, taken)
    assert torch.equal(each, loads), "every choice went to one copy of its expert"
    assert taken[slots.homes : slots.each].any() and taken[slots.each + slots.homes :].any()
    assert not taken[slots.homes], "an empty slot has no rows"


@pytest.mark.parametrize("name", ["qwen", "shares", "kimi"])
def test_of_equals_the_first_is_chosen(name: str) -> None:
    router = ROUTERS[name]
    logits = logits_of(5, router.experts, ties=True)
    found, experts, _ = routes(ExpertsSpec(**(vars(router) | {"corrected": False})), logits)
    assert torch.equal(found.experts.cpu().long(), experts)
    assert not torch.equal(experts, logits.topk(router.per_row).indices.flip(1))


def test_a_logit_that_is_no_number_chooses_nothing_out_of_bounds() -> None:
    for value in (float("nan"), float("-inf")):
        found = route.choose(torch.full((2, 8), value, device=DEVICE), ROUTERS["mixtral"])
        assert found.experts.tolist() == [[0, 1]] * 2


@pytest.mark.slow
def test_forced_routing_is_uniform_and_takes_no_expert_twice() -> None:
    router = ROUTERS["v3"]
    alike = logits_of(1, router.experts).expand(160, -1).contiguous()
    found = route.choose(alike.to(DEVICE), router, uniform=True).experts.cpu()
    counts = found.flatten().bincount(minlength=router.experts)
    assert (counts > 0).sum() > 240 and counts.max() < 20  # 5 on average
    assert all(len(set(row)) == router.per_row for row in found.tolist())


@pytest.mark.parametrize(
    ("shape", "block"),
    crossed(
        [(1, 8, 2), (5, 128, 8), (16, 9, 8), (17, 257, 9), (75, 8, 8), (83, 300, 8), (1100, 20, 5)],
        [16, 64],
        quick=lambda shape, block: block == (16 if shape[1] > 100 else 64),
    ),
)
def test_choices_are_sorted_by_expert_and_cut_into_blocks(shape: tuple[int, int, int], block: int) -> None:
    rows, experts, per_row = shape
    chosen = logits_of(rows, experts).topk(per_row).indices.int()
    chosen[rows // 2, 0] = -1  # one that is left out
    found = group(chosen.to(DEVICE), experts, block)
    assert_grouped(found, chosen, experts)
    if rows == 1:
        return  # there is nothing to confuse
    with pytest.raises(AssertionError):
        spoilt = found.order.clone()
        spoilt[:2] = spoilt[:2].flip(0)
        assert_grouped(GroupedChoices(spoilt, found.blocks, block), chosen, experts)


def test_all_rows_of_one_expert_fill_blocks() -> None:
    for rows in (600, 5000):  # in one part, and in several
        chosen = torch.full((rows, 1), 3, dtype=torch.int32)
        assert_grouped(group(chosen.to(DEVICE), 8, 128), chosen, 8)


def assert_grouped(found: GroupedChoices, chosen: torch.Tensor, experts: int) -> None:
    """Every choice once, by expert and then by choice; no block is of two experts, none is too long."""
    flat = chosen.flatten()
    expected = flat.long().masked_fill(flat < 0, experts).sort(stable=True).indices[: int((flat >= 0).sum())]
    order = found.order.cpu()[: len(expected)].long()
    assert torch.equal(order, expected)
    covered = 0
    of_expert, begins, ends = found.blocks[:-1].cpu().view(3, -1)[:, : int(found.blocks[-1])].tolist()
    for expert, begin, end in zip(of_expert, begins, ends, strict=True):
        assert begin == covered and 0 < end - begin <= found.rows
        assert set(flat[order[begin:end]].tolist()) == {expert}
        covered = end
    assert covered == len(expected)
    assert len(of_expert) <= found.most and len(of_expert) == sum(
        -(-count // found.rows) for count in flat[flat >= 0].bincount().tolist()
    )
