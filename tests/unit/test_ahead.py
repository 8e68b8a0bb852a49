"""Drafting ahead: the outcomes and their chains against what the head drafts after each of them, and a draft
engine that does it against one that never does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from engine_rig import HandCopier, hand_pulls

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.engine.ipc.messages import DraftClose, DraftCommit, DraftOpen, DraftUp
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.pages import PagePool
from eyas.engine.models.base import Drafted
from eyas.engine.sampling.sampler import SampledRow, perturbed
from eyas.engine.speculation.draft_worker import ahead_drafter
from eyas.engine.speculation.draft_worker.draft_engine import DraftEngine, DraftParts
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftInput, DraftRequest
from eyas.engine.speculation.drafters.ahead import VerifiedRound, fan_out, rows_ahead
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.plain_ahead import OUTCOMES, Ahead, Chain, ChainRunner, PlainAhead, advance
from tests.unit.tiny import write_tiny_eagle3, write_tiny_llama

N, STEPS = 40, 3
WIDTH, VOCAB = 64, 256
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(folder / "target")
    return target, write_tiny_eagle3(folder / "head", target, draft_vocab=100)


# --- which outcomes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize(("steps", "outcomes"), [(1, 1), (3, 8), (5, 8), (7, 24)])
def test_the_fan_out_is_what_it_may_be(steps: int, outcomes: int, acceptance: float) -> None:
    counts = fan_out(steps, acceptance, outcomes)
    assert len(counts) == steps + 1 and sum(counts) == outcomes and min(counts) >= 0
    assert list(counts[:-1]) == sorted(counts[:-1], reverse=True), "the earlier end is the likelier one"


def test_a_head_that_is_always_right_is_followed_to_the_end_and_a_wrong_one_is_not() -> None:
    assert fan_out(4, 0.95, 8)[-1] == max(fan_out(4, 0.95, 8))
    assert fan_out(4, 0.05, 8)[0] == max(fan_out(4, 0.05, 8))


def test_no_other_fan_out_of_as_many_outcomes_misses_less_often() -> None:
    """For misses that fall as 1 / (1 + F): the closed form is the best up to rounding."""
    steps, outcomes, chance = 3, 24, 0.4

    def missed(counts: SequenceOf[int]) -> float:
        ends = [chance**k * (1 - chance) for k in range(steps)] + [chance**steps]
        return sum(p / max(f, 0.5) for p, f in zip(ends, counts, strict=True))

    found = missed(fan_out(steps, chance, outcomes))
    others = (
        (a, b, c, outcomes - a - b - c)
        for a in range(outcomes)
        for b in range(outcomes - a)
        for c in range(outcomes - a - b)
    )
    best = min(map(missed, others))
    assert best <= found < 1.03 * best
    assert missed((3, 3, 3, 3)) > 1.03 * best, "the test would see an even fan-out"


# --- what is drafted for them -----------------------------------------------------------------------------


class Bench:
    """A head over a pool of its own, with N certain rows of one sequence."""

    def __init__(self, folders: tuple[Path, Path], offset: int) -> None:
        target = Rig(folders[0])
        rig = HeadRig(folders[1], target)
        self.head, self.runner = rig.head, ChainRunner(rig.head, rig.pool, rig.backend)
        self.pages, self.offset = target.table(N + 128), offset
        generator = torch.Generator().manual_seed(3)
        self.features = torch.randn(N, WIDTH, generator=generator)
        self.tokens = torch.randint(VOCAB, (N,), generator=generator).tolist()
        self.last = self.extend(0, self.tokens, self.features)

    def extend(self, base: int, tokens: SequenceOf[int], features: torch.Tensor):
        [last] = self.runner.extend([DraftExtension(self.pages, base, tokens, features, self.offset)])
        return last

    def chain(self, base: int, last, params: SamplingParams) -> Chain:
        request = DraftRequest(self.pages, base, last, params, 1, self.offset)
        return self.runner.chain(request, STEPS)

    def ahead(self, chain: Chain, params: SamplingParams, certain: int) -> Ahead:
        """The last `certain` rows are written by its first pass."""
        here = DraftExtension(
            self.pages, N - certain, self.tokens[-certain:], self.features[-certain:], self.offset
        )
        return Ahead(VerifiedRound(DraftInput(0, here, params, 1), chain), fan_out(STEPS, 0.5, OUTCOMES))


@pytest.mark.parametrize(
    ("params", "offset"),
    [
        pytest.param(GREEDY, 0, id="greedy"),
        pytest.param(SEEDED, 40, id="seeded, windowed"),
        pytest.param(GREEDY, 40, id="greedy, windowed", marks=pytest.mark.slow),
        pytest.param(SEEDED, 0, id="seeded", marks=pytest.mark.slow),
    ],
)
def test_an_outcome_is_answered_as_if_its_features_were_the_predicted_ones(
    folders: tuple[Path, Path], params: SamplingParams, offset: int
) -> None:
    bench, twin = Bench(folders, offset), Bench(folders, offset)
    chain = bench.chain(N, bench.last, params)
    ahead = bench.ahead(chain, params, certain=3)
    while not ahead.drafted:
        advance(bench.runner, [ahead])
    deepest = twin.extend(N, chain.tokens, chain.inputs)
    features = [*chain.inputs, deepest.features]
    answered = 0
    for accepted in range(STEPS + 1):
        best = twin.extend(N, chain.tokens[:accepted], chain.inputs[:accepted]) if accepted else twin.last
        noise = [SampledRow(params, 1, offset + N + 1 + accepted, (), (), ())]
        logits = perturbed(twin.head.logits(best.rows[None]), noise, twin.head.token_map)
        ids = twin.head.token_map[logits[0].argsort(descending=True)].tolist()
        ids = [token for token in ids if token not in chain.tokens[accepted : accepted + 1]]
        for rank, token in enumerate(ids[: OUTCOMES + 1]):
            since = [*chain.tokens[:accepted], token]
            last = twin.extend(N, since, torch.stack(features[: accepted + 1]))
            expected = twin.chain(N + accepted + 1, last, params)
            found = ahead.answer(since, STEPS)
            assert (found is not None) == (rank < fan_out(STEPS, 0.5, OUTCOMES)[accepted])
            if found is not None:
                answered += 1
                assert found.tokens == expected.tokens and torch.equal(found.inputs, expected.inputs)
                assert ahead.answer(since, 1).tokens == expected.tokens[:1]
                assert ahead.answer(since, STEPS + 1) is None, "nothing is made up"
    assert answered == OUTCOMES


def test_rounds_at_several_stages_share_a_forward(folders: tuple[Path, Path]) -> None:
    """Two sequences of one drafter, the second a pass behind: both as if they were alone."""
    bench = Bench(folders, 0)
    chain = bench.chain(N, bench.last, SEEDED)
    first = bench.ahead(chain, SEEDED, certain=2)
    bench.pages = [page for page in range(256) if page not in bench.pages][: len(bench.pages)]
    bench.extend(0, bench.tokens, bench.features)
    second = bench.ahead(chain, SEEDED, certain=N)
    advance(bench.runner, [first])
    while not second.drafted:
        advance(bench.runner, [one for one in (second, first) if not one.drafted])
    outcomes = [(fork.accepted, fork.tokens) for fork in first._forks]
    assert outcomes == [(fork.accepted, fork.tokens) for fork in second._forks]


# --- in a draft engine --------------------------------------------------------------------------------------


class Worker:
    """A draft engine with a real head; `ahead`: whether it drafts ahead."""

    def __init__(self, folders: tuple[Path, Path], *, ahead: bool, pages: int = 256) -> None:
        rig = HeadRig(folders[1], Rig(folders[0]))
        self.runner = ChainRunner(rig.head, rig.pool, rig.backend)
        self.pool = PagePool(pages)
        outbox, copier = EventOutbox(), HandCopier()
        ready = SimpleNamespace(context_length=512, vocab_size=VOCAB, draft_width=WIDTH, rates=None)
        pulls = hand_pulls(copier, rig.pool.page_size, outbox)
        drafts_ahead = PlainAhead(self.runner) if ahead else None
        parts = DraftParts(EngineConfig(), self.runner, drafts_ahead, self.pool, pulls, copier, outbox, ready)  # type: ignore[arg-type]
        self.engine = DraftEngine(parts, self)  # type: ignore[arg-type]
        self.proposals: dict[int, list[int]] = {}
        self.closed: list[int] = []

    def send(self, events) -> None:
        for down in events:
            self.proposals |= {p.seq: list(p.tokens) for p in down.proposals}
            self.closed += [closed.seq for closed in down.closed]

    def tell(self, *messages) -> dict[int, list[int]]:
        """Its answers to these, by sequence."""
        self.proposals = {}
        kinds = [
            tuple(m for m in messages if isinstance(m, kind)) for kind in (DraftOpen, DraftCommit, DraftClose)
        ]
        self.engine._sequences.up(DraftUp(*kinds, peer=1))
        self.engine._step()
        self.engine._send_replies()
        return self.proposals

    def idle(self, forwards: int) -> None:
        for _ in range(forwards):
            self.engine._ahead.advance()

    def rows(self, seq: int) -> torch.Tensor:
        """The draft KV of a sequence's written rows, [layers, 2, rows, heads, dim]."""
        followed = self.engine._sequences.followed[1, seq]
        pages = self.runner.pool.tensor[followed.pages]
        return pages.movedim(0, 2).flatten(2, 3)[:, :, : followed.rows]

    @property
    def hits(self) -> int:
        return self.engine._ahead.counts.hits


