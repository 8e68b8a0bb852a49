"""Engines that pause, sleep and wake: requests wait, end with what they have, or go on to the same tokens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from loopback import Loopback, Result, Worker, wait_all
from tiny import write_tiny_pair

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError, EngineError
from eyas.common.params import SamplingParams
from eyas.common.types import FinishCause, GenerationRequest, RequestChoice
from eyas.common.wire.control import (
    ContinueGeneration,
    ControlCommand,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
)
from eyas.engine.ipc.messages import EngineControlled
from eyas.engine.kv.pool import KvPool
from eyas.engine.loop.control import EngineControl

pytestmark = pytest.mark.usefixtures("one_thread")
KV = (MemoryTag.KV_CACHE,)
LONG = 48


class Operated(Loopback):
    """A cluster of one engine, and its operator."""

    def __init__(self, config: EngineConfig) -> None:
        self._names = itertools.count()
        super().__init__(config)

    @property
    def engine(self) -> Worker:
        (worker,) = self.workers.values()
        return worker

    def ask(self, command: ControlCommand) -> EngineControlled:
        return self.engine.control(command, 20)

    def begin(self, max_tokens: int = LONG, seed: int = 1, timeout_s: float = 60.0, n: int = 1) -> Result:
        prompt = tuple((7 * seed + i) % 250 for i in range(40))
        params = SamplingParams(
            temperature=0.8, seed=seed, max_tokens=max_tokens, ignore_eos=True, logprobs=0
        )
        choices = tuple(RequestChoice(i) for i in range(n))
        request = GenerationRequest(f"r{next(self._names)}", prompt, params, choices, timeout_s=timeout_s)
        return self.submit(request, split=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_pair(folder)
    pools = tmp_path_factory.mktemp("pools")
    names = {"model": str(folder / "target"), "draft": str(folder / "head"), "pool_dir": str(pools)}
    return EngineConfig(**names, num_pages=256, chunk_tokens=48, worker="unified")


@pytest.fixture(scope="module")
def cluster(base: EngineConfig) -> Iterator[Operated]:
    cluster = Operated(base)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def undisturbed(cluster: Operated) -> dict[int, list[int]]:
    result = cluster.begin(n=2)
    wait_all([result], 60)
    return result.tokens


def count(result: Result) -> int:
    return sum(map(len, result.tokens.values()))


def under_way(cluster: Operated, n: int = 2) -> Result:
    """A request that has some tokens, and not all."""
    result = cluster.begin(n=n)
    deadline = time.monotonic() + 20
    while count(result) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return result


def stands_still(result: Result) -> None:
    had = count(result)
    time.sleep(0.15)
    assert count(result) == had and not result.done.is_set()


def test_a_move_whose_rank_is_lost_is_under_way_no_more() -> None:
    """Else it would fail again with each later command."""

    class Lost:
        def release(self) -> int:
            raise EngineError("rank 1 of 2 has ended")

    memory: Any = {MemoryTag.KV_CACHE: [Lost()]}
    control = EngineControl(*[cast("Any", SimpleNamespace())] * 4, memory, lambda: "", lambda: None)
    control._moving = control._thread.submit(control._move, KV, out=True)
    control.close()
    with pytest.raises(EngineError, match="has ended"):
        control._move_outcome()
    assert not control.moving


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_what_was_paused_goes_on_to_the_same_tokens(
    cluster: Operated, undisturbed: dict[int, list[int]], mode: PauseMode
) -> None:
    result = under_way(cluster)
    answer = cluster.ask(PauseGeneration(mode))
    assert answer.failure is None
    assert answer.outcome.requests == (2 if mode is PauseMode.RETRACT else 0)
    stands_still(result)
    used = cluster.engine.engine._scheduler.pool.used
    assert (used == 0) == (mode is PauseMode.RETRACT)
    late = cluster.begin(max_tokens=4, seed=2)
    stands_still(late)
    assert cluster.engine.load is not None and cluster.engine.load.paused
    assert cluster.ask(ContinueGeneration()).failure is None
    wait_all([result, late], 60)
    assert result.tokens == undisturbed
    assert len(late.tokens[0]) == 4


def test_a_pause_with_a_limit_ends_by_itself(
    cluster: Operated, undisturbed: dict[int, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """As after a client that is gone; a later pause has its own limit, or none."""
    result = under_way(cluster)
    cluster.ask(PauseGeneration(PauseMode.IN_PLACE, 0.05))
    cluster.ask(PauseGeneration(PauseMode.RETRACT))
    stands_still(result)
    cluster.ask(PauseGeneration(PauseMode.RETRACT, 0.2))
    stands_still(result)
    wait_all([result], 60)
    assert result.tokens == undisturbed
    assert "goes on at its limit" in caplog.text


def test_what_is_aborted_ends_with_the_tokens_that_it_has(
    cluster: Operated, undisturbed: dict[int, list[int]]
) -> None:
    result = under_way(cluster)
    answer = cluster.ask(PauseGeneration(PauseMode.ABORT))
    assert answer.outcome.requests == 1
    wait_all([result], 10)
    assert set(result.finishes.values()) == {FinishCause.ABORT} and len(result.finishes) == 2
    for choice, tokens in result.tokens.items():
        assert tokens == undisturbed[choice][: len(tokens)] and len(tokens) < LONG
    waits = cluster.begin(n=3)
    assert cluster.ask(PauseGeneration(PauseMode.ABORT)).outcome.requests == 1
    wait_all([waits], 10)  # it had no sequence of its own for two of its choices
    assert waits.tokens == {0: [], 1: [], 2: []} and len(waits.finishes) == 3
    cluster.ask(ContinueGeneration())


def test_a_request_that_waits_in_a_pause_has_its_deadline(cluster: Operated) -> None:
    cluster.ask(PauseGeneration(PauseMode.IN_PLACE))
    result = cluster.begin(timeout_s=0.2)
    assert result.done.wait(5)
    assert result.failure is not None and "deadline" in result.failure
    cluster.ask(ContinueGeneration())


def test_an_engine_that_sleeps_refuses_and_wakes_to_the_same_tokens(
    cluster: Operated, undisturbed: dict[int, list[int]]
) -> None:
    pool = cluster.engine.engine._parts.pools[0]
    path = pool.path
    assert path is not None
    awake = path.stat().st_blocks
    answer = cluster.ask(ReleaseMemory())
    assert answer.failure is None
    moved = {moved.tag: moved.bytes for moved in answer.outcome.moved}
    assert moved[MemoryTag.WEIGHTS] == 0  # of a CPU: they are in the host's memory
    assert moved[MemoryTag.KV_CACHE] >= 0.9 * pool.shape.nbytes
    assert path.stat().st_blocks < awake // 4
    assert cluster.engine.load is not None
    assert set(cluster.engine.load.released) == set(MemoryTag)
    refused = cluster.begin()
    assert refused.done.wait(5)
    assert refused.failure is not None and "resume_memory_occupation" in refused.failure
    again = cluster.ask(ReleaseMemory())
    assert again.failure is None and again.outcome.moved == ()
    woke = cluster.ask(ResumeMemory())
    assert woke.failure is None and len(woke.outcome.moved) == 2
    assert path.stat().st_blocks == awake
    result = cluster.begin(n=2)
    wait_all([result], 60)
    assert result.tokens == undisturbed


def test_memory_in_use_does_not_leave(cluster: Operated) -> None:
    result = under_way(cluster)
    refused = cluster.ask(ReleaseMemory(KV, wait_s=0.05))
    assert refused.failure is not None and "1 request" in refused.failure.message
    cluster.ask(PauseGeneration(PauseMode.IN_PLACE))
    refused = cluster.ask(ReleaseMemory(KV, wait_s=0.05))
    assert refused.failure is not None and "pages in use" in refused.failure.message
    cluster.ask(ContinueGeneration())
    wait_all([result], 60)


def test_requests_wait_through_a_sleep_that_a_pause_began(
    cluster: Operated, undisturbed: dict[int, list[int]]
) -> None:
    result = under_way(cluster)
    cluster.ask(PauseGeneration(PauseMode.RETRACT))
    assert cluster.ask(ReleaseMemory()).failure is None
    late = cluster.begin(max_tokens=4)
    early = cluster.ask(ContinueGeneration())
    assert early.failure is not None and "resumed first" in early.failure.message
    stands_still(late)
    cluster.ask(ResumeMemory())
    assert cluster.ask(ContinueGeneration()).failure is None
    wait_all([result, late], 60)
    assert result.tokens == undisturbed
    assert late.tokens[0] == undisturbed[0][:4]


def test_memory_that_was_released_comes_back_where_other_memory_cannot_be(
    cluster: Operated, undisturbed: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mapped(pool: KvPool) -> int:
        raise ConfigError("other workers have its KV pages mapped")

    with monkeypatch.context() as patch:
        patch.setattr(KvPool, "release", mapped)
        failed = cluster.ask(ReleaseMemory())
    assert failed.failure is not None and "pages mapped" in failed.failure.message
    assert cluster.engine.load is not None
    assert cluster.engine.load.released == ()
    result = cluster.begin(n=2)
    wait_all([result], 60)
    assert result.tokens == undisturbed


def test_memory_that_cannot_come_back_is_away_until_it_can(
    cluster: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = cluster.engine.engine._parts.pools[0]
    cluster.ask(ReleaseMemory())

    def full(path: Path) -> None:
        raise ConfigError("no room is left")

    with monkeypatch.context() as patch:
        patch.setattr("eyas.engine.kv.pool.allocate_file", full)
        failed = cluster.ask(ResumeMemory())
    assert failed.failure is not None and "no room is left" in failed.failure.message
    assert cluster.engine.load is not None
    assert cluster.engine.load.released == KV  # weights are here again
    assert cluster.ask(ResumeMemory()).failure is None
    assert not pool.pages[:-1].any()
