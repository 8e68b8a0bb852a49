"""Two attention ranks that draft with a NextN layer, kernels interpreted: the plain engine's rounds.

The layer has experts of its own, which lie over the ranks: every pass of a draft is an exchange of both. The
rounds of a request end where its drafts were wrong, so that a draft of another kind would be seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from eyas.common.config import EngineConfig
from eyas.engine.ipc.messages import CancelGeneration
from tests.unit.device_ranks_rig import PATIENCE_S, DeviceRanks, device_ranks, logprobs, tokens
from tests.unit.loopback import wait_all
from tests.unit.loopback_runs import assert_idle
from tests.unit.ranks_drafts_rig import accepted, asked, everything, knowing, one_rank, walks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return knowing(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two(config: EngineConfig) -> Iterator[DeviceRanks]:
    engine = device_ranks(config)
    yield engine
    engine.cluster.close()


def test_two_ranks_draft_what_one_drafts(two: DeviceRanks, config: EngineConfig) -> None:
    """Prompts beside rounds, forks that join on one rank alone, special rows, scores of prompts."""
    ours, wanted = two.run(everything()), one_rank(config, everything())
    assert tokens(ours) == tokens(wanted)
    assert walks(ours) == walks(wanted)
    assert logprobs(ours) == pytest.approx(logprobs(wanted), abs=1e-4)
    assert accepted(ours) >= 10, "hardly a draft was right: the rounds say nothing"
    works = [sum(works[rank] for works, _ in two.seen) for rank in range(2)]
    assert min(works) > max(works) / 4, f"the ranks did not share the work: {works}"
    assert any(0 < max(rows) and works[rows.index(0)] for works, rows in two.seen if 0 in rows)
    assert_idle(two.cluster)


def test_a_rank_that_is_idle_all_the_time_takes_part(two: DeviceRanks, config: EngineConfig) -> None:
    """One request after the other, each alone: prompts of several chunks, and rounds."""
    first = len(two.seen)
    for request in (asked("lonely", 30, 8), asked("drawn", 5, 8, temperature=1.0, seed=9)):
        ours, wanted = two.run([request]), one_rank(config, [request])
        assert walks(ours) == walks(wanted)
    prompts, rounds = two.idle(first)
    assert prompts >= 3 and rounds >= 6 and sum((prompts, rounds)) == len(two.seen) - first


def test_prompts_that_are_scored_beside_rounds_that_draft(two: DeviceRanks, config: EngineConfig) -> None:
    """Such a step has no graph, and its rounds' drafts are as good as in any other."""
    running = asked("running", 9, 24)
    late = [asked(f"scored {i}", 35, 2, prompt_logprobs=2) for i in range(2)]
    first, result = len(two.seen), two.cluster.submit(running, split=False)
    while not result.entries:
        time.sleep(0.002)
    ours = [result, *(two.cluster.submit(request, split=False) for request in late)]
    wait_all(ours, PATIENCE_S)
    wanted = one_rank(config, [running, *late])
    assert tokens(ours) == tokens(wanted) and walks(ours) == walks(wanted)
    assert logprobs(ours[1:]) == pytest.approx(logprobs(wanted[1:]), abs=1e-4)
    assert any(sum(works) > 1 and any(rows) for works, rows in two.seen[first:]), "no prompt beside a round"


def test_a_cancelled_request_leaves_its_rank_idle(two: DeviceRanks) -> None:
    long = two.cluster.submit(asked("cancelled", 20, 80), split=False)
    other = two.cluster.submit(asked("stays", 20, 20), split=False)
    while not long.entries:
        time.sleep(0.002)
    two.cluster.by_role["decode"].send(CancelGeneration("cancelled"))
    wait_all([other], PATIENCE_S)
    assert len(long.tokens[0]) < 80 and len(other.tokens[0]) == 20
    assert_idle(two.cluster)


def test_the_draft_kv_of_a_cached_prompt_is_found_too(two: DeviceRanks, config: EngineConfig) -> None:
    """The second request begins behind the first one's pages, in the head's pool as in the target's."""
    for request in (asked("again", 32, 2), asked("again", 32, 8)):
        (ours,) = two.run([request])
        assert walks([ours]) == walks(one_rank(config, [request]))
    (timings,) = [entry.timings for entry in ours.entries if entry.timings]
    assert timings.cached_tokens == 16, "of the last page, the token behind it belongs to the key"


def test_many_tiny_requests_end(two: DeviceRanks) -> None:
    """In bursts and alone; some are cancelled."""
    rng, first = random.Random(2), len(two.seen)
    for burst in range(4):
        results = []
        for i in range(rng.choice([1, 3, 6])):
            forks = rng.choice([1, 1, 2])
            made = asked(f"{burst} {i}", rng.choice([1, 2, 9, 17]), rng.choice([1, 1, 2, 4]), forks)
            results.append(two.cluster.submit(made, split=False))
            if rng.random() < 0.1:
                results.pop()
                two.cluster.by_role["decode"].send(CancelGeneration(made.id))
        wait_all(results, PATIENCE_S)
    assert min(two.idle(first)) > 0
    assert_idle(two.cluster)
