"""The sampler against its plain twin, its tie rules, and its independence of who shares the call."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_twins import choose, gumbel, threads

from eyas.common.params import SamplingParams
from eyas.engine.sampling.sampler import (
    SampledRow,
    draft_probabilities,
    perturbed,
    sample,
    survivors,
    tempered,
)

NEG = -torch.inf


def row(params: SamplingParams, *, position: int = 9, **context: object) -> SampledRow:
    return SampledRow(
        params, **{"choice": 0, "prompt": (), "output": (), "ancestors": (), **context}, position=position
    )


def kept(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    scores = survivors(tempered(logits.unsqueeze(0), [params]), [params])[0]
    return (scores > NEG).nonzero().squeeze(1).tolist()


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], SampledRow]:
    """Logits on a quarter grid, so that ties are common, and a row with any mix of parameters."""
    size = draw(st.integers(2, 40))
    ids = st.lists(st.integers(0, size - 1), max_size=12)
    logits = [quarters / 4 for quarters in draw(st.lists(st.integers(-32, 32), min_size=size, max_size=size))]
    banned = draw(st.lists(st.integers(0, size - 1), max_size=size - 1, unique=True))
    left = min(set(range(size)) - set(banned))  # something can always be chosen
    word = st.lists(st.integers(0, size - 1).filter(lambda id: id != left), min_size=1, max_size=3)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.25, 0.8, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 3, 10, 100])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.07, 0.6])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.6, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -0.4])),
        logit_bias=draw(
            st.dictionaries(st.integers(0, size - 1), st.sampled_from([-100.0, -1.5, 2.5]), max_size=3)
        ),
        seed=draw(st.integers(0, 2**64 - 1)),
        bad_words=tuple(draw(st.lists(word.map(tuple), max_size=4))),
    )
    context = SampledRow(
        params,
        choice=draw(st.integers(0, 3)),
        position=draw(st.integers(0, 5000)),
        prompt=draw(ids),
        output=draw(ids),
        ancestors=draw(ids),
        banned=banned,
    )
    return logits, context


@given(case=cases())
@settings(max_examples=80, deadline=None)
def test_sampler_equals_its_plain_twin(case: tuple[list[float], SampledRow]) -> None:
    logits, context = case
    expected = choose(logits, context)
    assume(expected.margin > 1e-5)  # sums of probabilities round differently at an exact boundary
    assert sample(torch.tensor([logits]), [context]).tokens == [expected.token]


@given(batch=st.lists(cases(), min_size=2, max_size=6), data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_row_ignores_its_neighbours(
    batch: list[tuple[list[float], SampledRow]], data: st.DataObject
) -> None:
    """Rows of one width with different parameters: alone, together and reordered they agree."""
    width = min(len(logits) for logits, _ in batch)
    rows = [_fitted(context, width) for _, context in batch]
    logits = torch.tensor([values[:width] for values, _ in batch])
    together = sample(logits, rows)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample(logits[order], [rows[i] for i in order])
    for place, i in enumerate(order):
        alone = sample(logits[i : i + 1], [rows[i]])
        assert alone.tokens[0] == together.tokens[i] == shuffled.tokens[place]
        assert alone.logprobs[0] == together.logprobs[i] == shuffled.logprobs[place]


def _fitted(context: SampledRow, width: int) -> SampledRow:
    fields = {f: [t for t in getattr(context, f) if t < width] for f in ("prompt", "output", "ancestors")}
    bias = {t: b for t, b in context.params.logit_bias.items() if t < width}
    values = {f: getattr(context.params, f) for f in context.params.__struct_fields__}
    words = tuple(word for word in context.params.bad_words if word[-1] < width)
    changed = {"logit_bias": bias, "bad_words": words, "logprobs": context.position % 4}
    params = SamplingParams(**{**values, **changed})
    return SampledRow(params, context.choice, context.position, **fields)


MIXED = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.8, top_p=0.95),
    SamplingParams(seed=3, temperature=0.0, logprobs=5),
    SamplingParams(seed=4, top_k=40, logprobs=0),
    SamplingParams(seed=5, temperature=1.7, top_p=0.999),
    SamplingParams(seed=6, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.2, logprobs=20),
]


@pytest.mark.parametrize("vocab_size, repeats", [(4096, 20), (128_256, 1)])
@pytest.mark.parametrize("count", [1, 2])
def test_large_rows_ignore_their_neighbours(vocab_size: int, repeats: int, count: int) -> None:
    """Vector widths, windows, sparse noise and threads change with the batch; tokens and logprobs do not."""
    with threads(count):
        generator = torch.Generator().manual_seed(vocab_size)
        history = torch.randint(vocab_size, (300,), generator=generator).tolist()
        rows = [
            row(params, position=100 + i, prompt=history[:200], output=history[200:], ancestors=history[:i])
            for i in range(repeats)
            for params in MIXED
        ]
        logits = torch.randn(len(rows), vocab_size, generator=generator) * 3
        raw = logits.clone()
        together = sample(logits, rows)
        assert torch.equal(logits, raw)
        for i in range(len(rows)):
            alone = sample(logits[i : i + 1], rows[i : i + 1])
            assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[i], together.logprobs[i])


def test_ties_go_to_the_lowest_id() -> None:
    flat = torch.zeros(10)
    assert sample(flat.unsqueeze(0), [row(SamplingParams(temperature=0.0))]).tokens == [0]
    assert kept(flat, SamplingParams(top_k=3)) == [0, 1, 2]
    assert kept(flat, SamplingParams(top_p=0.35)) == [0, 1, 2, 3]
    tied = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 1.0])
    assert kept(tied, SamplingParams(top_k=3)) == [1, 2, 3]
    assert kept(tied, SamplingParams(top_k=100)) == list(range(6))


def test_the_id_that_crosses_the_mass_is_kept() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert kept(logits, SamplingParams(top_p=0.49)) == [0]
    assert kept(logits, SamplingParams(top_p=0.51)) == [0, 1]
    assert kept(logits, SamplingParams(top_p=0.81)) == [0, 1, 2]
    assert kept(logits, SamplingParams(top_p=0.999)) == [0, 1, 2, 3]
    # Filters in order, each renormalising: of the two best, the first alone holds 0.5 / 0.8.
    assert kept(logits, SamplingParams(top_k=2, top_p=0.6)) == [0]
    assert kept(logits, SamplingParams(min_p=0.25)) == [0, 1, 2]
    assert kept(logits, SamplingParams(temperature=0.5, min_p=0.25)) == [0, 1]


@pytest.mark.parametrize("nucleus", [10, 64, 65, 1000, 1024, 1025, 3000])
def test_windows_do_not_change_a_nucleus(nucleus: int) -> None:
    """Equal heads of every size around the windows' edges, in a vocabulary larger than any window."""
    logits = torch.full((4096,), -30.0)
    ids = torch.randperm(4096, generator=torch.Generator().manual_seed(nucleus))[:nucleus]
    logits[ids] = 0.0
    expected = sorted(ids.tolist())[: nucleus - nucleus // 10]
    assert kept(logits, SamplingParams(top_p=(len(expected) - 0.5) / nucleus)) == expected


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.tensor([[-50.0, 80.0, 79.0, 0.0]])
    assert sample(logits, [row(SamplingParams(temperature=temperature, seed=8))]).tokens == [1]


def test_penalties_count_what_they_should() -> None:
    """Prompt counts for repetition only; output and ancestors count for all three."""
    logits = torch.tensor([[4.0, 3.9, 3.8, -1.0]])

    def token(params: SamplingParams, **context: object) -> int:
        return sample(logits, [row(params, **context)]).tokens[0]

    repetition = SamplingParams(temperature=0.0, repetition_penalty=1.1)
    presence = SamplingParams(temperature=0.0, presence_penalty=0.25)
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.06)
    for field in ("prompt", "output", "ancestors"):
        assert token(repetition, **{field: [0]}) == 1
        assert token(presence, **{field: [0]}) == (0 if field == "prompt" else 1)
        assert token(frequency, **{field: [0]}) == 0
        assert token(frequency, **{field: [0, 0]}) == (0 if field == "prompt" else 1)
    assert token(frequency, output=[0], ancestors=[0]) == 1
    assert token(presence, output=[0, 1], ancestors=[1]) == 2


