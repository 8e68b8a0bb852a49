"""Special rows on the device against the specification of sampling: the same tokens and log-probabilities."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from rounds_rig import put_tree, random_tree
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, TokenLogprob
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence
from eyas.engine.batch.stopping import banned_ids
from eyas.engine.batch.tables import SlotTables, TableSizes, TableWrites
from eyas.engine.batch.tree import DraftTree
from eyas.engine.device.special import SpecialReport, SpecialRows, SpecialSampler, occupy_special
from eyas.engine.device.special import score as device_score
from eyas.engine.kernels.sampling import sample as sample_kernels
from eyas.engine.sampling.sampler import SampledRow, sample
from eyas.engine.sampling.scores import score
from tests.unit.crossed import crossed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, CONTEXT, EOS = 40, 64, (39,)
IDS = 7  # few: texts repeat themselves

ASKED = {
    "logprobs": {"logprobs": 3},
    "repetition": {"repetition_penalty": 1.7},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": -0.8, "repetition_penalty": 0.6},
    "bias": {"logit_bias": {3: 4.0, 38: -100.0, 0: 2.5}, "presence_penalty": 0.5},
    "min_tokens": {"min_tokens": 7, "max_tokens": 9, "stop_token_ids": (1, 5), "logprobs": 0},
    "bad_words": {"bad_words": tuple((i, j) for i in range(IDS) for j in (1, 2)) + ((4,), (3, 2, 1, 6))},
}


class Step:
    """Rounds of `width` rows, then ends; the tables as they stand when the forward has run."""

    def __init__(self, seed: int, width: int, asked: list[dict]) -> None:
        self.rng = random.Random(seed)
        self.width = width
        sizes = TableSizes(len(asked) + 1, 1, width, CONTEXT)
        self.tables = SlotTables(sizes, DEVICE)
        self.sequences = [self._sequence(slot, params) for slot, params in enumerate(asked)]
        self.trees = {seq.slot: self._tree(seq) for seq in self.sequences}
        self.ends = self.sequences[len(asked) // 2 :]
        self.rounds = self.sequences[: len(asked) // 2]
        for seq in self.ends:
            self.trees[seq.slot] = DraftTree((), ())
        count = len(self.rounds) * width + len(self.ends)
        self.logits = 3 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        self.settled = torch.full((count,), -1, dtype=torch.int32, device=DEVICE)

    def _sequence(self, slot: int, params: dict) -> Sequence:
        pick = self.rng
        temperature, seed = pick.choice((0.0, 0.9)), pick.getrandbits(64)
        wanted = SamplingParams(temperature=temperature, top_k=pick.choice((0, 9)), seed=seed, **params)
        request = GenerationRequest("a", tuple(pick.choices(range(IDS), k=9)), wanted)
        generation = Generation(request, 1, GenerationKind.LOCAL, 0.0, 1.0)
        output = pick.choices(range(IDS), k=pick.randrange(8))
        seq = Sequence(slot, generation, pick.randrange(3), request.prompt_ids, output, slot=slot)
        writes = TableWrites(self.tables)
        writes.occupy(slot, wanted, seq.choice, speculative=32)
        occupy_special(writes, seq, EOS)
        writes.put("length", slot, (len(seq) - 1,))
        self.tables.apply(torch.from_numpy(writes.array()).to(DEVICE))
        return seq

    def _tree(self, seq: Sequence) -> DraftTree:
        tree = random_tree(self.rng, self.rng.randrange(self.width))
        tree = DraftTree([token % IDS for token in tree.tokens], tree.parents)
        put_tree(self.tables, seq.slot, tree)
        return tree

    def positions(self) -> torch.Tensor:
        """As `rounds.prepare` leaves them: a node that holds nothing stands at 0."""
        found = []
        for seq in self.rounds:
            tree = self.trees[seq.slot]
            below = [len(seq) - 1 + tree.depth(node) for node in range(len(tree))]
            found += [len(seq) - 1, *below, *[0] * (self.width - 1 - len(tree))]
        return torch.tensor(found, dtype=torch.int32, device=DEVICE)

    def run(self) -> SpecialReport:
        rows = SpecialRows(EOS)
        for i, seq in enumerate(self.rounds):
            rows.add_round(i * self.width, self.width, seq)
        for i, seq in enumerate(self.ends):
            rows.add_end(len(self.rounds) * self.width + i, seq)
        sampler = SpecialSampler(self.tables, VOCAB, pdl=False)
        every = torch.from_numpy(rows.array())
        return rows.report([sampler.sample(self.logits, self.positions(), self.settled, every).cpu()])

    def expected(self, seq: Sequence, node: int, choice: int, place: int) -> tuple[int, TokenLogprob | None]:
        """`node` 0: the root."""
        params, tree = seq.generation.request.params, self.trees[seq.slot]
        above = [tree.tokens[i] for i in tree.path(node - 1)] if node else []
        banned = banned_ids(params, EOS, len(seq.output) + len(above))
        row = SampledRow(params, choice, len(seq) + len(above), seq.prompt, seq.output, above, banned)
        found = sample(self.logits[place : place + 1].cpu(), [row])
        return found.tokens[0], found.logprobs[0]


def same(ours: TokenLogprob | None, theirs: TokenLogprob | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return (
        ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        and [id for id, _ in ours.top] == [id for id, _ in theirs.top]
        and [value for _, value in ours.top] == pytest.approx([v for _, v in theirs.top], abs=1e-5)
    )


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
