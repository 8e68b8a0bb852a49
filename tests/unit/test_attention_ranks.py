"""Two attention ranks in real processes: to the bit what one rank gives, whatever is idle or ends."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.ipc.messages import CancelGeneration
from tests.unit.attention_ranks_rig import (
    BASE,
    SIZES,
    Ranked,
    alone,
    answers,
    mixed,
    model_of,
    ranked,
    request,
)
from tests.unit.loopback import wait_all
from tests.unit.loopback_runs import assert_idle
from tests.unit.tiny_deepseek import write_tiny_deepseek

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_deepseek(folder, SIZES)
    return replace(BASE, **model_of(folder), pool_dir=str(tmp_path_factory.mktemp("pools")))


@pytest.fixture(scope="module")
def two(config: EngineConfig) -> Iterator[Ranked]:
    with pytest.MonkeyPatch.context() as patch:
        engine = ranked(patch, config, 2)
    yield engine
    engine.cluster.close()


def test_two_ranks_give_what_one_gives(two: Ranked, config: EngineConfig) -> None:
    requests = mixed(9, seed=1)
    assert answers(two.run(requests)) == answers(alone(config, requests))
    rows = [sum(step[rank] for step in two.seen.steps) for rank in range(2)]
    assert min(rows) > max(rows) / 5, f"the ranks did not share the work: {rows}"
    assert_idle(two.cluster)


def test_a_rank_without_rows_takes_part_in_prompts_and_in_rounds(two: Ranked) -> None:
    """One request alone: its rank has rows, the other has none, in either kind of step."""
    first = len(two.seen.steps)
    two.run([request("lonely", 30, 12)])
    prompts, rounds = two.idle(first)
    assert prompts >= 1 and rounds >= 11, "no rank was idle"
    first = len(two.seen.steps)
    two.run([request("a", 20, 3), request("b", 20, 30)])
    assert any(min(step) > 0 for step in two.seen.steps[first:]), "no step had rows of both"
    assert two.idle(first)[1] >= 10, "the shorter one's rank was never idle"


def test_a_cancelled_request_leaves_its_rank_idle(two: Ranked) -> None:
    long = two.cluster.submit(request("cancelled", 20, 200), split=False)
    other = two.cluster.submit(request("stays", 20, 60), split=False)
    while not long.entries:
        time.sleep(0.002)
    two.cluster.by_role["decode"].send(CancelGeneration("cancelled"))
    wait_all([other], 30)
    assert len(long.tokens[0]) < 200 and len(other.tokens[0]) == 60
    assert_idle(two.cluster)


@pytest.mark.slow
def test_a_prompt_is_found_where_it_was_computed(two: Ranked) -> None:
    """Its second part runs on the rank that has the first one in its cache."""
    prompt = request("first", 64, 2, seed=5).prompt_ids
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    two.run([GenerationRequest("first", prompt, params)])
    for turn in range(3):
        (result,) = two.run([GenerationRequest(f"turn {turn}", prompt + (turn,) * 3, params)])
        (timings,) = [entry.timings for entry in result.entries if entry.timings]
        assert timings.cached_tokens == 64


def _soak(engine: Ranked, count: int, seed: int) -> None:
    """Tiny requests in bursts, in trickles and alone, some of which are cancelled."""
    rng = random.Random(seed)
    results = []
    for i in range(count):
        made = request(f"{seed} {i}", rng.choice([1, 2, 9, 17]), rng.choice([1, 1, 2, 3, 6]), seed)
        results.append(engine.cluster.submit(made, split=False))
        if rng.random() < 0.05:
            results.pop()
            engine.cluster.by_role["decode"].send(CancelGeneration(made.id))
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.05)
        alone = rng.random() < 0.02
        if len(results) > 40 or alone:
            wait_all(results, 60)
            results.clear()
        if alone:
            engine.run([request(f"{seed} {i} alone", 17, 2, seed)])
    wait_all(results, 60)
    assert_idle(engine.cluster)


@pytest.mark.slow
def test_many_tiny_requests_end(two: Ranked) -> None:
    first = len(two.seen.steps)
    _soak(two, 120, seed=2)
    assert min(two.idle(first)) > 0, "no rank was idle in a step with prompts, or in one without"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_tiny_requests_end(two: Ranked) -> None:
    first = len(two.seen.steps)
    for seed in range(25):
        _soak(two, 400, seed)
    assert min(two.idle(first)) > 100