def test_bias_comes_before_penalties_and_bans_after() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    biased = SamplingParams(temperature=0.0, logit_bias={2: 2.0}, repetition_penalty=2.5)
    assert sample(logits, [row(biased)]).tokens == [2]
    assert sample(logits, [row(biased, output=[2])]).tokens == [0]  # (0 + 2) / 2.5, not 0 / 2.5 + 2
    assert sample(logits, [row(SamplingParams(logit_bias={0: 100.0}), banned=[0, 1])]).tokens == [2]


def test_logprobs_are_the_raw_models() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 5.0]])
    asking = SamplingParams(temperature=0.0, logprobs=2, logit_bias={0: 50.0}, top_k=1)
    silent = SamplingParams(temperature=0.0)
    found = sample(logits, [row(asking), row(silent)])
    raw = logits[0].log_softmax(-1)
    assert found.tokens == [0, 3] and found.logprobs[1] is None
    assert found.logprobs[0].logprob == raw[0].item()
    assert found.logprobs[0].top == ((1, raw[1].item()), (2, raw[2].item()))
    own_only = sample(logits, [row(SamplingParams(temperature=0.0, logprobs=0)), row(silent)])
    assert own_only.logprobs[0].top == () and own_only.logprobs[0].logprob == raw[1].item()


