"""Whole engines with adapters: every answer is its own adapter's, to the bit, whatever shares its steps, how
its prompt is cut, whether it is drafted for, and how few slots there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_rig import write_adapter, write_merged
from loopback import Loopback, split_configs, wait_all
from tiny import write_tiny_eagle3, write_tiny_llama, write_tiny_pair

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.page_names import salt_of
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
PROMPT = tuple(range(1, 60))
CHAIN = SpeculationConfig(steps=3, draft_tokens=4)
TREE = SpeculationConfig(steps=3, topk=4, draft_tokens=16)
MANY = 16
Answers = list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_tiny_pair(made, vocab=64)
    for seed in range(MANY):
        modules = () if seed % 3 else ("q_proj", "v_proj")
        write_adapter(made / f"a{seed}", made / "target", rank=4 + seed, seed=seed, modules=modules)
    return made


def _config(folder: Path, **changes: object) -> EngineConfig:
    made = EngineConfig(
        model=str(folder / "target"),
        draft=None,
        num_pages=256,
        chunk_tokens=24,
        pool_dir=str(folder),
        worker="unified",
        max_loras=4,
        max_lora_rank=32,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def _request(
    number: int, adapter: str, params: SamplingParams, prompt: Sequence[int] = PROMPT
) -> GenerationRequest:
    salt = salt_of("", adapter)
    return GenerationRequest(f"r{number}", tuple(prompt), params, adapter=adapter, salt=salt)


def _answers(cluster: Loopback, requests: Sequence[GenerationRequest], *, split: bool = False) -> Answers:
    results = [cluster.submit(request, split=split) for request in requests]
    wait_all(results, 60)
    return [result.tokens[0] for result in results]


def _alone(cluster: Loopback, requests: Sequence[GenerationRequest]) -> Answers:
    return [_answers(cluster, [request])[0] for request in requests]


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Loopback]:
    made = Loopback(_config(folder))
    yield made
    made.close()


def test_an_answer_is_the_merged_models(folder: Path, tmp_path: Path, cluster: Loopback) -> None:
    adapter = cluster.load_adapter(folder / "a1").id
    requests = [_request(number, adapter, params) for number, params in enumerate((GREEDY, SEEDED))]
    answers = _alone(cluster, requests)
    write_merged(tmp_path / "merged", folder / "target", folder / "a1")
    merged = Loopback(_config(folder, model=str(tmp_path / "merged"), max_loras=0))
    expected = _alone(merged, [_request(number, "", p) for number, p in enumerate((GREEDY, SEEDED))])
    merged.close()
    assert answers == expected


def test_an_updated_output_head_scores_prompts_and_drafts_too(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "target", tied=False, layers=4, vocab=64)
    write_tiny_eagle3(tmp_path / "head", model, reads=(1, 2, 3))
    write_adapter(tmp_path / "a", model, modules=("lm_head", "v_proj"), size=1.0)
    write_merged(tmp_path / "merged", model, tmp_path / "a")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    answers, scores = [], []
    drafts = {"draft": str(tmp_path / "head"), "speculation": CHAIN}
    for changes in ({}, drafts, {"model": str(tmp_path / "merged"), "max_loras": 0}):
        cluster = Loopback(_config(tmp_path, **changes))
        adapter = "" if "max_loras" in changes else cluster.load_adapter(tmp_path / "a").id
        results = [cluster.submit(_request(i, id, params), split=False) for i, id in enumerate((adapter, ""))]
        wait_all(results, 60)
        cluster.close()
        (scored,) = [one.prompt for one in results[0].entries if one.prompt]
        answers.append(results[0].tokens[0])
        scores.append(torch.frombuffer(bytearray(scored.logprobs), dtype=torch.float32))
    assert answers[0] == answers[1] == answers[2]
    assert torch.equal(scores[0], scores[1])
    torch.testing.assert_close(scores[0], scores[2], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_sixteen_adapters_in_four_slots_answer_as_alone(folder: Path, cluster: Loopback) -> None:
    adapters = ["", *(cluster.load_adapter(folder / f"a{seed}").id for seed in range(MANY))]
    requests = [
        _request(number, adapter, GREEDY if number % 2 else SEEDED, PROMPT[number % 7 :])
        for number, adapter in enumerate([*adapters, *adapters[:6]])
    ]
    together, alone = _answers(cluster, requests), _alone(cluster, requests)
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) > MANY
    load = cluster.workers["unified"].load
    assert load is not None
    counts = load.adapters
    assert len(counts.slots) == 4 and counts.loads >= MANY and not counts.waiting


@pytest.mark.parametrize("drafts", [CHAIN, pytest.param(TREE, marks=pytest.mark.slow)])
def test_drafts_change_no_token(folder: Path, cluster: Loopback, drafts: SpeculationConfig) -> None:
    """The base model's head proposes, the adapter verifies; features are the adapter's."""
    drafting = Loopback(_config(folder, draft=str(folder / "head"), speculation=drafts))
    adapter = drafting.load_adapter(folder / "a2").id
    assert cluster.load_adapter(folder / "a2").id == adapter
    requests = [_request(number, adapter, params) for number, params in enumerate((GREEDY, SEEDED))]
    requests.append(_request(2, "", GREEDY))
    try:
        assert _answers(drafting, requests) == _alone(cluster, requests)
        entries = [entry for result in drafting.results.values() for entry in result.entries]
        assert sum(entry.offered for entry in entries) > 0
    finally:
        drafting.close()


def test_a_prefix_is_found_by_its_own_adapter_alone(folder: Path, cluster: Loopback) -> None:
    adapters = [cluster.load_adapter(folder / f"a{seed}").id for seed in (4, 5)]
    prompt = tuple(range(40, 0, -1))
    answers = []
    for turn, adapter in enumerate([*adapters, *adapters, ""]):
        result = cluster.submit(_request(100 + turn, adapter, GREEDY, prompt), split=False)
        wait_all([result], 60)
        (timings,) = [entry.timings for entry in result.entries if entry.timings]
        answers.append((timings.cached_tokens > 0, tuple(result.tokens[0])))
    assert [cached for cached, _ in answers] == [False, False, True, True, False]
    assert answers[0][1] == answers[2][1] != answers[1][1] == answers[3][1]


@pytest.mark.slow
def test_a_preempted_answer_goes_on_with_its_adapter(folder: Path, cluster: Loopback) -> None:
    few = Loopback(_config(folder, num_pages=10, max_loras=2))
    adapters = [cluster.load_adapter(folder / f"a{seed}").id for seed in (1, 2)]
    for seed in (1, 2):
        few.load_adapter(folder / f"a{seed}")
    long = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    requests = [_request(number, adapters[number % 2], long) for number in range(4)]
    try:
        together = _answers(few, requests)
        load = few.workers["unified"].load
        assert load is not None and load.preemptions > 0
        assert together == _alone(cluster, requests)
    finally:
        few.close()


@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_long_answers_take_turns_and_say_what_they_say_alone(
    folder: Path, cluster: Loopback, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """Turns end at every step here: each answer is sent back many times, and no adapter waits for another."""
    monkeypatch.setattr("eyas.engine.scheduling.adapter_turns.TURN_S", 0.0)
    adapters = [cluster.load_adapter(folder / f"a{seed}").id for seed in (1, 2, 4)]
    few = Loopback(_config(folder, max_loras=slots))
    for seed in (1, 2, 4):
        few.load_adapter(folder / f"a{seed}")
    requests = [_request(number, adapter, SEEDED) for number, adapter in enumerate(["", *adapters])]
    try:
        together = _answers(few, requests)
        load = few.workers["unified"].load
        assert load is not None and load.preemptions > 2 and load.adapters.loads > 6
        assert together == _alone(cluster, requests)
    finally:
        few.close()


@pytest.mark.slow
@pytest.mark.parametrize("turn_s", [5.0, 0.0])
def test_prompts_computed_elsewhere_are_decoded_with_their_adapter(
    folder: Path, cluster: Loopback, monkeypatch: pytest.MonkeyPatch, turn_s: float
) -> None:
    monkeypatch.setattr("eyas.engine.scheduling.adapter_turns.TURN_S", turn_s)
    split = Loopback(*split_configs(_config(folder, draft=str(folder / "head"), max_loras=1))[:2])
    adapters = [split.load_adapter(folder / f"a{seed}").id for seed in (1, 2)]
    for seed in (1, 2):
        cluster.load_adapter(folder / f"a{seed}")
    requests = [
        _request(number, adapter, SEEDED) for number, adapter in enumerate([*adapters, "", *adapters])
    ]
    try:
        assert _answers(split, requests, split=True) == _alone(cluster, requests)
    finally:
        split.close()