def commit(base: int, tokens: SequenceOf[int], features: torch.Tensor, seq: int = 1) -> DraftCommit:
    raw = features.numpy().tobytes()
    return DraftCommit(seq, seq, base, tuple(tokens), raw, steps=STEPS)


class Story:
    """What a target says of sequences: true features, and verdicts that follow the proposals by chance."""

    def __init__(self, *workers: Worker, params: SamplingParams) -> None:
        self.workers = workers
        self._draws = random.Random(5)
        self._generator = torch.Generator().manual_seed(6)
        self._params = params
        self.vocab = VOCAB
        self.base: dict[int, int] = {}

    def begin(self, seq: int, base: int) -> None:
        self.base[seq] = base
        opened = DraftOpen(seq, seq, base, self._params, 0)
        self._say([opened, self._rows(seq, self._tokens(9))])

    def round(self, seq: int) -> None:
        """A verdict: some of the first worker's drafts, then a token that it foresaw or did not."""
        followed = self.workers[0].engine._sequences.followed[1, seq]
        drafts = followed.ahead._round.chain.tokens if followed.ahead else []
        told = [*drafts[: self._draws.randint(0, len(drafts))], *self._tokens(1)]
        if followed.ahead and followed.ahead.drafted and self._draws.random() < 0.6:
            fork = self._draws.choice(followed.ahead._forks)
            told = [*drafts[: fork.accepted], fork.tokens[0]]
        self._say([self._rows(seq, told)])

    def wait(self, seq: int) -> None:
        """A plain round, below which no proposal is wanted."""
        self._say([msgspec.structs.replace(self._rows(seq, self._tokens(1)), steps=0)])

    def _say(self, messages: list) -> None:
        for worker in self.workers:
            worker.tell(*messages)

    def _rows(self, seq: int, tokens: list[int]) -> DraftCommit:
        told = commit(self.base[seq], tokens, torch.randn(len(tokens), WIDTH, generator=self._generator), seq)
        self.base[seq] += len(tokens)
        return told

    def _tokens(self, count: int) -> list[int]:
        return [self._draws.randrange(self.vocab) for _ in range(count)]


