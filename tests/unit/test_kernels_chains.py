"""Chains on the device against their specifications: the perturbed sampler and a draft runner's rows."""

from __future__ import annotations

import pytest
import torch

from eyas.common.params import SamplingParams
from eyas.engine.kernels.drafts.chains import propose, propose_all
from eyas.engine.sampling.sampler import SampledRow, perturbed
from tests.unit.crossed import crossed
from tests.unit.rounds_rig import DEVICE, Case, new_rows, random_case, snapshot
from tests.unit.sampling_twins import MIXED, normal

STEPS = 3
DEEPEST = (2, 1, 3, 0, 32)


def sampled(case: Case) -> list[SamplingParams]:
    """The tables have sampling parameters and choices; the padding slot is greedy."""
    tables, params = case.tables, []
    for i, slot in enumerate(case.slots):
        one = MIXED[i % len(MIXED)] if slot != tables.padding_slot else SamplingParams(temperature=0.0)
        params.append(one)
        tables.temperature[slot], tables.choice[slot] = one.temperature, i % 3
        tables.seed[slot] = one.seed - 2**64 if one.seed >= 2**63 else one.seed
        tables.top_p[slot], tables.top_k[slot], tables.min_p[slot] = one.top_p, one.top_k, one.min_p
        tables.speculative[slot] = DEEPEST[i % len(DEEPEST)] if slot != tables.padding_slot else 0
    return params


def expected(
    case: Case, params: list[SamplingParams], logits: torch.Tensor, step: int, token_map: torch.Tensor | None
) -> list[int]:
    """The target's ids of the perturbed argmax; of the token that stands after draft number `step`."""
    places = [int(case.tables.length[slot]) + 1 + step for slot in case.slots]
    rows = [
        SampledRow(one, i % 3, place, (), (), ())
        for i, (one, place) in enumerate(zip(params, places, strict=True))
    ]
    best = perturbed(logits.cpu(), rows, token_map).argmax(-1)
    return (best if token_map is None else token_map[best]).tolist()


@pytest.mark.parametrize(
    ("batch", "mapped"),  # batches of 6 and of 11 differ in how rows are cut
    crossed(
        [6, 11],
        [None, torch.int32, torch.int64],
        quick=lambda batch, mapped: (batch == 11) == (mapped is torch.int32),
    ),
)
def test_drafts_and_rows_are_those_of_the_specifications(batch: int, mapped: torch.dtype | None) -> None:
    """Greedy and noisy rows, filters left out; drafts only as deep as the sequence's may be."""
    case = random_case(1, 5, batch=batch)
    tables, params = case.tables, sampled(case)
    ids = torch.randperm(4000, generator=torch.Generator().manual_seed(2))[:2500].sort().values
    token_map = None if mapped is None else ids.to(mapped).to(DEVICE)
    before = snapshot(tables)
    for step in range(STEPS):
        rows, logits = new_rows(batch, 1), normal(batch, 2500 + 16 * step, scale=0.5)[:, :2500]
        propose(case.batch, logits, step, token_map, rows)
        tokens = expected(case, params, logits, step, None if mapped is None else ids)
        for b, slot in enumerate(case.slots):
            live, base = slot != tables.padding_slot, int(tables.length[slot]) + step
            wanted = live and step < int(tables.speculative[slot])
            if live:
                before["drafts"][slot, step] = tokens[b] if wanted else -1
            physical = case.row(slot, base) if wanted else -1
            held = (tokens[b], base) if physical >= 0 else (0, 0)
            assert int(rows.kv_rows[b]) == physical and int(rows.starts[b]) == base
            assert (int(rows.tokens[b]), int(rows.positions[b])) == held
    assert all(torch.equal(value, before[name]) for name, value in snapshot(tables).items())


def test_noise_and_temperature_matter_and_filters_do_not() -> None:
    """What the comparison above would not notice, if its logits decided alone."""
    case = random_case(3, 5, batch=6)
    params, logits = sampled(case), normal(6, 2500, scale=0.5)
    greedy = logits.argmax(-1).tolist()
    noisy = expected(case, params, logits, 0, None)
    assert [a == b for a, b in zip(greedy, noisy, strict=True)][:4] == [True, False, False, False]
    assert noisy != expected(case, params, logits, 1, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_row_drafts_an_id_of_the_vocabulary(value: float) -> None:
    case = random_case(2, 5, batch=5)
    sampled(case)
    rows = new_rows(5, 1)
    propose(case.batch, torch.full((5, 270), value, device=DEVICE), 0, None, rows)
    drafts = [int(case.tables.drafts[slot, 0]) for slot in case.slots[:-1]]
    assert all(-1 <= draft < 270 for draft in drafts) and max(drafts) >= 0


def test_all_drafts_at_once_are_those_one_after_the_other() -> None:
    case = random_case(4, 5, batch=6)
    sampled(case)
    logits = normal(6 * STEPS, 700, scale=0.5)
    for step in range(STEPS):
        propose(case.batch, logits[step::STEPS].contiguous(), step, None, new_rows(6, 1))
    wanted = case.tables.drafts.clone()
    case.tables.drafts[case.slots[:-1], :STEPS] = -7
    propose_all(case.batch, logits, None)
    assert torch.equal(case.tables.drafts, wanted)
    propose_all(case.batch, logits.flip(0), None)
    assert not torch.equal(case.tables.drafts, wanted)
