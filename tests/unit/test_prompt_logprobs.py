"""Log-probabilities of prompts: those that the same tokens had when they were generated, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from loopback import Loopback, Result, split_configs, wait_all
from tiny import write_tiny_pair

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import FinishCause, GenerationRequest, PromptTokenLogprobs, RequestChoice, TokenLogprob
from eyas.engine.ipc.messages import AttachKv, SubmitGeneration

pytestmark = pytest.mark.usefixtures("one_thread")

TOP = 3
PROMPT = tuple(random.Random(1).choices(range(256), k=70))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder: Path = tmp_path_factory.mktemp("models")
    write_tiny_pair(folder)
    return EngineConfig(
        model=str(folder / "target"),
        draft=str(folder / "head"),
        num_pages=64,
        chunk_tokens=48,
        context_length=160,
        pool_dir=str(tmp_path_factory.mktemp("pools")),
        worker="unified",
    )


@pytest.fixture
def unified(base: EngineConfig) -> Iterator[Loopback]:
    cluster = Loopback(base)
    yield cluster
    cluster.close()


def generation(name: str, prompt: tuple[int, ...], choices: int = 1, **params: object) -> GenerationRequest:
    wanted = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True} | params
    return GenerationRequest(
        name, prompt, SamplingParams(**wanted), tuple(map(RequestChoice, range(choices)))
    )


def scoring(name: str, prompt: tuple[int, ...], **params: object) -> GenerationRequest:
    """Asks of the prompt alone."""
    return generation(name, prompt, **({"max_tokens": 0, "prompt_logprobs": TOP} | params))


def run(cluster: Loopback, *requests: GenerationRequest, split: bool = False) -> list[Result]:
    results = [cluster.submit(request, split=split) for request in requests]
    wait_all(results, 60)
    return results


def told(result: Result) -> list[TokenLogprob]:
    """What was said of the prompt, and that it was said once, before any token was."""
    said = [entry.prompt for entry in result.entries if entry.prompt is not None]
    assert len(said) == 1 and result.entries[0].prompt is said[0]
    return said[0].rows()


@pytest.fixture(scope="module")
def generated(base: EngineConfig) -> tuple[tuple[int, ...], list[TokenLogprob]]:
    """A text that begins with PROMPT, and what was said of the tokens that were generated after it."""
    cluster = Loopback(replace(base, draft=None))
    (result,) = run(cluster, generation("g", PROMPT, logprobs=TOP, max_tokens=40))
    cluster.close()
    logprobs = [one for entry in result.entries for one in entry.logprobs]
    assert len(logprobs) == 40
    return (*PROMPT, *result.tokens[0]), logprobs


QUICK = ("plainly", "for another worker")
WAYS = {
    "plainly": {"draft": None},
    "with a drafter": {},
    "in small chunks": {"draft": None, "chunk_tokens": 7},
    "for another worker": {"split": True},
}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, way in WAYS.items()
    ],
)
def test_a_generated_text_is_scored_as_it_was_generated(
    base: EngineConfig, generated: tuple[tuple[int, ...], list[TokenLogprob]], way: dict[str, object]
) -> None:
    """Alone, then beside others and with its prefix in the cache."""
    (text, logprobs), way = generated, dict(way)
    split = bool(way.pop("split", False))
    config = replace(base, **way)
    cluster = Loopback(*(split_configs(config) if split else (config,)))
    (alone,) = run(cluster, scoring("alone", text), split=split)
    others = [generation(f"o{i}", PROMPT[: 11 * i + 3], max_tokens=9) for i in range(4)]
    *_, beside = run(cluster, *others, scoring("beside", text), split=split)
    cluster.close()
    for result in (alone, beside):
        assert told(result)[len(PROMPT) - 1 :] == logprobs
        assert len(told(result)) == len(text) - 1
        assert (result.tokens, result.finishes) == ({0: []}, {0: FinishCause.LENGTH})


def test_the_cache_serves_what_is_not_asked_for(base: EngineConfig) -> None:
    cluster = Loopback(replace(base, draft=None))
    (whole,) = run(cluster, scoring("whole", PROMPT))
    (tail,) = run(cluster, scoring("tail", PROMPT, prompt_logprobs_start=40))
    (last,) = run(cluster, scoring("last", PROMPT, prompt_logprobs_start=len(PROMPT) - 1))
    cluster.close()
    assert told(tail) == told(whole)[40:] and told(last) == []
    cached = [result.entries[0].timings.cached_tokens for result in (whole, tail, last)]
    assert cached == [0, 32, 64]


def test_prompts_of_one_token_have_nothing_to_tell(unified: Loopback) -> None:
    (result,) = run(unified, scoring("one", (7,), max_tokens=2))
    assert told(result) == [] and len(result.tokens[0]) == 2


@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.slow), True])
def test_several_choices_are_told_once(base: EngineConfig, split: bool) -> None:
    cluster = Loopback(*(split_configs(base) if split else (base,)))
    first, second = run(
        cluster, scoring("a", PROMPT), generation("b", PROMPT, 3, prompt_logprobs=TOP), split=split
    )
    cluster.close()
    assert told(first) == told(second)
    assert sorted(map(len, second.tokens.values())) == [12] * 3


def test_choices_without_tokens_have_no_logprobs(unified: Loopback) -> None:
    request = generation("none", PROMPT, 3, max_tokens=0, prompt_logprobs=TOP, logprobs=TOP)
    (result,) = run(unified, request)
    assert [(entry.tokens, entry.logprobs) for entry in result.entries] == [((), ())] * 3


def test_the_last_row_may_come_alone(base: EngineConfig) -> None:
    cluster = Loopback(replace(base, chunk_tokens=len(PROMPT) - 1))
    (result,) = run(cluster, scoring("alone", PROMPT))
    cluster.close()
    assert len(told(result)) == len(PROMPT) - 1 and result.tokens == {0: []}


def test_a_prompt_may_fill_the_context(base: EngineConfig, unified: Loopback) -> None:
    (result,) = run(unified, scoring("full", PROMPT * 2 + PROMPT[:20]))
    assert len(told(result)) == base.context_length - 1


@pytest.mark.slow
def test_preemption_loses_and_repeats_nothing(base: EngineConfig) -> None:
    """Two prompts that are scored in small chunks beside one that grows and takes their pages."""
    small = replace(base, draft=None, chunk_tokens=4)
    requests = [scoring("a", PROMPT), generation("b", PROMPT[3:], prompt_logprobs=2, max_tokens=30)]
    cluster = Loopback(small)
    expected = [told(run(cluster, request)[0]) for request in requests]
    cluster.close()
    for request in requests:
        cluster = Loopback(replace(small, num_pages=7))
        _, found = run(cluster, generation("grows", PROMPT[:16], max_tokens=60), request)
        preemptions = cluster.workers["unified"].engine._scheduler.preemptions
        cluster.close()
        assert preemptions > 0, "the pool was large enough"
        assert told(found) == expected[requests.index(request)]


def test_decode_scores_a_prompt_whose_prefill_came_to_nothing(base: EngineConfig) -> None:
    """An Attach without handles, as after a prefill that died before it was done."""
    _, decode, draft = split_configs(base)
    cluster = Loopback(decode, draft)
    request = scoring("lost", PROMPT, max_tokens=3)
    result = cluster.results["lost"] = Result(1)
    cluster.workers["decode"].send(SubmitGeneration(request, 1, attach=True), AttachKv("lost", 2))
    wait_all([result], 60)
    assert len(told(result)) == len(PROMPT) - 1
    cluster.close()


def test_a_migrated_request_is_not_scored_again(unified: Loopback) -> None:
    """Its caller has its first token, and what was asked of the prompt came with that."""
    request = generation("moved", PROMPT, prompt_logprobs=TOP)
    moved = GenerationRequest("moved", PROMPT, request.params, (RequestChoice(0, (5, 6)),))
    result = unified.results["moved"] = Result(1, {0: [5, 6]})
    unified.workers["unified"].send(SubmitGeneration(moved, 2, attach=False))
    wait_all([result], 60)
    assert all(entry.prompt is None for entry in result.entries)


def test_packed_rows_are_joined_once() -> None:
    rows = [PromptTokenLogprobs(1, bytes([i] * 4), bytes([i, 0, 0, 0]), bytes(4)) for i in range(4)]
    whole = PromptTokenLogprobs(1)
    for row in rows:
        whole = whole.joined(row, 0)
    assert PromptTokenLogprobs(20).joined(rows[0], 0) == rows[0]  # asked for more than there are ids
    again = rows[2].joined(rows[3], 0)
    assert whole.joined(again, 2) == whole and len(whole) == 4
    assert [row.top[0][0] for row in whole.rows()] == [0, 1, 2, 3]
