"""Outcomes on the device against what `speculation.ahead.Ahead` does: tokens, rows, what each row sees."""

from __future__ import annotations

import pytest
import torch
from test_kernels_chains import sampled
from test_kernels_rounds import snapshot
from test_kernels_sample import normal

from eyas.engine.batch.tables import mask_words
from eyas.engine.kernels.drafts.outcomes import RoundOutcomes, extend, find
from eyas.engine.kernels.sampling.couple import couple
from eyas.engine.sampling.sampler import SampledRow, perturbed
from eyas.engine.speculation.drafters.ahead import fan_out
from tests.unit.rounds_rig import DEVICE, Case, new_rows, random_case, words_of

STEPS = 3
VOCAB = 40  # of the head


def ids_of(vocab: int) -> torch.Tensor:
    """The target's id of each of the head's."""
    return torch.randperm(500, generator=torch.Generator().manual_seed(2))[:vocab].sort().values


def ended(batch: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`accepted`, `ranks`, `drafts` of unlike rounds: one chain is short, one outcome is none."""
    drafts = ids_of(VOCAB)[torch.randint(8, (batch, STEPS), generator=torch.Generator().manual_seed(4))]
    drafts[1, 1:] = -1
    ends = []
    for b in range(batch):
        counts = fan_out(1 if b == 1 else STEPS, 0.2 + 0.1 * b, count)
        ends.append([(after, rank) for after, most in enumerate(counts) for rank in range(most)])
    ends[2][-1] = (0, -1)
    accepted, ranks = torch.tensor(ends, dtype=torch.int32, device=DEVICE).unbind(2)
    return accepted.contiguous(), ranks.contiguous(), drafts.int().to(DEVICE)


def sees(after: int, own: int, level: int, count: int) -> int:
    """The bits of the rows behind the certain ones that a row sees."""
    rows = [*range(after), *(STEPS + at * count + own for at in range(level + 1))]
    return sum(1 << row for row in rows)


def check_rows(case: Case, outcomes: RoundOutcomes, rows, level: int, tokens: list[list[int]]) -> None:
    count = outcomes.accepted.shape[1]
    for b, slot in enumerate(case.slots):
        base = int(case.tables.length[slot])
        for own in range(count):
            row, after = b * count + own, int(outcomes.accepted[b, own])
            live = slot != case.tables.padding_slot
            place = case.row(slot, base + STEPS + level * count + own) if live else -1
            assert int(rows.kv_rows[row]) == place
            held = (tokens[b][own], base + after + level) if place >= 0 else (0, 0)
            assert (int(rows.tokens[row]), int(rows.positions[row])) == held
            expected = words_of(sees(after, own, level, count), len(outcomes.visible))
            assert torch.equal(outcomes.visible[:, b, own], expected)


@pytest.mark.parametrize(
    ("mapped", "count"),
    [
        pytest.param(False, 5, id="same ids, one word"),
        pytest.param(True, 21, id="mapped, two words"),
        pytest.param(True, 5, id="mapped, one word", marks=pytest.mark.slow),
        pytest.param(False, 21, id="same ids, two words", marks=pytest.mark.slow),
    ],
)
def test_tokens_and_rows_are_those_of_the_specification(count: int, mapped: bool) -> None:
    batch = 4
    case = random_case(3, 1 + STEPS + STEPS * count, batch=batch)
    before = snapshot(case.tables)
    token_map = ids_of(VOCAB).to(DEVICE) if mapped else None
    known = ids_of(VOCAB) if mapped else torch.arange(VOCAB)
    accepted, ranks, drafts = ended(batch, count)
    outcomes, rows = RoundOutcomes.of(accepted, ranks, drafts), new_rows(batch * count, 1)
    assert len(outcomes.visible) == mask_words(STEPS + STEPS * count)
    ids = normal(batch * (STEPS + 1), VOCAB).topk(count + 1).indices
    sources = torch.empty(batch * count, dtype=torch.int32, device=DEVICE)
    find(case.batch, outcomes, ids, token_map, rows, sources)
    tokens: list[list[int]] = []
    for b in range(batch):
        tokens.append([])
        for after, rank in zip(accepted[b].tolist(), ranks[b].tolist(), strict=True):
            best = known[ids[b * (STEPS + 1) + after].cpu()].tolist()
            draft = int(drafts[b, after]) if after < STEPS else -1
            others = [token for token in best if token != draft]
            tokens[-1].append(others[rank] if rank >= 0 else -1)
    assert outcomes.tokens[:, :, 0].tolist() == tokens
    assert sources.tolist() == [
        b * (STEPS + 1) + after for b in range(batch) for after in accepted[b].tolist()
    ]
    ran = rows.tokens.view(batch, count).tolist()  # an outcome that is none has a row all the same
    check_rows(
        case,
        outcomes,
        rows,
        0,
        [[t if t >= 0 else r for t, r in zip(*two, strict=True)] for two in zip(tokens, ran, strict=True)],
    )
    for level in range(STEPS):
        logits = normal(batch * count, 2500 + level)[:, :VOCAB].contiguous()
        extend(case.batch, outcomes, level, logits, token_map, rows)
        tokens = known[logits.argmax(-1).cpu()].view(batch, count).tolist()
        assert outcomes.tokens[:, :, level + 1].tolist() == tokens
        if level + 1 < STEPS:
            check_rows(case, outcomes, rows, level + 1, tokens)
    assert all(torch.equal(value, before[name]) for name, value in snapshot(case.tables).items())


def test_a_head_that_knows_few_tokens_has_fewer_outcomes() -> None:
    case = random_case(3, 16, batch=3)
    accepted = torch.zeros(3, 4, dtype=torch.int32, device=DEVICE)
    ranks = torch.arange(4, dtype=torch.int32, device=DEVICE).repeat(3, 1)
    drafts = torch.tensor([[1, 0, 0], [2, 0, 0], [9, 0, 0]], dtype=torch.int32, device=DEVICE)
    outcomes, rows = RoundOutcomes.of(accepted, ranks, drafts), new_rows(12, 1)
    ids = torch.tensor([[2, 1, 0]] * 12, device=DEVICE)
    find(case.batch, outcomes, ids, None, rows, torch.empty(12, dtype=torch.int32, device=DEVICE))
    assert outcomes.tokens[:, :, 0].tolist() == [[2, 0, -1, -1], [1, 0, -1, -1], [2, 1, 0, -1]]


def test_each_outcomes_noise_is_that_of_its_own_place() -> None:
    """The best of coupled logits is the target's choice among the head's ids."""
    case = random_case(4, 8, batch=4)
    params = sampled(case)
    depths = torch.tensor([0, 2, 1] * 4, dtype=torch.int32, device=DEVICE)
    logits = normal(12, VOCAB, scale=0.5)
    places = [int(case.tables.length[slot]) + 1 + 1 + depth for slot in case.slots for depth in (0, 2, 1)]
    asking = [
        SampledRow(params[row // 3], row // 3 % 3, place, (), (), ()) for row, place in enumerate(places)
    ]
    expected = perturbed(logits.cpu(), asking, ids_of(VOCAB)).argmax(-1)
    plain = logits.clone()
    couple(case.batch, 1, logits, ids_of(VOCAB).to(DEVICE), depths)
    assert logits.argmax(-1).cpu().tolist() == expected.tolist()
    couple(case.batch, 1, plain, ids_of(VOCAB).to(DEVICE))
    assert plain.argmax(-1).tolist() != expected.tolist(), "the depths matter"
