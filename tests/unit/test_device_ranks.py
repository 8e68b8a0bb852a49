"""Two attention ranks on the device path, kernels interpreted: the plain engine's tokens, whoever is idle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from eyas.common.config import EngineConfig
from eyas.common.errors import EngineError
from eyas.common.params import SamplingParams
from eyas.common.types import Choice, GenerationRequest
from eyas.engine.device.ranks_runner import RanksRunner
from eyas.engine.ipc.messages import Cancel
from eyas.engine.loading import follower
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.parallel.ranks import Channel, RankInfo
from tests.unit import tiny_deepseek
from tests.unit.attention_ranks_rig import alone, request
from tests.unit.families import write_family
from tests.unit.loopback import Loopback, Result, wait_all
from tests.unit.test_engine import _assert_nothing_held
from tests.unit.tiny_deepseek import write_tiny_deepseek

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

SIZES = tiny_deepseek.SMALL | {"num_hidden_layers": 2, "vocab_size": 64, "n_routed_experts": 8}
PLAIN = EngineConfig(
    draft=None, num_pages=32, max_running=4, chunk_tokens=16, context_length=128, transfer="none", worker="w"
)


def on_ranks(config: EngineConfig) -> EngineConfig:
    backends = {"attention_backend": "triton", "prefill_attention_backend": "triton"}
    return replace(config, **backends, overlap_schedule=True, dp_attention=2)


def _interpreted(loaded: EngineSpec, rank_info: RankInfo, channel: Channel) -> None:
    """A follower whose kernels are interpreted as this process's are."""
    from tests.unit import interpreted

    interpreted.install()
    follower.main(loaded, rank_info, channel)


@pytest.fixture(scope="module", autouse=True)
def followers_interpret() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(follower, "main", _interpreted)
        yield


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """One that has lost a rank is given up after the test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def mixed() -> list[GenerationRequest]:
    """Prompts of several chunks and of one row; greedy, seeded, special, several choices."""
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    made = [
        GenerationRequest("long", tuple(range(3, 44)), greedy),
        GenerationRequest("short", (7,), replaced(greedy, max_tokens=9)),
        GenerationRequest("special", tuple(range(20)), replaced(greedy, logprobs=3, prompt_logprobs=2)),
        GenerationRequest("seeded", (9, 8, 7, 6), replaced(greedy, temperature=1.0, seed=4)),
        GenerationRequest(
            "forks",
            tuple(range(18)),
            replaced(greedy, temperature=1.0, seed=3, repetition_penalty=1.2, max_tokens=3),
            (Choice(0), Choice(1)),
        ),
    ]
    return made


def replaced(params: SamplingParams, **changes: object) -> SamplingParams:
    kept = {"temperature": params.temperature, "max_tokens": params.max_tokens, "ignore_eos": True}
    return SamplingParams(**(kept | changes))  # type: ignore[arg-type]


def shares(cluster: Loopback) -> list[list[int]]:
    """Notes of every step that follows how many works each rank has."""
    runner, seen = runner_of(cluster), []
    launch = runner.launch

    def noted(works):
        ranks = [work.seq.generation.rank for work in works]
        seen.append([ranks.count(rank) for rank in range(2)])
        return launch(works)

    runner.launch = noted  # type: ignore[method-assign]
    return seen


def runner_of(cluster: Loopback) -> RanksRunner:
    runner = cluster.workers["w"].engine._parts.runner
    assert isinstance(runner, RanksRunner)
    return runner


def run(cluster: Loopback, requests: list[GenerationRequest]) -> list[Result]:
    results = [cluster.submit(request, split=False) for request in requests]
    wait_all(results, 120)
    return results


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_deepseek(folder, SIZES)
    return replace(PLAIN, model=str(folder), pool_dir=str(tmp_path_factory.mktemp("pools")))


def test_two_ranks_give_what_one_gives_whoever_is_idle(config: EngineConfig) -> None:
    cluster = Loopback(on_ranks(config))
    seen = shares(cluster)
    wanted = alone(config, mixed())
    assert [r.tokens for r in run(cluster, mixed())] == [r.tokens for r in wanted]
    cluster.close()
