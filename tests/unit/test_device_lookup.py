"""Device engines that look drafts up inside their steps, interpreted: the plain engine's tokens and rounds.

`test_kernels_lookup` compares the kernel itself with the rule on thousands of texts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from loopback import Loopback

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.speculation.drafters.device_lookup import DeviceLookup
from eyas.engine.speculation.drafters.lookup import LookupDrafter
from tests.unit.device_engines import answers, config, on_device, rounds, tokens
from tests.unit.device_roles import by_choice, patient, roles, together

__all__ = ["config", "patient"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]

CHAIN = SpeculationConfig(steps=3, draft_tokens=4, ngram=True)
TREE = SpeculationConfig(steps=2, topk=2, draft_tokens=5, ngram=True)
TOLD = SpeculationConfig(steps=3, draft_tokens=4)  # beside a head: predictions alone
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 3, 1, 4, 1, 5)


def requests(plain: EngineConfig) -> list[GenerationRequest]:
    """One that was predicted nearly right, two choices whose history counts, and one that has no drafts."""
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=2**63 + 7, max_tokens=5, ignore_eos=True)
    history = SamplingParams(
        temperature=0.8, seed=3, max_tokens=5, repetition_penalty=1.3, logit_bias={3: 1.0}, ignore_eos=True
    )
    asked = GenerationRequest("greedy", PROMPT, greedy)
    (answer,), _ = answers(replace(plain, draft=None, speculation=SpeculationConfig()), [asked])
    right = answer.tokens[0]
    return [
        GenerationRequest("greedy", PROMPT, greedy, predicted=(*right[:4], 0, *right[5:])),
        GenerationRequest("seeded", (5, 9, 11, 5, 9, 11), seeded),
        GenerationRequest("history", (7, 8, 7, 8, 9), history, (RequestChoice(0), RequestChoice(1))),
        GenerationRequest("quiet", (7, 8, 7, 8), greedy, speculative=False, predicted=tuple(right)),
    ]


WAYS = {"alone": (CHAIN, False), "chain": (CHAIN, True), "tree": (TREE, True), "told": (TOLD, True)}


def setting(plain: EngineConfig, way: str) -> EngineConfig:
    spec, headed = WAYS[way]
    return replace(plain, draft=plain.draft if headed else None, speculation=spec)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_rounds_are_the_plain_engines(
    config: EngineConfig, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding's tokens, and the drafts of the plain engine that looks up: forks' first ones too.

    The device's host looks nothing up.
    """
    wanted, plain = requests(config), setting(config, way)
    bare, _ = answers(replace(config, draft=None, speculation=SpeculationConfig()), wanted)
    expected, _ = answers(plain, wanted)
    on_the_host: list[object] = []
    monkeypatch.setattr(LookupDrafter, "grew", lambda drafter, seq: on_the_host.append(seq))
    found, _ = answers(on_device(plain), wanted)
    assert tokens(found) == tokens(expected) == tokens(bare) and not on_the_host
    assert [rounds(result) for result in found] == [rounds(result) for result in expected]
    assert sum(entry.accepted for entry in found[0].entries) > 1
    assert not any(entry.offered for entry in found[3].entries)


@pytest.mark.parametrize("way", ["alone", "chain"])
def test_a_prompt_from_elsewhere_has_drafts_from_its_first_round_on(config: EngineConfig, way: str) -> None:
    wanted, plain = requests(config)[:3], setting(config, way)
    expected, _ = answers(plain, wanted)
    found = together(Loopback(*roles(on_device(plain))), wanted)
    assert tokens(found) == tokens(expected)
    assert [by_choice(result) for result in found] == [by_choice(result) for result in expected]


def test_a_text_that_was_not_told_is_noticed(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens stay right whatever is drafted; the rounds are not those of the plain engine."""
    wanted, plain = requests(config)[:2], setting(config, "alone")
    monkeypatch.setattr(DeviceLookup, "reads", lambda lookup, seq: False)
    expected, _ = answers(plain, wanted)
    found, _ = answers(on_device(plain), wanted)
    assert tokens(found) == tokens(expected)
    assert [rounds(result) for result in found] != [rounds(result) for result in expected]
