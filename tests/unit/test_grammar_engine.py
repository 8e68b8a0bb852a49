"""Outputs held to a grammar, with drafts of every kind and without: the same to the bit, and valid."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from grammar_cases import CASES, ENDS, EOS, PROMPTS, by_schema, random_schema, request, some_params, text_of
from loopback import Loopback, Result, split_configs, wait_all

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.grammars.notations import Grammar
from eyas.common.types import FinishCause, GenerationRequest, RequestChoice
from eyas.engine.grammar.state import GrammarState

pytestmark = pytest.mark.usefixtures("one_thread")

TREES = SpeculationConfig(steps=4, topk=3, draft_tokens=10)
LOOKUP = SpeculationConfig(steps=5, draft_tokens=6, ngram=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(num_pages=300, pool_dir=str(tmp_path_factory.mktemp("pools")), worker="unified")


def run(cluster: Loopback, requests: Sequence[GenerationRequest], *, split: bool = False) -> list[Result]:
    results = [cluster.submit(one, split=split) for one in requests]
    wait_all(results, 400)
    cluster.close()
    return results


def ways(base: EngineConfig) -> dict[str, EngineConfig]:
    return {
        "off": replace(base, draft=None),
        "chain": base,
        "tree": replace(base, speculation=TREES),
        "lookup": replace(base, speculation=LOOKUP),
    }


def tokens(results: Sequence[Result]) -> list[dict[int, list[int]]]:
    return [result.tokens for result in results]


def check(result: Result, judge: object) -> int:
    """How many of its outputs are complete. All of these are valid, and end once."""
    complete = 0
    for choice, ids in result.tokens.items():
        assert not set(ENDS) & set(ids[:-1])
        if result.finishes[choice] is FinishCause.STOP:
            assert ids[-1] in ENDS
            assert judge(text_of(ids)), text_of(ids)  # type: ignore[operator]
            complete += 1
    return complete


def mixed(seed: int, more: int = 0) -> list[tuple[GenerationRequest, object]]:
    """Every notation, and `more` of them again, as it is and with parameters of many kinds."""
    pick, made = random.Random(seed), []
    for i, (grammar, judge) in enumerate([*CASES, *pick.sample(CASES, more)]):
        params = some_params(pick) if i % 2 else {}
        if "stop_token_ids" in params:
            params["stop_token_ids"] = (EOS,)
        n = 2 if i % 4 == 1 else 1
        made.append((request(f"r{i}", grammar, pick.choice(PROMPTS), n, **params), judge))
    return made


@pytest.mark.parametrize("drafted", ["tree", pytest.param("chain", marks=pytest.mark.slow)])
def test_drafts_change_nothing_and_every_answer_is_valid(base: EngineConfig, drafted: str) -> None:
    made = mixed(1)
    requests = [one for one, _ in made]
    found = {name: run(Loopback(ways(base)[name]), requests) for name in ("off", drafted)}
    complete = sum(check(result, judge) for result, (_, judge) in zip(found["off"], made, strict=True))
    assert complete >= len(requests) // 2
    assert tokens(found[drafted]) == tokens(found["off"])
    accepted = sum(entry.accepted for result in found[drafted] for entry in result.entries)
    assert accepted > 0  # drafts were verified beside masks


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [SpeculationConfig(), pytest.param(LOOKUP, marks=pytest.mark.slow)])
def test_what_a_grammar_forces_costs_fewer_rounds(
    base: EngineConfig, speculation: SpeculationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And changes no token."""
    config, rounds = replace(base, speculation=speculation), []
    made = [request(f"r{i}", CASES[i][0], temperature=i % 2 * 0.8, seed=i) for i in (0, 4)]
    found = []
    for _ in range(2):
        found.append(run(Loopback(config), made))
        rounds.append(sum(len(result.entries) for result in found[-1]))
        monkeypatch.setattr(GrammarState, "forced", lambda self, most: [])
    assert tokens(found[0]) == tokens(found[1])
    assert rounds[0] < 0.9 * rounds[1], rounds


def test_without_its_grammar_an_answer_is_another(base: EngineConfig) -> None:
    grammar, judge = CASES[3]
    held, loose = request("held", grammar), request("loose", grammar)
    loose = msgspec.structs.replace(loose, params=msgspec.structs.replace(loose.params, grammar=None))
    texts = [text_of(result.tokens[0]) for result in run(Loopback(base), [held, loose])]
    assert [judge(text) for text in texts] == [True, False]


def some_and_long() -> list[GenerationRequest]:
    grammar = Grammar.regex("[a-z ]{100}")
    return [
        *(one for one, _ in mixed(2)[:3]),
        *(request(f"long{i}", grammar, PROMPTS[i], max_tokens=40) for i in range(3)),
    ]


@pytest.mark.slow
def test_short_of_pages_it_is_the_same(base: EngineConfig) -> None:
    requests = some_and_long()
    alone = tokens(run(Loopback(replace(base, draft=None)), requests))
    scarce = replace(base, num_pages=9, max_running=4, context_length=128)
    preemptions = 0
    for _ in range(5):  # requests that come one by one to a busy machine find room
        cluster = Loopback(scarce)
        worker = cluster.workers["unified"]
        assert tokens(run(cluster, requests)) == alone
        preemptions += worker.load.preemptions if worker.load is not None else 0
        if preemptions:
            break
    assert preemptions > 0


