"""Attention ranks that are more, have less, or die. A process has one group of ranks at a time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import EngineError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.loop import forwards
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.leader import RankLeader
from eyas.engine.parallel.ranks import RankChannel, RankFollowers, RankInfo
from tests.unit.attention_ranks_rig import BASE, SIZES, alone, answers, mixed, model_of, ranked, request
from tests.unit.families import write_family
from tests.unit.fp8_formats import FORMATS, write_format
from tests.unit.loopback import Loopback, split_configs, wait_all
from tests.unit.loopback_runs import assert_idle
from tests.unit.tiny_deepseek import write_tiny_deepseek, write_tiny_nextn_deepseek

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_deepseek(folder, SIZES)
    return replace(BASE, **model_of(folder), pool_dir=str(tmp_path_factory.mktemp("pools")))


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """One that has lost a rank is given up after the test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.slow
def test_experts_in_fp8_round_rows_as_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have one scale for all experts, so each rank must know those of experts that it has not."""
    write_family(tmp_path / "plain", "mixtral", vocab_size=64, num_hidden_layers=2)
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS["fp8, static"])
    config = replace(BASE, **model_of(tmp_path / "fp8"))
    requests = mixed(6, seed=8)
    wanted = answers(alone(config, requests))
    engine = ranked(monkeypatch, config, 2)
    assert answers(engine.run(requests)) == wanted
    engine.cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek", "qwen3_moe", "mixtral"])
def test_other_numbers_of_ranks_and_other_families(
    tmp_path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Layers without experts between those with some; three ranks of twelve experts."""
    ranks = 2
    if family == "deepseek":
        write_tiny_deepseek(tmp_path / "m", SIZES | {"n_routed_experts": 12, "n_group": 3, "topk_group": 2})
        ranks = 3
    else:
        write_family(tmp_path / "m", family, vocab_size=64)
    config = replace(BASE, **model_of(tmp_path / "m"))
    requests = mixed(12, seed=3)
    wanted = answers(alone(config, requests))
    engine = ranked(monkeypatch, config, ranks)
    assert answers(engine.run(requests)) == wanted
    assert sum(engine.idle()) > 0
    engine.cluster.close()


@pytest.mark.slow
def test_preempted_sequences_come_back_to_their_rank(config: EngineConfig, monkeypatch) -> None:
    requests = [request(f"r{i}", 30, 60, seed=i) for i in range(8)]
    wanted = answers(alone(config, requests))
    engine = ranked(monkeypatch, replace(config, num_pages=16), 2)
    assert answers(engine.run(requests)) == wanted
    assert engine.cluster.workers["w"].load.preemptions > 0
    assert_idle(engine.cluster)
    engine.cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SpeculationConfig(3, 1, 4), SpeculationConfig(3, 2, 6)])
def test_drafts_change_no_token(tmp_path, monkeypatch, spec: SpeculationConfig) -> None:
    """The head lives at rank 0, the rows that it drafts for on both; accepted rows of trees are moved."""
    write_tiny_nextn_deepseek(tmp_path, SIZES)
    plain = replace(BASE, **model_of(tmp_path))
    requests = [_hot(one) for one in mixed(10, seed=4)]
    wanted = [result.tokens for result in alone(plain, requests)]
    engine = ranked(monkeypatch, replace(plain, draft=str(tmp_path), speculation=spec), 2)
    results = engine.run(requests)
    assert [result.tokens for result in results] == wanted
    assert sum(entry.accepted for result in results for entry in result.entries) > 0
    engine.run([_hot(request("lonely", 40, 12))])
    assert min(engine.idle()) > 0, "no rank was idle"
    assert_idle(engine.cluster)
    engine.cluster.close()


def _hot(one: GenerationRequest) -> GenerationRequest:
    """Hot and seeded: head and target see the same noise, so that even a random head is right at times."""
    params = SamplingParams(temperature=1.5, seed=len(one.prompt_ids), max_tokens=12, ignore_eos=True)
    return GenerationRequest(one.id, one.prompt_ids, params, one.choices)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_pages_travel_from_ranks_and_to_ranks(config: EngineConfig, which: str) -> None:
    """Between a worker of two ranks and one of one; prompts that come are shared out as they arrive."""
    requests = mixed(14, seed=6)
    wanted = answers(alone(config, requests))
    tiers = [replace(tier, transfer="auto") for tier in split_configs(config)[:2]]
    cluster = Loopback(*(replace(t, dp_attention=1 + (t.worker == which)) for t in tiers))
    found = [cluster.submit(request, split=True) for request in requests]
    wait_all(found, 60)
    assert answers(found) == wanted
    moved = [entry.timings for result in found for entry in result.entries if entry.timings]
    assert moved and all(timings.transfer_path == "shm" for timings in moved)
    assert_idle(cluster)
    scheduler = cluster.workers[which].engine._scheduler
    assert all(rank.prompt_tokens > 0 for rank in scheduler._ranks), "a rank had nothing to do"
    cluster.close()


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_engine_in_words(config: EngineConfig, monkeypatch) -> None:
    """While it computes. The engine's process says so to its front, which answers every request."""
    engine = ranked(monkeypatch, config, 2)
    worker = engine.cluster.workers["w"]
    ended: list[BaseException] = []
    monkeypatch.setattr("threading.excepthook", lambda hooked: ended.append(hooked.exc_value))
    result = engine.cluster.submit(request("long", 20, 200), split=False)
    while not result.entries:
        time.sleep(0.002)
    (follower,) = engine.seen.forward._leader._followers._followers
    os.kill(follower._process.pid, signal.SIGKILL)
    worker.thread.join(20)
    assert not worker.thread.is_alive(), "the engine hangs"
    assert isinstance(ended[0], EngineError)
    assert str(ended[0]) == "rank 1 of 2 has ended: killed by SIGKILL"
    assert not list(Path(config.pool_dir).glob("*meeting"))


def _loaded_early(rank_info: RankInfo, channel: RankChannel) -> None:
    forwards.STEP_S = 2.0
    forwards.serve(None, rank_info, channel, {})


@pytest.mark.slow
def test_a_rank_that_loads_much_longer_than_another_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here rank 0 itself, for longer than a group waits."""
    monkeypatch.setattr(forwards, "STEP_S", 2.0)
    leader = RankLeader(_loaded_early, 2, tmp_path / "meeting")
    leader._followers.wait_ready(60.0)
    monkeypatch.setattr(leader._followers, "wait_ready", lambda timeout_s: None)
    time.sleep(4.0)
    assert forwards.DataParallelForward(None, leader).close()  # type: ignore[arg-type]


def _ended_early(rank_info: RankInfo, channel: RankChannel) -> None:
    channel.ready()
    raise ValueError("the device is gone")


@pytest.mark.slow
def test_a_rank_that_ends_before_it_joins_is_not_waited_for(tmp_path: Path) -> None:
    with RankFollowers(_ended_early, 2, tmp_path / "meeting") as followers:
        followers._followers[0]._process.join(60.0)  # its reason lies in the pipe right behind its ready
        followers.wait_ready(60.0)
        began = time.monotonic()
        with pytest.raises(EngineError, match="the device is gone"):
            ProcessGroup(followers.rank_info, "cpu", 60.0, followers.check)
        assert time.monotonic() - began < 20