@pytest.mark.parametrize(
    "params",
    [pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow), pytest.param(SEEDED, id="seeded")],
)
def test_true_features_leave_nothing_of_what_was_drafted_ahead(
    folders: tuple[Path, Path], params: SamplingParams
) -> None:
    """Draft KV and, at every miss, proposals are to the bit those of an engine that never drafts ahead."""
    ahead, never = Worker(folders, ahead=True), Worker(folders, ahead=False)
    story = Story(ahead, never, params=params)
    for seq, base in ((1, 0), (2, 70), (3, 7)):
        story.begin(seq, base)
    draws, missed = random.Random(8), 0
    for _ in range(60):
        seq, before = draws.choice((1, 2, 3)), ahead.hits
        story.round(seq)
        assert set(ahead.proposals) == set(never.proposals) == {seq}
        if ahead.hits == before:
            missed += 1
            assert ahead.proposals == never.proposals
        ahead.idle(draws.choice((0, 1, 2, 2 * STEPS)))  # now and then the next commit is early
    ahead.idle(2 * STEPS)
    assert ahead.hits > 12 and missed > 10
    for seq in (1, 2, 3):
        assert torch.equal(ahead.rows(seq), never.rows(seq)) and ahead.rows(seq).shape[2] > 30
    assert never.hits == 0 and never.engine._ahead.counts.drafted == 0


