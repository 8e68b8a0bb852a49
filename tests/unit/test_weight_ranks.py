"""New weights, and sleep, of engines whose ranks share a model: all ranks have them, or none."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from eyas.client.weights import SharedTensors
from eyas.common.cluster.listening import free_ports
from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.process_groups import MetGroup
from eyas.common.types import GenerationRequest
from eyas.common.weights import (
    BytesSource,
    CloseForWeights,
    CommitWeights,
    DropWeights,
    FolderSource,
    GroupSource,
    JoinGroup,
    PrepareWeights,
    Running,
    SharedSource,
    TensorMeta,
)
from eyas.common.wire.control import (
    ContinueGeneration,
    ControlCommand,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
)
from eyas.engine.checkpoint.host_tensors import (
    DTYPES,
    DiskFile,
    LayeredFile,
    SharedFile,
    mapped,
    read_bytes,
    shared,
)
from eyas.engine.loading import attention_ranks, follower
from eyas.engine.loading.rank_memory import FollowerMemory, LeaderMemory
from eyas.engine.loading.rank_replacement import FORGET, REHEARSE, LeaderReplacement
from eyas.engine.loading.replacement import WeightReplacement
from eyas.engine.loop.expert_balance import ExpertBalance
from eyas.engine.parallel.leader import RankLeader
from eyas.engine.parallel.ranks import RankCall, RankChannel
from tests.unit.attention_ranks_rig import BASE
from tests.unit.attention_ranks_rig import SIZES as EXPERTS
from tests.unit.device_engines import SIZES
from tests.unit.device_ranks_rig import BACKENDS, interpreted_follower, no_group_stays
from tests.unit.device_ranks_rig import SIZES as MORE_EXPERTS
from tests.unit.loopback import wait_all
from tests.unit.tiny import write_tiny_llama
from tests.unit.tiny_deepseek import write_tiny_deepseek
from tests.unit.updated_cluster import Cluster

pytestmark = pytest.mark.usefixtures("one_thread")
no_group_is_left = pytest.fixture(autouse=True)(no_group_stays)

PATIENCE_S = 120.0
PROMPTS = [tuple((7 * i + 3 * j) % 16 for j in range(5 + 9 * i)) for i in range(3)]
KINDS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2, "overlap_schedule": True, **BACKENDS},
    "dp": {"dp_attention": 2, "expert_replicas": 2},
    "dp device": {"dp_attention": 2, "overlap_schedule": True, **BACKENDS},
}


@dataclass
class Rig:
    """Engines of one model's two versions. `ranks`: of those that change."""

    plain: EngineConfig
    ranks: dict[str, Any]
    new: Path

    def tokens(self, cluster: Cluster, name: str, weights: str = "") -> list[Any]:
        params = SamplingParams(temperature=0.8, seed=5, max_tokens=4, ignore_eos=True)
        results = [
            cluster.submit(GenerationRequest(f"{name}{i}", prompt, params, weights=weights), split=False)
            for i, prompt in enumerate(PROMPTS)
        ]
        wait_all(results, PATIENCE_S)
        return [result.tokens for result in results]

    def fresh(self, folder: str) -> list[Any]:
        """Of one rank that was started on a folder."""
        cluster = Cluster(replace(self.plain, model=folder))
        try:
            return self.tokens(cluster, "fresh")
        finally:
            cluster.close()

    def start(self) -> Cluster:
        return Cluster(replace(self.plain, **self.ranks))


def rig_of(folder: Path, kind: str) -> Rig:
    plain = replace(BASE, model=str(folder / "old"), pool_dir=str(folder), worker="unified", num_pages=32)
    if kind == "tp":
        write_tiny_llama(folder / "old", tied=False, **SIZES | {"kv_heads": 2, "vocab": 32})
    else:
        write_tiny_deepseek(folder / "old", EXPERTS if kind == "dp" else MORE_EXPERTS)
    shutil.copytree(folder / "old", folder / "new")
    stored = load_file(folder / "new" / "model.safetensors")
    chance = torch.Generator().manual_seed(3)
    for name, tensor in stored.items():
        if tensor.dim() > 1:
            stored[name] = tensor + 0.5 * tensor.std() * torch.randn(tensor.shape, generator=chance)
    save_file(stored, folder / "new" / "model.safetensors")
    return Rig(plain, KINDS[kind], folder / "new")


@pytest.fixture(params=["dp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tp", "dp device"))])
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(follower, "main", interpreted_follower)
    monkeypatch.setattr(ExpertBalance.__init__, "__defaults__", (0.02,))
    return rig_of(tmp_path, request.param)


