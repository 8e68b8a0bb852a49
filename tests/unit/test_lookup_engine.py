"""Whole engines that look drafts up, alone and beside a head: no token changes, and some come sooner."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest
from loopback import Loopback, Result, split_configs, wait_all
from tiny import write_tiny_pair

from eyas.common.config import NANO, EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice, Role
from eyas.engine.loop import plain_runner
from eyas.engine.speculation.verify import TreeVerdict
from gateway.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 24  # few ids: texts repeat themselves
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=2**63 + 5, max_tokens=20, ignore_eos=True),
    "processed": SamplingParams(
        temperature=1.0,
        top_p=0.9,
        seed=11,
        max_tokens=16,
        repetition_penalty=1.1,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={7: 3.0, 9: -50.0},
        logprobs=1,
        ignore_eos=True,
    ),
}
CHAIN = SpeculationConfig(steps=3, draft_tokens=4)
LONG = SpeculationConfig(steps=7, draft_tokens=8)
TREE = SpeculationConfig(steps=3, topk=4, draft_tokens=16)
BUSHY = SpeculationConfig(steps=5, topk=8, draft_tokens=60)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_pair(folder, vocab=VOCAB)
    return EngineConfig(
        model=str(folder / "target"),
        draft=str(folder / "head"),
        num_pages=192,
        chunk_tokens=48,
        pool_dir=str(tmp_path_factory.mktemp("pools")),
        worker="unified",
    )


def answers(requests: list[GenerationRequest], *configs: EngineConfig) -> list[Result]:
    cluster = Loopback(*configs)
    try:
        results = [cluster.submit(request, split=len(configs) > 1) for request in requests]
        wait_all(results, 60)
    finally:
        cluster.close()
    return results


@pytest.fixture(scope="module")
def asked(base: EngineConfig) -> Iterator[tuple[list[GenerationRequest], list[dict[int, list[int]]]]]:
    """Requests of every kind of sampling and of prediction, and what plain decoding answers."""
    prompt = tuple(i * i % VOCAB for i in range(21))
    bare = [
        GenerationRequest(name, prompt + (i,), params, (RequestChoice(0), RequestChoice(1))[: 1 + i % 2])
        for i, (name, params) in enumerate(SAMPLING.items())
    ]
    told = [result.tokens for result in answers(bare, replace(base, draft=None))]
    requests, expected = [], []
    for request, tokens in zip(bare, told, strict=True):
        right = tuple(tokens[0])
        edited = (*right[:6], 3, *right[9:])
        for kind, predicted in {"": (), "right": right, "edited": edited, "wrong": (1,) * 30}.items():
            changes = {"id": f"{request.id} {kind}", "predicted": predicted}
            requests.append(msgspec.structs.replace(request, **changes))
            expected.append(tokens)
    yield requests, expected


def alone(spec: SpeculationConfig) -> Callable[[EngineConfig], tuple[EngineConfig, ...]]:
    return lambda base: (replace(base, draft=None, speculation=replace(spec, ngram=True)),)


def headed(spec: SpeculationConfig, *, ngram: bool) -> Callable[[EngineConfig], tuple[EngineConfig, ...]]:
    return lambda base: (replace(base, speculation=replace(spec, ngram=ngram)),)


def alone_and_split(base: EngineConfig) -> tuple[EngineConfig, ...]:
    """No draft worker: decode workers look drafts up by themselves."""
    (whole,) = alone(CHAIN)(base)
    return tuple(replace(whole, roles=(role,), worker=role) for role in (Role.PREFILL, Role.DECODE))


def headed_and_split(base: EngineConfig) -> tuple[EngineConfig, ...]:
    return split_configs(*headed(CHAIN, ngram=True)(base))


def without_its_drafter(base: EngineConfig) -> tuple[EngineConfig, ...]:
    """The head is another worker's, which is not there."""
    return headed_and_split(base)[:2]


WAYS: dict[str, Callable[[EngineConfig], tuple[EngineConfig, ...]]] = {
    "alone, chain 3": alone(CHAIN),
    "alone, chain 7": alone(LONG),
    "alone, split": alone_and_split,
    "headed, chain 3": headed(CHAIN, ngram=True),
    "headed, chain 7": headed(LONG, ngram=True),
    "headed, tree 16": headed(TREE, ngram=True),
    "headed, tree 60": headed(BUSHY, ngram=True),
    "headed, split": headed_and_split,
    "headed, split, without its drafter": without_its_drafter,
    "predictions alone, chain 3": headed(CHAIN, ngram=False),
    "predictions alone, tree 16": headed(TREE, ngram=False),
}


