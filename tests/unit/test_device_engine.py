"""The device engine against the plain one, on a CPU, kernels interpreted: the same tokens, whatever the way.

A step takes a good part of a second here, so the model is small, and so is what is asked of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.step_times import StepRates
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.device import executor
from eyas.engine.device import runner as device_runner
from eyas.engine.loading import arithmetic, build
from eyas.engine.loading.step_rates import StepLimits, measure
from eyas.engine.speculation import device as device_drafter
from eyas.engine.speculation import feature_rows
from eyas.engine.speculation.device import DeviceProposer
from eyas.engine.speculation.feature_rows import FeatureRing
from tests.unit.device_engines import (
    DRAFTS,
    PROMPT,
    answers,
    config,
    logprobs,
    on_device,
    requests,
    rounds,
    tokens,
    write_head,
)
from tests.unit.families import write_family
from tests.unit.loopback import Result
from tests.unit.wandering import wander

__all__ = ["config"]  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafts",
    [pytest.param(DRAFTS[name], id=name) for name in DRAFTS],
)
def test_tokens_are_the_plain_engines(config: EngineConfig, drafts: SpeculationConfig | None) -> None:
    """And so are the drafts, those of forks too: the rounds end at the same places."""
    plain = replace(config, draft=None) if drafts is None else replace(config, speculation=drafts)
    expected, _ = answers(plain, requests())
    found, _ = answers(on_device(plain), requests())
    assert tokens(found) == tokens(expected)
    assert [rounds(result) for result in found] == [rounds(result) for result in expected]
    accepted = [entry for result in found[:2] for entry in result.entries if entry.accepted]
    assert bool(accepted) == (drafts is not None)
    assert logprobs(found[2]) == pytest.approx(logprobs(expected[2]), abs=1e-4)
    (ours, ids), (theirs, same_ids) = (prompt_logprobs(results[0]) for results in (found, expected))
    assert ours == pytest.approx(theirs, abs=1e-4) and ids == same_ids and len(ids) == 2 * 21


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_keys_and_values_in_fp8_have_the_plain_engines_tokens(config: EngineConfig, drafts: str) -> None:
    spec = DRAFTS[drafts]
    plain = replace(config, draft=None) if spec is None else replace(config, speculation=spec)
    plain = replace(plain, kv_cache_dtype="fp8_e4m3")
    expected, _ = answers(plain, requests())
    found, _ = answers(on_device(plain), requests())
    assert tokens(found) == tokens(expected)
    assert [rounds(result) for result in found] == [rounds(result) for result in expected]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("drafts", [DRAFTS["plain"], DRAFTS["chain"]], ids=["plain", "chain"])
def test_measured_steps_leave_nothing_behind(
    config: EngineConfig, drafts: SpeculationConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that times made-up sequences is followed by the same answers."""
    plain = replace(config, draft=None) if drafts is None else replace(config, speculation=drafts)
    expected, _ = answers(plain, requests())
    told: list[StepRates | None] = []

    def rates(runner: Any, config: EngineConfig, most: StepLimits, grain: int = 1) -> StepRates | None:
        few = StepLimits(1, 4, 40)
        told.append(measure(runner, config, few, grain))
        return told[-1]

    monkeypatch.setattr(build, "_rates", rates)
    found, _ = answers(on_device(plain), requests())
    assert tokens(found) == tokens(expected)
    assert told[0] is not None and told[0].times.step_s(1, 10) > 0.0


def special_requests() -> list[GenerationRequest]:
    """Every processor, beside a request that asks for nothing."""
    penalties = SamplingParams(
        temperature=0.0,
        max_tokens=5,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logprobs=3,
        ignore_eos=True,
    )
    bias = SamplingParams(
        temperature=0.9, seed=5, max_tokens=3, logit_bias={3: 2.0, 4: -50.0}, logprobs=0, ignore_eos=True
    )
    words = tuple((i, j) for i in range(16) for j in (2, 7))
    bad = SamplingParams(temperature=0.8, seed=9, max_tokens=4, bad_words=((5,), *words), ignore_eos=True)
    late = SamplingParams(temperature=0.0, max_tokens=5, min_tokens=4, stop_token_ids=(*range(8), 15))
    seeded = SamplingParams(temperature=1.0, seed=8, max_tokens=4, ignore_eos=True)
    return [
        GenerationRequest("penalties", PROMPT[:9], penalties),
        GenerationRequest("bias", (5, 9, 11), bias, tuple(map(RequestChoice, range(3)))),
        GenerationRequest("bad", (1, 2, 3, 2, 1), bad),
        GenerationRequest("late", PROMPT[3:21], late, speculative=False),
        GenerationRequest("plain", (4, 4, 2), seeded),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS.keys())