@pytest.mark.timeout(300)
def test_all_ranks_have_the_new_weights(rig: Rig) -> None:
    """From a folder and back from memory, in two parts; what is wrong with the part of any rank is named."""
    old, new = rig.fresh(rig.plain.model), rig.fresh(str(rig.new))
    assert old != new
    stored = load_file(Path(rig.plain.model) / "model.safetensors")
    cluster = rig.start()
    try:
        assert rig.tokens(cluster, "a") == old
        digest = cluster.update(FolderSource(str(rig.new)))
        assert rig.tokens(cluster, "b", digest) == new
        broken = _with_nan(stored)
        reply = cluster.tell("unified", PrepareWeights("bad", 2, BytesSource((save(broken),)), whole=True))
        assert reply.failure is not None and "holds NaN" in reply.failure.message
        assert rig.tokens(cluster, "c", digest) == new
        names = sorted(stored)
        first, second = ({name: stored[name] for name in names[place::2]} for place in (0, 1))
        with SharedTensors(first) as file:
            half = SharedSource((file.path,), (file.digest,))
            reply = cluster.tell("unified", PrepareWeights("dropped", 2, half, whole=False))
            assert cluster.tell("unified", DropWeights(reply.digest)).failure is None
            assert rig.tokens(cluster, "d", digest) == new
            cluster.update(half, 3, whole=False)
        digest = cluster.update(BytesSource((save(second),)), 4, whole=False)
        assert rig.tokens(cluster, "e", digest) == old
        balance = cluster.workers["unified"].engine._parts.balance
        assert not rig.ranks.get("expert_replicas") or any(map(max, balance._ranks.replicas)), "none was made"
    finally:
        cluster.close()