QUICK_ONES = ("alone, chain 3", "headed, tree 16", "predictions alone, chain 3")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in QUICK_ONES else pytest.mark.slow) for way in WAYS]
)
def test_no_token_changes(base: EngineConfig, asked, way: str) -> None:
    requests, expected = asked
    found = answers(requests, *WAYS[way](base))
    assert [result.tokens for result in found] == expected
    drafts: Counter[str] = Counter()
    for request, result in zip(requests, found, strict=True):
        drafts[request.id.partition(" ")[2]] += accepted(result)
    assert drafts["right"] > drafts["edited"] > drafts["wrong"] > 0


def accepted(result: Result) -> int:
    """Drafts of the choice whose answer was predicted."""
    return sum(entry.accepted for entry in result.entries if entry.choice == 0)


def test_a_request_without_drafts_has_none(base: EngineConfig, asked) -> None:
    requests, expected = asked
    quiet = [msgspec.structs.replace(request, speculative=False) for request in requests]
    found = answers(quiet, *headed(CHAIN, ngram=True)(base))
    assert [result.tokens for result in found] == expected
    assert not any(entry.offered for result in found for entry in result.entries)


# --- power: a verdict that is wrong is noticed ----------------------------------------------------------


def _the_first_draft_is_right(tree, chosen) -> TreeVerdict:
    return TreeVerdict((0,), (tree.tokens[0], chosen[1]))


def _a_rejected_draft_goes_on(tree, chosen) -> TreeVerdict:
    return TreeVerdict((), (chosen[-1],))


@pytest.mark.parametrize(
    ("way", "wrong"),
    [
        ("alone, chain 3", _the_first_draft_is_right),
        pytest.param("headed, chain 3", _a_rejected_draft_goes_on, marks=pytest.mark.slow),
        pytest.param("alone, chain 3", _a_rejected_draft_goes_on, marks=pytest.mark.slow),
        pytest.param("headed, chain 3", _the_first_draft_is_right, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_verdict_is_noticed(base, asked, way: str, wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, expected = asked
    monkeypatch.setattr(plain_runner, "walk", wrong)
    found = answers(requests, *WAYS[way](base))
    assert [result.tokens for result in found] != expected


# --- what it is worth, with the embedded model ----------------------------------------------------------

QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
NGRAM = EngineConfig(draft=None, speculation=SpeculationConfig(ngram=True), worker="unified")


def chat(*turns: str) -> tuple[int, ...]:
    """The prompt of a chat in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return asyncio.run(Tokenizer.load(NANO).encode_chat(messages))


def ask(prompt: tuple[int, ...], *configs: EngineConfig, predicted: tuple[int, ...] = ()) -> Result:
    params = SamplingParams(temperature=0.0, max_tokens=64)
    (result,) = answers([GenerationRequest("a", prompt, params, predicted=predicted)], *configs)
    return result


def test_a_prediction_that_is_right_is_accepted(tmp_path) -> None:
    """All of it but the token that the prompt itself gives; one that is wrong costs no round."""
    config = replace(NGRAM, pool_dir=str(tmp_path), num_pages=64)
    prompt = chat(QUESTION)
    plain = ask(prompt, replace(config, speculation=SpeculationConfig()))
    tokens, last = plain.tokens[0], len(plain.tokens[0]) - 1
    right = ask(prompt, config, predicted=tuple(tokens))
    assert right.tokens == plain.tokens and len(tokens) > 20
    offered = sum(entry.offered for entry in right.entries)
    assert accepted(right) == offered and len(right.entries) == 1 + -(-last // 6)  # chains of 5, and a bonus
    wrong = ask(prompt, config, predicted=tuple(reversed(tokens)))
    assert wrong.tokens == plain.tokens and len(wrong.entries) <= len(plain.entries)


@pytest.mark.slow
def test_a_text_that_is_copied_comes_sooner(tmp_path) -> None:
    """The same question for the second time: tokens per round, of the whole answer, its first token too."""
    config = replace(NGRAM, pool_dir=str(tmp_path), num_pages=64)
    plain = replace(config, speculation=SpeculationConfig())
    tokenizer = Tokenizer.load(NANO)
    first = tokenizer.decode(ask(chat(QUESTION), plain).tokens[0])
    prompt = chat(QUESTION, first, QUESTION)
    expected, found = ask(prompt, plain), ask(prompt, config)
    assert found.tokens == expected.tokens
    tokens = len(found.tokens[0])
    print(f"{tokens} tokens in {len(found.entries)} rounds, plain in {len(expected.entries)}")
    assert tokens / len(found.entries) > 2.0 and len(expected.entries) == tokens