def test_a_hit_whose_rows_are_not_written_yet_is_written_by_the_next_miss(folders: tuple[Path, Path]) -> None:
    """The power check of the test above: without these rows the next proposal would be another."""
    ahead, never = Worker(folders, ahead=True), Worker(folders, ahead=False)
    story = Story(ahead, never, params=GREEDY)
    story.begin(1, 0)
    ahead.idle(STEPS + 1)
    while ahead.hits < 1:
        story.round(1)
        ahead.idle(0 if ahead.hits else STEPS + 1)
    followed = ahead.engine._sequences.followed[1, 1]
    assert followed.repairs and followed.rows < never.engine._sequences.followed[1, 1].rows
    stale = followed.end - followed.rows
    story.round(1)  # nothing is drafted ahead of it: a miss
    assert not followed.repairs and ahead.proposals == never.proposals and stale
    assert torch.equal(ahead.rows(1), never.rows(1))


def test_rows_below_which_nothing_is_wanted_are_not_taken_for_written(folders: tuple[Path, Path]) -> None:
    """They come between a hit and the forward that writes its true features."""
    ahead, never = Worker(folders, ahead=True), Worker(folders, ahead=False)
    story = Story(ahead, never, params=GREEDY)
    story.begin(1, 0)
    while not ahead.hits:
        ahead.idle(STEPS + 1)
        story.round(1)
    followed = ahead.engine._sequences.followed[1, 1]
    assert followed.repairs
    story.wait(1)
    ahead.idle(1)
    assert followed.commits and not followed.repairs
    story.round(1)
    assert torch.equal(ahead.rows(1), never.rows(1))
    assert ahead.hits == 1 and ahead.proposals == never.proposals


def test_spare_pages_give_way_and_come_back(folders: tuple[Path, Path]) -> None:
    """A pool in which a second sequence has room only without what is drafted ahead for the first."""
    ahead = Worker(folders, ahead=True, pages=4)
    story = Story(ahead, params=GREEDY)
    story.begin(1, 0)
    followed = ahead.engine._sequences.followed[1, 1]
    assert followed.ahead is not None and followed.spare
    for seq in (2, 3, 4):
        story.begin(seq, 0)
    assert not ahead.closed and followed.ahead is None and not followed.spare
    ahead.idle(2 * STEPS)
    for seq in (1, 2, 3, 4):
        ahead.tell(DraftClose(seq, seq))
    assert ahead.pool.used == 0


def test_what_was_drafted_for_another_shape_is_no_answer(folders: tuple[Path, Path]) -> None:
    worker = Worker(folders, ahead=True)
    for changes, hit in (({}, True), ({"steps": 1}, True), ({"steps": 9}, False), ({"topk": 2}, False)):
        story = Story(worker, params=GREEDY)
        story.begin(1, 0)
        worker.idle(STEPS + 1)
        before = worker.hits
        fork = worker.engine._sequences.followed[1, 1].ahead._forks[0]
        told = commit(9, [fork.tokens[0]], torch.zeros(1, WIDTH))
        wanted = DraftCommit(
            1, 1, 9, told.tokens, told.features, **({"steps": STEPS, "draft_tokens": 4} | changes)
        )
        assert fork.accepted == 0 and len(worker.tell(wanted)[1]) == changes.get("steps", STEPS)
        assert (worker.hits > before) == hit


def test_features_of_a_head_that_has_no_sequences_are_asked_of_nobody(folders: tuple[Path, Path]) -> None:
    worker = Worker(folders, ahead=True)
    assert not worker.engine._ahead.busy
    worker.idle(1)
    assert worker.engine._ahead.counts == ahead_drafter.DraftsAhead()


def test_a_head_that_knows_one_token_has_nothing_to_draft_ahead() -> None:
    """Its only guess is the draft that is being verified, and no draft is likely to be accepted."""
    steps, zeros = 7, torch.zeros(8, 4)
    chain, certain = Chain([3] * steps, zeros[:steps]), DraftExtension([0, 1], 0, [3], zeros[:1])
    ahead = Ahead(
        VerifiedRound(DraftInput(0, certain, SamplingParams(), 0), chain), fan_out(steps, 0.0, OUTCOMES)
    )
    ahead.take(Drafted(zeros, zeros), [[3]] * len(ahead.next_pass().picked))
    assert ahead.drafted and ahead.outcomes == 0 and ahead.answer([3, 5], 2) is None


def test_the_rows_behind_the_certain_ones_are_as_many_as_are_reserved() -> None:
    assert rows_ahead(3, 8) == 3 + 3 * 8