def _with_nan(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In what the last rank has alone, where ranks share it."""
    broken = dict(stored)
    name = max(name for name in stored if "down_proj" in name or "o_proj" in name)
    broken[name] = stored[name].clone()
    broken[name][-1, -1] = float("nan")
    return broken


@pytest.mark.timeout(300)
def test_memory_of_all_ranks_leaves_and_comes_back(rig: Rig) -> None:
    """Answers after it are those of before; what is cached is not."""
    cluster = rig.start()
    worker = cluster.workers["unified"]
    try:
        before = rig.tokens(cluster, "a")
        commands: tuple[ControlCommand, ...] = (
            PauseGeneration(PauseMode.RETRACT),
            ReleaseMemory(),
            ResumeMemory(),
            ContinueGeneration(),
        )
        moved: list[dict[str, int]] = []
        for command in commands:
            answer = worker.control(command, PATIENCE_S)
            assert answer.failure is None and answer.outcome is not None, answer.failure
            moved.append({each.tag: each.bytes for each in answer.outcome.moved})
        pools = worker.engine._parts.pools
        ranks = 2 if "attention_backend" in rig.ranks else 1  # in plain torch they share a pool
        assert moved[1][MemoryTag.KV_CACHE] >= 0.9 * ranks * sum(pool.shape.nbytes for pool in pools)
        assert rig.tokens(cluster, "b") == before
    finally:
        cluster.close()


class Part:
    """Memory that may refuse to move, by the kind of move."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.away = refuses, False

    def release(self) -> int:
        return self._to(away=True, kind="release")

    def restore(self) -> int:
        return self._to(away=False, kind="restore")

    def _to(self, *, away: bool, kind: str) -> int:
        assert self.away is not away
        if kind == self.refuses:
            raise ConfigError("it stays")
        self.away = away
        return 5


class Ranks:
    """Other ranks in this process, as a leader sees them."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._answers: list[bytes] = []
        channel = SimpleNamespace(answer=lambda number, data: self._answers.append(data))
        self._ranks = [FollowerMemory([part], cast("RankChannel", channel), lambda: None) for part in parts]

    def ask(self, call: RankCall) -> int:
        self._answers.clear()
        for rank in self._ranks:
            rank.calls[call.kind](RankCall(call.kind, (1, *call.numbers)))
        return 1

    def answers(self, number: int, wait_s: float) -> list[bytes]:
        return self._answers


@pytest.mark.parametrize("who", range(3))
@pytest.mark.parametrize("kind", ["release", "restore"])
def test_memory_moves_on_all_ranks_or_on_none(who: int, kind: str) -> None:
    parts = [Part(kind if rank == who else "") for rank in range(3)]
    memory = LeaderMemory(parts[0], cast("RankLeader", Ranks(parts[1:])), 0)
    if kind == "restore":
        assert memory.release() == 15
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"rank {who}: it stays"):
            getattr(memory, kind)()
        assert [part.away for part in parts] == [kind == "restore"] * 3
    parts[who].refuses = ""
    assert getattr(memory, kind)() == 15


def test_what_ranks_are_to_rehearse_is_no_long_message() -> None:
    """A rank that waits for a step takes no messages: a long one would hold up the step."""
    file = read_bytes(
        [save({f"model.layers.{i}.mlp.experts.7.gate_proj.weight": torch.ones(1) for i in range(999)})]
    )
    heard: list[list[SharedFile]] = []

    def ask(call: RankCall) -> int:
        assert len(call.data) < 100
        heard.append(msgspec.msgpack.decode(Path(call.data.decode()).read_bytes(), type=list[SharedFile]))
        return 1

    leader = SimpleNamespace(answers=lambda number, wait_s: [b""], ask=ask)
    own = cast("WeightReplacement", SimpleNamespace(rehearse=lambda _: None))
    LeaderReplacement(own, cast("RankLeader", leader)).rehearse(file)
    assert heard == [shared(file)]


@pytest.mark.parametrize("error", [ConfigError("no such tensor"), torch.OutOfMemoryError("no room")])
def test_what_one_rank_cannot_rehearse_all_let_go(error: Exception) -> None:
    """Else the others would keep the memory of these weights, and serve on."""

    def rehearse(_: object) -> None:
        raise error

    sent: list[str] = []
    leader = SimpleNamespace(answers=lambda number, wait_s: [b""])
    leader.ask = leader.tell = lambda call: sent.append(call.kind)
    own = cast("WeightReplacement", SimpleNamespace(rehearse=rehearse))
    file = read_bytes([save({"a": torch.ones(2)})])
    with pytest.raises(type(error)):
        LeaderReplacement(own, cast("RankLeader", leader)).rehearse(file)
    assert sent == [REHEARSE, FORGET]


def train(port: int, folder: str) -> None:
    """A trainer: rank 0 of a group, which broadcasts the tensors of a folder."""
    group = MetGroup("weights", f"127.0.0.1:{port}", 0, 2, "gloo", 60.0)
    for _, tensor in sorted(load_file(Path(folder) / "model.safetensors").items()):
        group.broadcast(tensor)
    group.leave()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_get_weights_of_a_group(rig: Rig) -> None:
    """Rank 0 is in it, and gives the others what came."""
    new, port = rig.fresh(str(rig.new)), next(free_ports())
    stored = load_file(rig.new / "model.safetensors")
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    cluster = rig.start()
    trainer = multiprocessing.get_context("spawn").Process(target=train, args=(port, str(rig.new)))
    trainer.start()
    try:
        join = JoinGroup("weights", f"127.0.0.1:{port}", 1, 2, "gloo", 60.0)
        assert cluster.tell("unified", join).failure is None
        metas = [TensorMeta(n, dtypes[each.dtype], tuple(each.shape)) for n, each in sorted(stored.items())]
        digest = cluster.update(GroupSource("weights", tuple(metas)))
        assert rig.tokens(cluster, "a", digest) == new
    finally:
        trainer.join(30)
        cluster.close()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """With what engines end."""
    found: list[str] = []
    monkeypatch.setattr("threading.excepthook", lambda hooked: found.append(str(hooked.exc_value)))
    return found


def killed_while(phase: str) -> None:
    """A follower's process that dies in a phase of an update."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(WeightReplacement, phase, die)


def _dies_while_it_rehearses(*args: Any) -> None:
    killed_while("rehearse")
    _own_main(*args)


def _dies_while_it_writes(*args: Any) -> None:
    killed_while("write")
    _own_main(*args)


def _writes_nothing(*args: Any) -> None:
    WeightReplacement.write = lambda *_: None  # type: ignore[method-assign]
    _own_main(*args)


_own_main = attention_ranks._main


@pytest.mark.slow
def test_a_rank_that_keeps_the_old_weights_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The power of the first test."""
    monkeypatch.setattr(attention_ranks, "_main", _writes_nothing)
    rig = rig_of(tmp_path, "dp")
    cluster = rig.start()
    try:
        digest = cluster.update(FolderSource(str(rig.new)))
        assert rig.tokens(cluster, "a", digest) != rig.fresh(str(rig.new))
    finally:
        cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("main", [_dies_while_it_rehearses, _dies_while_it_writes])
def test_a_rank_that_dies_in_an_update_ends_the_worker_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[str], main: Callable[..., None]
) -> None:
    """It starts again by itself; no step is computed by ranks of two versions."""
    monkeypatch.setattr(attention_ranks, "_main", main)
    rig = rig_of(tmp_path, "dp")
    cluster = rig.start()
    worker = cluster.workers["unified"]
    prepare = PrepareWeights("v", 1, FolderSource(str(rig.new)), whole=True)
    if main is _dies_while_it_rehearses:
        worker.begin_change(prepare)
    else:
        digest = cluster.tell("unified", prepare).digest
        assert cluster.tell("unified", CloseForWeights(digest, Running.DRAIN, 9.0, 9.0)).failure is None
        worker.begin_change(CommitWeights(digest))
    worker.thread.join(30)
    assert not worker.thread.is_alive(), "the engine hangs"
    assert ended == ["rank 1 of 2 has ended: killed by SIGKILL"]


def test_another_process_has_the_same_tensors(tmp_path: Path) -> None:
    """Those of an update over those of a folder, of which it gives some no more."""
    chance = torch.Generator().manual_seed(1)
    below = {name: torch.randn(3, 4, generator=chance) for name in "abc"}
    above = {name: torch.randn(2, generator=chance).bfloat16() for name in ("b", "d")}
    save_file(below, tmp_path / "model.safetensors")
    file = LayeredFile(read_bytes([save(above)]), DiskFile(tmp_path / "model.safetensors"))
    both, wanted = mapped(shared(file), "cpu"), below | above
    assert sorted(both.keys()) == sorted(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(both.get_slice(name)[...], tensor)
