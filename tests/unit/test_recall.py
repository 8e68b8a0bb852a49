"""What recent answers say of sequences as they grow, and in whole engines, which say the same sooner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from loopback import Loopback, Result, wait_all
from tiny import write_tiny_pair

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.sequence import Sequence
from eyas.engine.speculation.recall import LOOKS, AnswerRecall
from eyas.engine.speculation.recent_answers import MOST_TOKENS
from tests.unit.lookup_rig import sequence

CHAIN = SpeculationConfig(steps=3, draft_tokens=4, ngram=True, suffix=True)
TREE = SpeculationConfig(steps=3, topk=4, draft_tokens=16, ngram=True, suffix=True)
ANSWER = list(range(50, 200))


def recall_of(*answers: list[int]) -> AnswerRecall:
    recall = AnswerRecall(CHAIN)
    for answer in answers:
        recall.ended(sequence((1, 2), answer))
    return recall


def grown(recall: AnswerRecall, seq: Sequence, tokens: list[int]) -> tuple[int, ...]:
    """What is left of its continuation after it said these too."""
    seq.output += tokens
    recall.grew(seq)
    recall.renew()
    said = seq.continuation
    return () if said is None else said.tokens[len(seq) - said.base :]


# --- one sequence ---------------------------------------------------------------------------------------


def test_a_sequence_is_told_how_an_answer_went_on_and_let_be_while_it_does() -> None:
    recall, seq = recall_of(ANSWER), sequence((9,), [])
    assert grown(recall, seq, [7, 50]) == ()
    assert grown(recall, seq, [51, 52, 53]) == tuple(ANSWER[4 : 4 + MOST_TOKENS])
    first = seq.continuation
    assert first is not None and first.base == len(seq) and first.match == 4
    grown(recall, seq, ANSWER[4:44])
    assert seq.continuation is first
    assert grown(recall, seq, ANSWER[44:60]) == tuple(ANSWER[60 : 60 + MOST_TOKENS]), "little was left"


def test_a_sequence_that_goes_on_otherwise_has_nothing_until_it_matches_again() -> None:
    recall, seq = recall_of(ANSWER), sequence((9,), ANSWER[:5])
    assert grown(recall, seq, ANSWER[5:8]) == tuple(ANSWER[8 : 8 + MOST_TOKENS])
    assert grown(recall, seq, [3]) == () and seq.continuation is None
    assert grown(recall, seq, ANSWER[100:103]) == tuple(ANSWER[103:])
    last = seq.continuation
    assert grown(recall, seq, ANSWER[103:140]) == tuple(ANSWER[140:]) and seq.continuation is last, "no news"


def test_who_predicted_or_has_gone_is_told_nothing() -> None:
    recall = recall_of(ANSWER)
    predicted = sequence((9,), ANSWER[:9], (1, 2, 3))
    assert grown(recall, predicted, [59]) == ()
    seq = sequence((9,), ANSWER[:9])
    recall.grew(seq)
    recall.gone(seq)
    recall.renew()
    assert seq.continuation is None


def test_of_many_that_grow_some_are_looked_at_at_once_and_all_in_turn() -> None:
    recall, seqs = recall_of(ANSWER), [sequence((9,), ANSWER[:9], slot=i) for i in range(3 * LOOKS)]
    for _ in range(3):
        before = sum(seq.continuation is not None for seq in seqs)
        for seq in seqs:
            recall.grew(seq)
        recall.renew()
        assert sum(seq.continuation is not None for seq in seqs) == before + LOOKS


# --- whole engines --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_pair(folder, vocab=384)
    return EngineConfig(
        model=str(folder / "target"),
        draft=str(folder / "head"),
        num_pages=64,
        chunk_tokens=48,
        pool_dir=str(tmp_path_factory.mktemp("pools")),
        worker="unified",
    )


def requests(caller: str, count: int = 24) -> list[GenerationRequest]:
    greedy = SamplingParams(
        temperature=0.0, max_tokens=count, presence_penalty=2.0, frequency_penalty=2.0, ignore_eos=True
    )
    seeded = SamplingParams(
        temperature=1.0, seed=2**63 + 5, max_tokens=count, presence_penalty=0.4, ignore_eos=True
    )
    return [
        GenerationRequest(f"{caller} {i}", (3, 1, 4, 1, 5, 9), params, caller=caller)
        for i, params in enumerate((greedy, seeded))
    ]


def answered(config: EngineConfig, *batches: list[GenerationRequest]) -> list[list[Result]]:
    """One batch after the other, by one engine."""
    cluster, all_of_them = Loopback(config), []
    try:
        for batch in batches:
            results = [cluster.submit(request, split=False) for request in batch]
            wait_all(results, 120)
            all_of_them.append(results)
    finally:
        cluster.close()
    return all_of_them


def said(results: list[Result]) -> list[dict[int, list[int]]]:
    return [result.tokens for result in results]


def rounds(results: list[Result]) -> int:
    return sum(len(result.entries) for result in results)


def again(batch: list[GenerationRequest], **changes: str | bytes) -> list[GenerationRequest]:
    return [msgspec.structs.replace(one, id=f"{one.id} again {changes}", **changes) for one in batch]


def alone(config: EngineConfig) -> EngineConfig:
    return replace(config, draft=None, speculation=CHAIN)


WAYS: dict[str, Callable[[EngineConfig], EngineConfig]] = {
    "alone": alone,
    "beside a chain": lambda config: replace(config, speculation=CHAIN),
    "beside a tree": lambda config: replace(config, speculation=TREE),
    "alone, adaptive": lambda config: replace(config, draft=None, speculation=replace(CHAIN, adaptive=True)),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("way", WAYS)
def test_what_was_answered_before_comes_sooner_and_is_the_same(base: EngineConfig, way: str) -> None:
    first = requests("a")
    (bare,) = answered(replace(base, draft=None, speculation=SpeculationConfig()), first)
    new, repeated = answered(WAYS[way](base), first, again(first))
    assert said(new) == said(repeated) == said(bare)
    if way != "alone, adaptive":  # which may well stay plain on this machine
        assert rounds(repeated) < rounds(new) - 8


@pytest.mark.usefixtures("one_thread")
def test_another_caller_or_salt_has_none_of_it(base: EngineConfig) -> None:
    first = requests("a")
    new, other, salted, repeated = answered(
        alone(base), first, again(first, caller="b"), again(first, salt=b"s"), again(first)
    )
    assert said(new) == said(other) == said(salted) == said(repeated)
    assert rounds(new) == rounds(other) == rounds(salted) > rounds(repeated)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_thread")
def test_a_device_reads_it_inside_its_steps(base: EngineConfig) -> None:
    """Two rounds later than the plain engine, whose host learns of them at once: still sooner than before."""
    from tests.unit.device_engines import on_device

    first = requests("a", 40)
    (bare,) = answered(replace(base, draft=None, speculation=SpeculationConfig()), first)
    new, repeated = answered(on_device(alone(base)), first, again(first))
    assert said(new) == said(repeated) == said(bare)
    assert rounds(repeated) < rounds(new) - 8
