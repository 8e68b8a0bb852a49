"""Whole engines on a hybrid: drafts, cached states, preemption, few slots and splitting change no bit."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loopback import QueueLink, split_configs, wait_all

from eyas.common.config import SPARE_STATES, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.page_names import salt_of
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.checkpoint.sizes import state_bytes
from eyas.engine.ipc.messages import CancelGeneration, FlushCache
from eyas.engine.loading.build import build_engine
from eyas.engine.loading.spec import EngineSpec
from tests.unit.family_sample import VOCAB
from tests.unit.hybrid_engines import NEW, PARAMS, WAIT_S, Answer, Served, answer, config_of, folder, prompts
from tests.unit.hybrid_rig import HYBRIDS, write_hybrid

__all__ = ["folder"]  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread")

CHAIN = SpeculationConfig(steps=3, ngram=True)
TREE = SpeculationConfig(steps=3, topk=3, draft_tokens=8, ngram=True)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[int, ...], Answer]:
    """Answers that nothing disturbed: no drafts, nothing cached, alone."""
    served, answers = Served(config_of(folder)), {}
    for prompt in prompts():
        answers[prompt] = served.alone(prompt)
        served.cluster.workers["unified"].send(FlushCache(1, 10.0))
    assert not served.states().hits
    served.close()
    assert len({each.ids for each in answers.values()}) == len(answers)
    return answers


def drafts(*quick: str) -> list[Any]:
    """Ways to draft, of which some are quick enough for every day."""
    ways = {"plain": {}, "chain": {"speculation": CHAIN}, "tree": {"speculation": TREE}}
    slow = {name: () if name in quick else pytest.mark.slow for name in ways}
    return [pytest.param(changes, id=name, marks=slow[name]) for name, changes in ways.items()]


def test_states_are_shared_under_their_salt_alone(
    folder: Path, expected: dict[tuple[int, ...], Answer]
) -> None:
    served = Served(config_of(folder))
    prompt, hits = prompts()[-1], []
    try:
        for salt in ("a", "", "b", "a", ""):
            result = served.ask(prompt, salt=salt_of(salt))
            wait_all([result], WAIT_S)
            assert answer(result) == expected[prompt]
            hits.append(served.states().hits)
    finally:
        served.close()
    assert hits == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("drafts", drafts())
def test_cached_states_and_drafts_change_no_bit(folder: Path, expected: Any, drafts: dict[str, Any]) -> None:
    served = Served(config_of(folder, **drafts))
    assert served.together(list(expected)) == list(expected.values())
    hits = served.states().hits
    for prompt in expected:
        assert served.alone(prompt) == expected[prompt]
    assert served.states().hits - hits == sum(len(prompt) > 64 for prompt in expected)
    served.close()


@pytest.mark.parametrize("drafts", drafts())
def test_few_pages_and_few_slots_change_no_bit(folder: Path, expected: Any, drafts: dict[str, Any]) -> None:
    """Sequences are preempted and resume from the nearest state; the cache keeps one or two states.

    Whatever three of them share, they have no room for 40 tokens each.
    """
    served = Served(config_of(folder, page_size=4, num_pages=70, state_slots=5, **drafts))
    some = list(expected)[:4]
    for prompt, longer in zip(some, served.together(some, 40), strict=True):
        assert Answer(longer.ids[:NEW], longer.logprobs[:NEW]) == expected[prompt]
    assert served.cluster.workers["unified"].engine._scheduler.preemptions
    served.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 9])
def test_an_answer_that_moves_to_another_worker_goes_on(folder: Path, expected: Any, count: int) -> None:
    served = Served(config_of(folder, speculation=TREE))
    results = [served.ask(prompt, begun=each.ids[:count]) for prompt, each in expected.items()]
    wait_all(results, WAIT_S)
    for result, each in zip(results, expected.values(), strict=True):
        assert answer(result) == Answer(each.ids, each.logprobs[count:])
    served.close()


@pytest.mark.parametrize("drafts", drafts("chain"))
def test_split_workers_change_no_bit(folder: Path, expected: Any, drafts: dict[str, Any]) -> None:
    """The state comes with the pages; the second time, most pages are there and the state comes alone."""
    served = Served(*split_configs(config_of(folder, **drafts))[:2])
    assert served.together(list(expected)) == list(expected.values())
    for prompt in expected:
        assert served.alone(prompt) == expected[prompt]
    assert served.states("prefill").hits >= sum(len(prompt) > 64 for prompt in expected)
    served.close()


@pytest.mark.parametrize(
    "family",
    ["nemotron_h", *(pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS if name != "nemotron_h")],
)
def test_every_family_is_served_with_drafts_and_cached_states(family: str, tmp_path: Path) -> None:
    write_hybrid(tmp_path / "model", family)
    served, some = Served(config_of(tmp_path)), prompts()[2:4]
    plain = [served.alone(prompt) for prompt in some]
    served.close()
    served = Served(config_of(tmp_path, speculation=TREE))
    assert served.together(some) == plain
    assert [served.alone(prompt) for prompt in some] == plain
    assert served.states().hits
    served.close()


def test_a_start_measures_its_steps(folder: Path) -> None:
    """As a worker's does: with made-up sequences in slots that nobody has."""
    config = config_of(folder, chunk_tokens=16, max_running=2, state_slots=2)
    engine = build_engine(config, QueueLink(lambda event: None))
    assert engine._parts.ready.rates is not None and engine._parts.ready.slowest_step_s > 0
    assert not engine._scheduler.cache.states.pool.used
    engine._close()