def test_special_rows_are_the_plain_engines(
    config: EngineConfig, drafts: SpeculationConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are more than are sampled at a time."""
    monkeypatch.setattr(executor, "SLICE", 3)
    plain = replace(config, draft=None) if drafts is None else replace(config, speculation=drafts)
    expected, _ = answers(plain, special_requests())
    found, _ = answers(on_device(plain), special_requests())
    assert tokens(found) == tokens(expected)
    assert [result.finishes for result in found] == [result.finishes for result in expected]
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-4)


def prompt_logprobs(result: Result) -> tuple[list[float], list[int]]:
    """Of every token of the prompt and of the best at its place; and which those are."""
    (told,) = [entry.prompt for entry in result.entries if entry.prompt is not None]
    rows = told.rows()
    numbers = [number for row in rows for number in (row.logprob, *(value for _, value in row.top))]
    return numbers, [id for row in rows for id, _ in row.top]


@pytest.mark.slow
def test_preemption_changes_no_token(config: EngineConfig) -> None:
    """Two sequences that grow over a page's end, and pages for one of them."""
    plain = replace(config, draft=None)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
    wanted = [GenerationRequest(f"r{i}", PROMPT[i : i + 28], params) for i in (0, 5)]
    found, preemptions = answers(on_device(replace(plain, num_pages=4)), wanted)
    assert preemptions > 0, "the pool was large enough"
    assert tokens(found) == tokens(answers(plain, wanted)[0])


WINDOW = 9  # less than the prompt, and than what a tree of drafts needs
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("plain", {}),
    "qwen3": ("chain", {}),
    "qwen3_moe": ("tree", {}),
    "mixtral": ("chain", {}),
    "mistral": ("chain", {"sliding_window": WINDOW}),
    "gemma3": ("tree", {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_say_the_same(config: EngineConfig, tmp_path: Path, family: str) -> None:
    drafts, changes = FAMILIES[family]
    target = tmp_path / "target"
    write_family(target, family, vocab_size=16, num_hidden_layers=2, **changes)
    plain = replace(config, model=str(target), draft=None)
    if (spec := DRAFTS[drafts]) is not None:
        plain = replace(plain, draft=str(write_head(tmp_path / "head", target)), speculation=spec)
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    wanted = [GenerationRequest("long", PROMPT[:21], greedy), GenerationRequest("short", (5, 9, 11), greedy)]
    expected, _ = answers(plain, wanted)
    found, _ = answers(on_device(plain), wanted)
    assert tokens(found) == tokens(expected)
    assert [rounds(result) for result in found] == [rounds(result) for result in expected]


def test_a_tree_longer_than_a_window_is_refused(config: EngineConfig, tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_family(target, "mistral", vocab_size=16, num_hidden_layers=2, sliding_window=3)
    head = write_head(tmp_path / "head", target)
    tree = replace(config, model=str(target), draft=str(head), speculation=SpeculationConfig(2, 2, 4))
    with pytest.raises(ConfigError, match="trees of 4 rows do not fit into the model's window of 3 tokens"):
        answers(on_device(tree), [])


def test_a_tree_of_a_model_that_attends_in_chunks_is_refused(config: EngineConfig, tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_family(target, "llama4", vocab_size=16, num_hidden_layers=2)
    head = write_head(tmp_path / "head", target)
    tree = replace(config, model=str(target), draft=str(head), speculation=SpeculationConfig(2, 2, 4))
    with pytest.raises(ConfigError, match="trees of drafts are not verified by a model that attends in"):
        answers(on_device(tree), [])


# --- depths that change ----------------------------------------------------------------------------------


ADAPTIVE = {
    "chain": SpeculationConfig(steps=3, topk=1, draft_tokens=4, adaptive=True),
    "tree": SpeculationConfig(steps=3, topk=2, draft_tokens=7, adaptive=True),
    "chain, looked up": SpeculationConfig(steps=3, topk=1, draft_tokens=4, adaptive=True, ngram=True),
    "tree, looked up": SpeculationConfig(steps=3, topk=2, draft_tokens=7, adaptive=True, ngram=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ADAPTIVE)
def test_whatever_the_depth_the_tokens_are_the_plain_engines(
    config: EngineConfig, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every change of depth is played, beside prompts, penalties, scores and a sequence without drafts."""
    wanted = [*requests(), special_requests()[3]]
    expected, _ = answers(replace(config, draft=None), wanted)
    policies = wander(monkeypatch)
    found, _ = answers(on_device(replace(config, speculation=ADAPTIVE[drafts])), wanted)
    assert tokens(found) == tokens(expected)
    assert logprobs(found[2]) == pytest.approx(logprobs(expected[2]), abs=1e-4)
    assert set(policies[0].chosen) == {0, 1, 3, *([-3] if ADAPTIVE[drafts].ngram else ())}
    assert {entry.offered for result in found for entry in result.entries} >= {0, 1, 3}
    assert not any(entry.offered for entry in found[-1].entries)


SHORT = GenerationRequest("one", PROMPT[:5], SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True))


def proposals(
    config: EngineConfig, patch: pytest.MonkeyPatch, asked: GenerationRequest = SHORT
) -> tuple[list[dict[int, list[int]]], Any]:
    """The tokens of an answer, and by the length of its text what was proposed below it."""
    told: dict[int, list[int]] = {}
    propose = DeviceProposer.propose

    def heard(self: DeviceProposer, last: Any, slots: torch.Tensor, spec: SpeculationConfig) -> None:
        propose(self, last, slots, spec)
        for slot in set(slots.tolist()) - {self._tables.padding_slot}:
            told[int(self._tables.length[slot])] = self._tables.drafts[slot, : spec.steps].tolist()

    with patch.context() as within:
        within.setattr(DeviceProposer, "propose", heard)
        found, _ = answers(on_device(config), [asked])
    return tokens(found), told


@pytest.mark.slow
def test_after_plain_rounds_the_drafts_are_as_ever(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head takes what they left, also where that is more than the ring holds; else it drafts others."""
    chain = replace(config, max_running=1, speculation=ADAPTIVE["chain"])
    same, always = proposals(
        replace(chain, speculation=replace(chain.speculation, adaptive=False)), monkeypatch
    )
    for module in (feature_rows, device_drafter, device_runner, arithmetic):
        monkeypatch.setattr(module, "RING_ROWS", 2)
    wander(monkeypatch, [0, 0, 0, 3, 0, 1])
    again, found = proposals(chain, monkeypatch)
    both = found.keys() & always.keys()
    assert again == same and len(both) > 2
    assert all(found[at] == always[at][: len(found[at])] for at in both)
    monkeypatch.setattr(FeatureRing, "keep", lambda *_: None)
    again, found = proposals(chain, monkeypatch)
    both = found.keys() & always.keys()
    assert again == same and any(found[at] != always[at][: len(found[at])] for at in both)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_after_rounds_in_which_it_waited_a_head_drafts_as_ever(
    config: EngineConfig, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked up is often right: several rows of a round wait."""
    spec = replace(ADAPTIVE[f"{drafts}, looked up"], steps=3)
    alone = replace(config, max_running=1, speculation=spec)
    prompt = GenerationRequest(
        "one", PROMPT[:5], SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    )
    fixed = replace(spec, adaptive=False, ngram=False)
    same, always = proposals(replace(alone, speculation=fixed), monkeypatch, prompt)
    wander(monkeypatch, [-3, 3, -3, 0, -3, 1])
    again, found = proposals(alone, monkeypatch, prompt)
    both = found.keys() & always.keys()
    assert again == same and len(both) > 2
    assert all(found[at] == always[at][: len(found[at])] for at in both)
    monkeypatch.setattr(FeatureRing, "keep", lambda *_: None)
    again, found = proposals(alone, monkeypatch, prompt)
    both = found.keys() & always.keys()
    assert again == same and any(found[at] != always[at][: len(found[at])] for at in both)