@pytest.mark.slow
def test_elsewhere_it_is_the_same(base: EngineConfig) -> None:
    requests = some_and_long()
    alone = tokens(run(Loopback(replace(base, draft=None)), requests))
    assert tokens(run(Loopback(*split_configs(base)), requests, split=True)) == alone


def test_what_was_begun_elsewhere_goes_on(base: EngineConfig) -> None:
    made = [one for one, _ in mixed(3) if len(one.choices) == 1][:4]
    whole = tokens(run(Loopback(base), made))
    begun, kept = [], []
    for one, found in zip(made, whole, strict=True):
        if len(found[0]) < 4:
            continue
        choice = RequestChoice(0, tuple(found[0][: len(found[0]) // 2]))
        begun.append(GenerationRequest(one.id, one.prompt_ids, one.params, (choice,), begun=True))
        kept.append(found[0])
    assert len(begun) > 1
    cluster = Loopback(replace(base, speculation=TREES))
    results = [cluster.submit(one, split=False) for one in begun]
    wait_all(results, 60)
    cluster.close()
    assert [result.tokens[0] for result in results] == kept


@pytest.mark.parametrize("speculation", [SpeculationConfig(), pytest.param(TREES, marks=pytest.mark.slow)])
def test_nothing_comes_after_the_end(base: EngineConfig, speculation: SpeculationConfig) -> None:
    """Neither `ignore_eos` nor `min_tokens` makes an answer go on that can only end."""
    grammar = Grammar.choice(["Paris", "Rome"])
    odd = [{"ignore_eos": True}, {"min_tokens": 20}, {"ignore_eos": True, "min_tokens": 20}, {"logprobs": 1}]
    made = [request(f"r{i}", grammar, **params) for i, params in enumerate(odd)]
    for result in run(Loopback(replace(base, speculation=speculation)), made):
        assert result.finishes == {0: FinishCause.STOP}
        assert text_of(result.tokens[0]) in ("Paris", "Rome") and result.tokens[0][-1] in ENDS
        told = [one for entry in result.entries for one in entry.logprobs]
        assert len(told) in (0, len(result.tokens[0]))


def test_an_end_waits_for_min_tokens_while_more_may_follow(base: EngineConfig) -> None:
    grammar = Grammar.regex("[a-z ]+")
    made = [request("a", grammar, min_tokens=20), request("b", grammar, ignore_eos=True, max_tokens=30)]
    a, b = run(Loopback(base), made)
    assert len(a.tokens[0]) >= 20
    assert len(b.tokens[0]) == 30 and b.finishes[0] is FinishCause.LENGTH and EOS not in b.tokens[0]


def test_a_stop_token_is_only_a_stop(base: EngineConfig) -> None:
    """An id that is text elsewhere ends an answer only where that is complete."""
    brace = next(id for id in range(3, 4096) if text_of([id]) == "}")
    made = request("a", CASES[0][0], stop_token_ids=(brace,))
    (result,) = run(Loopback(base), [made])
    assert brace not in result.tokens[0][:-1]


def test_a_grammar_that_cannot_be_followed_fails_its_request_alone(base: EngineConfig) -> None:
    cluster = Loopback(base)
    bad = cluster.submit(request("bad", Grammar.regex("(a")), split=False)
    good = cluster.submit(request("good", Grammar.choice(["Paris"])), split=False)
    wait_all([good], 60)
    assert bad.done.wait(20) and bad.failure is not None and "bracket is not closed" in bad.failure
    assert text_of(good.tokens[0]) == "Paris"
    cluster.close()


def test_what_breaks_inside_costs_its_request_alone(
    base: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = GrammarState.masks

    def break_at_three(self: GrammarState, *given: Any) -> list[np.ndarray | None]:
        if self._params.seed == 3:
            raise RuntimeError("no such state")
        return masks(self, *given)

    monkeypatch.setattr(GrammarState, "masks", break_at_three)
    cluster = Loopback(base)
    bad, good = (
        cluster.submit(request(name, Grammar.choice(["Paris"]), seed=seed), split=False)
        for name, seed in (("bad", 3), ("good", 4))
    )
    wait_all([good], 60)
    assert bad.done.wait(20) and bad.failure is not None and "no such state" in bad.failure
    assert text_of(good.tokens[0]) == "Paris"
    cluster.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_schemas_with_every_way_of_drafting(base: EngineConfig) -> None:
    pick, made = random.Random(5), []
    for i in range(60):
        grammar, judge = by_schema(random_schema(pick))
        params = some_params(pick)
        params.pop("stop_token_ids", None)
        made.append((request(f"r{i}", grammar, pick.choice(PROMPTS), max_tokens=48, **params), judge))
    requests = [one for one, _ in made]
    found = {name: run(Loopback(config), requests) for name, config in ways(base).items()}
    complete = sum(check(result, judge) for result, (_, judge) in zip(found["off"], made, strict=True))
    assert complete > 30
    for name, results in found.items():
        assert tokens(results) == tokens(found["off"]), name
    assert tokens(run(Loopback(*split_configs(base)), requests, split=True)) == tokens(found["off"])
