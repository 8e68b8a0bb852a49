"""Special rows on the device against the specification of sampling: the same tokens and log-probabilities."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.device.special import SpecialRows, SpecialSampler
from eyas.engine.device.special import score as device_score
from eyas.engine.kernels.sampling import sample as sample_kernels
from eyas.engine.sampling.scores import score
from tests.unit.crossed import crossed
from tests.unit.special_steps import CONTEXT, DEVICE, EOS, IDS, Step, same

ASKED = {
    "logprobs": {"logprobs": 3},
    "repetition": {"repetition_penalty": 1.7},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": -0.8, "repetition_penalty": 0.6},
    "bias": {"logit_bias": {3: 4.0, 38: -100.0, 0: 2.5}, "presence_penalty": 0.5},
    "min_tokens": {"min_tokens": 7, "max_tokens": 9, "stop_token_ids": (1, 5), "logprobs": 0},
    "bad_words": {"bad_words": tuple((i, j) for i in range(IDS) for j in (1, 2)) + ((4,), (3, 2, 1, 6))},
}


@pytest.mark.parametrize(("asked", "width"), crossed(ASKED, [1, 6], quick=lambda asked, width: width == 6))
def test_tokens_and_logprobs_are_the_specifications(asked: str, width: int) -> None:
    """At the root, at every node below it, at a prompt's end; nodes without a draft change no other row."""
    step = Step(width, width, [ASKED[asked]] * 6)
    told = step.run()
    for i, seq in enumerate(step.rounds):
        place = i * width
        nodes = range(1 + len(step.trees[seq.slot]))
        expected = [step.expected(seq, node, seq.choice, place + node) for node in nodes]
        assert step.settled[place : place + len(nodes)].tolist() == [token for token, _ in expected]
        theirs = [logprob for _, logprob in expected if logprob is not None]
        ours = told.logprobs(place, nodes)
        assert len(ours) == len(theirs) and all(map(same, ours, theirs))
    for i, seq in enumerate(step.ends):
        place = len(step.rounds) * width + i
        token, logprob = step.expected(seq, 0, seq.choice, place)
        assert step.settled[place].item() == token
        assert same(next(iter(told.logprobs(place, (0,))), None), logprob)


def test_other_choices_have_noise_of_their_own() -> None:
    """And leave the leader's token as it is."""
    step = Step(1, 2, [{"logprobs": 2, "frequency_penalty": 0.5}] * 4)
    for seq in step.sequences:
        seq.forks = (7, 8, 9)
        params = msgspec.structs.replace(seq.generation.request.params, temperature=1.5, top_k=0)
        seq.generation.request = msgspec.structs.replace(seq.generation.request, params=params)
        step.tables.temperature[seq.slot], step.tables.top_k[seq.slot] = 1.5, 0
    told = step.run()
    places = [0, 2, 4, 5]
    tokens = set()
    for place, seq in zip(places, step.sequences, strict=True):
        assert step.settled[place].item() == step.expected(seq, 0, seq.choice, place)[0]
        firsts = told.firsts(place)
        assert list(firsts) == [7, 8, 9]
        for choice, (token, logprob) in firsts.items():
            assert (token, True) == (step.expected(seq, 0, choice, place)[0], logprob is not None)
            assert same(logprob, step.expected(seq, 0, choice, place)[1])
            tokens.add((place, token))
    assert len(tokens) > len(places), "all choices sound alike"


def test_forks_whose_first_token_is_in_flight_are_not_sampled_again() -> None:
    (seq,) = Step(0, 1, [{}]).sequences
    seq.forks = (1,)
    assert seq.special and seq.next_forks == (1,)
    seq.in_flight = 1
    assert not seq.special and seq.next_forks == ()


class _Allocations(TorchDispatchMode):
    """The widths of tensors that operations give, other than views of what was there before."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.widths = known, [0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in self.known:
            self.widths.append(out.shape[-1] if out.dim() else 1)
        return out


@pytest.mark.parametrize("count", [1, 3])
def test_no_row_of_logits_is_allocated(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows: what is as wide as the vocabulary was there before. Kernels allocate nothing."""
    monkeypatch.setattr(type(sample_kernels._peaks), "run", lambda *args, **kwargs: None)
    vocab = 5000  # wider than the short list that filters work on
    tables = SlotTables(TableSizes(2, 1, 1, CONTEXT), DEVICE)
    sampler = SpecialSampler(tables, vocab, pdl=False)
    logits = torch.randn(count, vocab, device=DEVICE)
    ints = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    rows = SpecialRows(EOS)
    (seq,) = Step(0, 1, [ASKED["penalties"] | {"logprobs": 2}]).sequences
    for place in range(count):
        rows.add_end(place, seq)
    every = torch.from_numpy(rows.array()).to(DEVICE)
    here = {part.untyped_storage().data_ptr() for part in (*vars(sampler._work).values(), logits, ints)}
    with _Allocations(here) as seen:
        sampler.sample(logits, ints, ints, every)
    assert 0 < max(seen.widths) < vocab


@pytest.mark.parametrize("top", [0, 3])
def test_a_prompt_s_tokens_are_scored_as_they_were_sampled(top: int) -> None:
    """To the bit, whatever rows are scored with them; and but for rounding as the specification says."""
    step = Step(1, 1, [{"logprobs": top}] * 6)
    report, rows = step.run(), step.logits
    sampled = [one for place in range(len(rows)) for one in report.logprobs(place, (0,))]
    tokens = step.settled.long()
    together = device_score(rows, tokens, top)
    alone = [device_score(rows[i : i + 1], tokens[i : i + 1], top).rows()[0] for i in range(len(rows))]
    assert together.rows() == alone == sampled
    plain = score(rows, tokens, top).rows()
    assert all(map(same, sampled, plain)) and len(plain) == 6
