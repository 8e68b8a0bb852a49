"""Two attention ranks on the device path, kernels interpreted, give the plain engine's tokens."""

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
from tests.unit.attention_ranks_rig import alone, request
from tests.unit.device_ranks_rig import PLAIN, SIZES, DeviceRanks, device_ranks, logprobs, mixed, tokens
from tests.unit.loopback import wait_all
from tests.unit.loopback_runs import assert_idle
from tests.unit.tiny_deepseek import write_tiny_deepseek

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_deepseek(folder, SIZES)
    return replace(PLAIN, model=str(folder), pool_dir=str(tmp_path_factory.mktemp("pools")))


@pytest.fixture(scope="module")
def two(config: EngineConfig) -> Iterator[DeviceRanks]:
    engine = device_ranks(config)
    yield engine
    engine.cluster.close()


def test_two_ranks_give_what_one_gives(two: DeviceRanks, config: EngineConfig) -> None:
    """Prompts of several chunks, special rows of one rank alone, prompts that are scored, forks."""
    ours, wanted = two.run(mixed()), alone(config, mixed())
    assert tokens(ours) == tokens(wanted)
    assert logprobs(ours) == pytest.approx(logprobs(wanted), abs=1e-4)
    works = [sum(works[rank] for works, _ in two.seen) for rank in range(2)]
    assert min(works) > max(works) / 4, f"the ranks did not share the work: {works}"
    assert_idle(two.cluster)


def test_a_rank_without_rows_takes_part_in_prompts_and_in_rounds(two: DeviceRanks, config) -> None:
    requests = [[request("lonely", 30, 6)], [request("a", 20, 2), request("b", 5, 9)]]
    first = len(two.seen)
    found = [two.run(some) for some in requests]
    assert list(map(tokens, found)) == [tokens(alone(config, some)) for some in requests]
    prompts, rounds = two.idle(first)
    assert prompts >= 2 and rounds >= 8, "no rank was idle"


def test_a_cancelled_request_leaves_its_rank_idle(two: DeviceRanks) -> None:
    long = two.cluster.submit(request("cancelled", 20, 100), split=False)
    other = two.cluster.submit(request("stays", 20, 20), split=False)
    while not long.entries:
        time.sleep(0.002)
    two.cluster.by_role["decode"].send(CancelGeneration("cancelled"))
    wait_all([other], 60)
    assert len(long.tokens[0]) < 100 and len(other.tokens[0]) == 20
    assert_idle(two.cluster)


def test_a_prompt_is_found_where_it_was_computed(two: DeviceRanks) -> None:
    """Its second part runs on the rank that has the first one in its cache, in pages of that rank's pool."""
    prompt = request("first", 32, 2, seed=5).prompt_ids
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    two.run([GenerationRequest("first", prompt, params)])
    for turn in range(3):
        (result,) = two.run([GenerationRequest(f"turn {turn}", prompt + (turn,) * 3, params)])
        (timings,) = [entry.timings for entry in result.entries if entry.timings]
        assert timings.cached_tokens == 32


def test_many_tiny_requests_end(two: DeviceRanks) -> None:
    """In bursts and alone; some are cancelled."""
    rng, first = random.Random(2), len(two.seen)
    for burst in range(6):
        results = []
        for i in range(rng.choice([1, 3, 9])):
            made = request(f"{burst} {i}", rng.choice([1, 2, 9, 17]), rng.choice([1, 1, 2, 3, 6]))
            results.append(two.cluster.submit(made, split=False))
            if rng.random() < 0.1:
                results.pop()
                two.cluster.by_role["decode"].send(CancelGeneration(made.id))
        wait_all(results, 60)
    assert min(two.idle(first)) > 0
    assert_idle(two.cluster)