def test_perturbed_scores_use_the_targets_ids() -> None:
    """A mapped draft vocabulary meets the noise that the target will add to the same tokens."""
    token_map = torch.tensor([5, 90, 17, 3000])
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    rows = [
        row(SamplingParams(seed=11), position=4),
        row(SamplingParams(temperature=0.0)),
        row(SamplingParams(seed=12, temperature=0.5), position=6, choice=2),
    ]
    scores = perturbed(logits, rows, token_map)
    assert torch.equal(scores[1], logits[1])
    for r, t in ((0, 1.0), (2, 0.5)):
        top = logits[r].max()
        for j, v in enumerate(token_map.tolist()):
            g = gumbel(rows[r].params.seed, rows[r].position, rows[r].choice, v)
            assert scores[r, j].item() == pytest.approx(
                ((logits[r, j] - top) / t).item() + float(g), abs=1e-6
            )
    same = perturbed(logits, rows, torch.arange(4))
    assert torch.equal(same, perturbed(logits, rows, None))


def test_a_drafter_with_the_targets_logits_proposes_the_targets_tokens() -> None:
    logits = torch.randn(200, 64, generator=torch.Generator().manual_seed(3)) * 2
    rows = [row(SamplingParams(seed=i, temperature=0.7), position=i) for i in range(200)]
    assert perturbed(logits, rows, None).argmax(-1).tolist() == sample(logits, rows).tokens


def test_knowing_the_seed_is_worth_acceptance() -> None:
    """Shared noise agrees at least (1 - TV) / (1 + TV) of the time; fresh noise only sum p q."""
    generator = torch.Generator().manual_seed(4)
    target = torch.randn(16, generator=generator) * 1.5
    draft = target + torch.randn(16, generator=generator) * 0.5
    p, q = target.softmax(0), draft.softmax(0)
    distance = (p - q).abs().sum().item() / 2
    n = 4000
    rows = [row(SamplingParams(seed=i)) for i in range(n)]
    strangers = [row(SamplingParams(seed=i + n)) for i in range(n)]
    tokens = torch.tensor(sample(target.expand(n, -1), rows).tokens)
    shared, fresh = (
        (perturbed(draft.expand(n, -1), some, None).argmax(-1) == tokens).float().mean().item()
        for some in (rows, strangers)
    )
    assert shared > (1 - distance) / (1 + distance) - 0.03
    assert fresh == pytest.approx((p * q).sum().item(), abs=0.04)
    assert shared > fresh + 0.2


def test_the_chances_of_a_draft_tree() -> None:
    """softmax(logits + temperature * G), with the noise of the target's ids; near temperature 0 no noise."""
    token_map = torch.tensor([5, 90, 17, 3000])
    logits = torch.randn(4, generator=torch.Generator().manual_seed(2))
    temperatures = (0.0, 1e-45, 0.5, 1.5)
    rows = [row(SamplingParams(seed=12, temperature=t), position=6, choice=2) for t in temperatures]
    found = draft_probabilities(logits.expand(4, -1), rows, token_map)
    assert torch.equal(found[0], logits.softmax(-1)) and torch.equal(found[1], found[0])
    noise = torch.tensor([float(gumbel(12, 6, 2, v)) for v in token_map.tolist()])
    for t, chances in zip(temperatures, found, strict=True):
        assert torch.allclose(chances, (logits + t * noise).softmax(-1), atol=1e-6)


def test_a_tree_that_knows_the_seed_holds_the_token_more_often() -> None:
    """Three children by the coupled chances against the three of highest probability."""
    generator = torch.Generator().manual_seed(4)
    target = torch.randn(64, generator=generator) * 1.5
    draft = (target + torch.randn(64, generator=generator)).expand(2000, -1)
    rows = [row(SamplingParams(seed=i)) for i in range(2000)]
    greedy = [row(SamplingParams(temperature=0.0))] * 2000
    tokens = torch.tensor(sample(target.expand(2000, -1), rows).tokens).unsqueeze(1)
    coupled, blind = (
        (draft_probabilities(draft, some, None).topk(3).indices == tokens).any(-1).float().mean().item()
        for some in (rows, greedy)
    )
    assert coupled > blind + 0.3


def test_one_position_gives_one_token_however_it_is_reached() -> None:
    """The same history as output or as ancestors, with other nodes in the call: the same token."""
    params = SamplingParams(seed=9, repetition_penalty=1.3, presence_penalty=0.4, top_p=0.9)
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(5)).expand(4, -1)
    history = [4, 8, 8, 15]
    rows = [row(params, prompt=[1, 2], output=history[:i], ancestors=history[i:]) for i in range(1, 5)]
    tokens = sample(logits, rows).tokens
    assert all(a == b for a, b in itertools.pairwise(tokens))