def test_a_plan_knows_what_the_slots_take(folder: Path) -> None:
    for config in (config_of(folder), config_of(folder, state_slots=7, speculation=TREE)):
        spec = EngineSpec.of(config)
        assert spec.states is not None and spec.state_slots == (config.state_slots or 4 + SPARE_STATES)
        assert state_bytes(spec.target, config) == spec.state_slots * spec.states.slot_bytes
        on_gpu = replace(config, num_pages=None, device="cuda")
        beside = spec.states.shape.solved_bytes(spec.states.ring, spec.states.dtype.itemsize)
        each = spec.states.slot_bytes + len(spec.states.layers) * beside
        assert state_bytes(spec.target, on_gpu) == min(config.state_slots or 8, 8) * each


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"host_cache_gb": 1.0}, "--host-cache-gb"),
        ({"dp_attention": 2}, "--dp-attention"),
        ({"speculation": SpeculationConfig(3, 2, 65, ngram=True)}, "--spec-draft-tokens"),
    ],
)
def test_what_states_cannot_do_is_refused_by_name(folder: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineSpec.of(config_of(folder, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_two_slots_serve_many_long_prompts(folder: Path, seed: int) -> None:
    """On both sides of a transfer: more choices than slots, texts that share beginnings, some given up."""
    draw = random.Random(seed)
    few = config_of(folder, state_slots=2, page_size=4, num_pages=240, max_running=4, speculation=CHAIN)
    served, texts = Served(*split_configs(few)[:2]), [draw.choices(range(3, VOCAB), k=400)]
    results = []
    for _ in range(24):
        text = draw.choice(texts)[: draw.randrange(60, 330)] + draw.choices(range(3, VOCAB), k=20)
        texts.append(text)
        choices = tuple(map(RequestChoice, range(draw.choice((1, 1, 2, 4)))))
        request = GenerationRequest(f"{len(texts)}", tuple(text), PARAMS, choices)
        results.append(served.cluster.submit(request, split=draw.random() < 0.8))
        if draw.random() < 0.2:
            results.pop()
            for worker in served.cluster.workers.values():
                worker.send(CancelGeneration(request.id))
        time.sleep(draw.random() * 0.1)
    wait_all(results, WAIT_S)
    served.close()
