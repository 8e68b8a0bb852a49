"""New weights by HTTP, under load: every answer is wholly of one version, and says which."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import multiprocessing
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client import CollectorRegistry
from real_cluster import RealCluster, real_cluster
from real_worker import tiny_config
from safetensors.torch import load_file, save, save_file
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.client import AsyncClient, BroadcastTensors, InvalidRequest, SharedTensors
from eyas.common.cluster.listening import free_ports
from eyas.common.config import EngineConfig, GatewayConfig
from eyas.common.errors import Unavailable
from eyas.common.process_groups import MetGroup
from eyas.common.types import Role
from eyas.common.weights import (
    CheckJoin,
    CloseForWeights,
    CommitWeights,
    FolderSource,
    JoinGroup,
    PrepareWeights,
    Running,
    WeightsCommand,
    WeightsReply,
)
from eyas.common.wire.control_service import ControlClient
from eyas.common.wire.rpc import ChannelPool
from eyas.engine.loop.engine import Engine
from eyas.engine.scheduling.flushes import CacheFlushes
from gateway.http.front import create_app
from gateway.observe.metrics import GatewayMetrics
from gateway.routing.targets import TargetWorkers
from gateway.routing.weights import ClusterWeights
from tests.rpc.real_cluster import SPLIT

BOTH = (Role.PREFILL, Role.DECODE)
LAYOUTS = [
    pytest.param(SPLIT, id="split"),
    pytest.param((BOTH, BOTH), id="two unified", marks=pytest.mark.slow),
]
PROMPTS = [[5 + (7 * i + j) % 200 for j in range(20 + 3 * i)] for i in range(6)]
ORDINARY = (200, 409, 503)
"""Of a request that an update may meet: its answer, that its weights went, that it may try again."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return tiny_config(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def new(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of other weights for the same model."""
    folder = tmp_path_factory.mktemp("new") / "weights"
    shutil.copytree(config.model, folder)
    stored, chance = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, tensor in stored.items():
        stored[name] = tensor + 0.2 * tensor.std() * torch.randn(tensor.shape, generator=chance)
    save_file(stored, folder / "model.safetensors")
    return folder


def body(prompt: Sequence[int], tokens: int = 16) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling}


async def generate(cluster: RealCluster, prompt: Sequence[int]) -> tuple[str, list[int]] | int:
    """The version and the ids; of an answer that is an error its status."""
    response = await cluster.http.post("/generate", json=body(prompt))
    if response.status_code != 200:
        assert response.status_code in ORDINARY, response.text
        return response.status_code
    said = response.json()
    return said["meta_info"]["weight_version"], said["output_ids"]


async def post(cluster: RealCluster, path: str, **fields: Any) -> dict[str, Any]:
    response = await cluster.http.post(path, json=fields, timeout=60)
    said: dict[str, Any] = response.json()
    return said | {"status": response.status_code}


async def alone(config: EngineConfig, folder: Path, name: str) -> dict[tuple[str, int], list[int]]:
    """What each prompt is answered by workers that were started on these weights."""
    async with real_cluster(config, folder, (BOTH,)) as cluster:
        answers = [await generate(cluster, prompt) for prompt in PROMPTS]
    told = {}
    for number, answer in enumerate(answers):
        assert not isinstance(answer, int)
        told[name, number] = answer[1]
    return told


class Load:
    """Requests one after the other in some streams, until `stop`. `seen`: (version, prompt, ids)."""

    def __init__(self, cluster: RealCluster, streams: int = 6) -> None:
        self._cluster = cluster
        self._over = False
        self.seen: list[tuple[str, int, list[int]]] = []
        self.failed: list[int] = []
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(streams)]

    async def _stream(self, number: int) -> None:
        while not self._over:
            answer = await generate(self._cluster, PROMPTS[number])
            if isinstance(answer, int):
                self.failed.append(answer)
            else:
                self.seen.append((answer[0], number, answer[1]))

    async def until(self, version: str) -> None:
        """Waits for two rounds of answers of this version."""
        async with asyncio.timeout(20):
            while sum(seen[0] == version for seen in self.seen) < 2 * len(self._tasks):
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    def judge(self, expected: dict[tuple[str, int], list[int]]) -> set[str]:
        """The versions that were seen; every answer is the one of its version."""
        for version, prompt, ids in self.seen:
            assert ids == expected[version, prompt], f"an answer of {version} is none"
        return {version for version, _, _ in self.seen}


@pytest.mark.parametrize("roles", LAYOUTS)
async def test_every_answer_is_wholly_of_one_version(
    config: EngineConfig, new: Path, tmp_path: Path, roles: tuple[tuple[Role, ...], ...]
) -> None:
    """Back and forth under load, by all ways to treat what runs, without an answer that fails but those that
    are told to.
    """
    expected = await alone(config, tmp_path, "default")
    fresh = await alone(EngineConfig(**{**vars(config), "model": str(new)}), tmp_path, "v1")
    assert [*expected.values()] != [*fresh.values()]
    for number in range(len(PROMPTS)):
        expected["v2", number] = expected["default", number]
        expected["v1", number] = expected["v3", number] = fresh["v1", number]
    async with real_cluster(config, tmp_path, roles) as cluster:
        load = Load(cluster)
        await load.until("default")
        folders = {"v1": str(new), "v2": config.model, "v3": str(new)}
        for version, running in (("v1", "drain"), ("v2", "restart"), ("v3", "abort")):
            failed = len(load.failed)
            said = await post(
                cluster,
                "/update_weights_from_disk",
                model_path=folders[version],
                weight_version=version,
                running=running,
            )
            assert said["success"], said
            assert said["weight_version"] == version
            assert not said["behind"]
            await load.until(version)
            if running == "drain":
                assert len(load.failed) == failed, "all were waited for"
        await load.stop()
        assert load.judge(expected) == {"default", "v1", "v2", "v3"}
        assert (await cluster.http.get("/get_weight_version")).json()["weight_version"] == "v3"
        assert (await cluster.http.get("/model_info")).json()["weight_version"] == "v3"
        text = {"model": "eyas-nano", "prompt": PROMPTS[0], "max_tokens": 2}
        told = (await cluster.http.post("/v1/completions", json=text)).json()
        assert told.get("metadata") == {"weight_version": "v3"}, told


@pytest.mark.slow
async def test_a_worker_that_waits_for_nothing_is_found(
    config: EngineConfig, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power of the test above: weights that change in the middle of answers."""
    expected = await alone(config, tmp_path, "default")
    fresh = await alone(EngineConfig(**{**vars(config), "model": str(new)}), tmp_path, "v1")
    monkeypatch.setattr(Engine, "_work", lambda self: "")
    monkeypatch.setattr(CacheFlushes, "flush", lambda self: 0)
    async with real_cluster(config, tmp_path, (BOTH,)) as cluster:
        load = Load(cluster)
        await load.until("default")
        fields = {"model_path": str(new), "weight_version": "v1"}
        assert (await post(cluster, "/update_weights_from_disk", **fields))["success"]
        await load.until("v1")
        await load.stop()
        with pytest.raises(AssertionError, match="an answer of default is none"):
            load.judge(expected | fresh)


async def test_what_is_wrong_is_named_and_nothing_changes(
    config: EngineConfig, new: Path, tmp_path: Path
) -> None:
    expected = await alone(config, tmp_path, "default")
    stored = load_file(new / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    stored[name][0, 0] = float("inf")
    bad = base64.b64encode(save({name: stored[name]})).decode()
    async with real_cluster(config, tmp_path, SPLIT) as cluster:
        for path, fields, param, text in (
            ("disk", {"model_path": str(tmp_path / "none")}, "model_path", "no folder"),
            ("disk", {}, "model_path", ""),
            ("tensor", {"serialized_named_tensors": ["aaaa"]}, "load_format", "pickled"),
            (
                "tensor",
                {"serialized_named_tensors": [bad], "load_format": "safetensors"},
                "serialized_named_tensors",
                name,
            ),
            (
                "tensor",
                {"serialized_named_tensors": ["/etc/passwd"], "load_format": "shm"},
                "serialized_named_tensors",
                "not in /dev/shm",
            ),
            (
                "distributed",
                {"names": ["a"], "dtypes": ["bfloat16"], "shapes": []},
                "names",
                "of equal length",
            ),
        ):
            said = await post(cluster, f"/update_weights_from_{path}", **fields)
            assert said["status"] == 400, said
            assert said["error"]["param"] == param, said
            assert text in said["error"]["message"], said
        load = Load(cluster)
        await asyncio.sleep(0.3)
        await load.stop()
        assert not load.failed
        assert load.judge(expected) == {"default"}


async def test_tensors_of_a_body_and_what_was_stored(config: EngineConfig, new: Path, tmp_path: Path) -> None:
    """A part of the tensors, twice, makes the whole."""
    fresh = await alone(EngineConfig(**{**vars(config), "model": str(new)}), tmp_path, "2")
    stored = load_file(new / "model.safetensors")
    names = sorted(stored)
    async with real_cluster(config, tmp_path, SPLIT) as cluster:
        for part in (names[: len(names) // 2], names[len(names) // 2 :]):
            file = base64.b64encode(save({name: stored[name] for name in part})).decode()
            fields = {"serialized_named_tensors": [file], "load_format": "safetensors"}
            said = await post(cluster, "/update_weights_from_tensor", **fields)
            assert said["success"], said
        load = Load(cluster)
        await asyncio.sleep(0.3)
        await load.stop()
        assert load.judge(fresh) == {"2"}
        read = (
            await cluster.http.post("/get_weights_by_name", json={"name": names[0], "truncate_size": 7})
        ).json()
        assert read == stored[names[0]].flatten()[:7].tolist()
        missing = await cluster.http.post("/get_weights_by_name", json={"name": "nothing"})
        assert missing.status_code == 404


def train(port: int, size: int, folder: str, names: list[str]) -> None:
    """A trainer: rank 0 of the group, which broadcasts tensors of a folder."""
    group = MetGroup("weights", f"127.0.0.1:{port}", 0, size, "gloo", 30.0)
    stored = load_file(Path(folder) / "model.safetensors")
    for name in names:
        group.broadcast(stored[name])
    group.leave()


@pytest.mark.slow
async def test_the_sdk_has_workers_join_a_group(config: EngineConfig, new: Path, tmp_path: Path) -> None:
    """Tensors are described by themselves; rank 0 broadcasts them while the update waits."""
    stored = dict(sorted(load_file(new / "model.safetensors").items()))
    port = next(free_ports())
    async with real_cluster(config, tmp_path, (BOTH,)) as cluster, AsyncClient(cluster.grpc) as client:
        with pytest.raises(InvalidRequest, match="address is HOST:PORT"):
            await client.join_weights_group("weights", "here", 2)
        with pytest.raises(InvalidRequest, match="backend is one of"):
            await client.join_weights_group("weights", f"127.0.0.1:{port}", 2, backend="mpi")
        arguments = (port, 2, str(new), [*stored])
        trainer = multiprocessing.get_context("spawn").Process(target=train, args=arguments, daemon=True)
        trainer.start()
        joined = await client.join_weights_group("weights", f"127.0.0.1:{port}", 2, backend="gloo")
        assert joined == (cluster.workers[0].address,)
        done = await client.update_weights(BroadcastTensors("weights", stored), version="g", whole=True)
        assert (done.version, done.behind) == ("g", ())
        await client.leave_weights_group("weights")
        trainer.join(10)
        with pytest.raises(InvalidRequest, match="not in the group"):
            await client.update_weights(BroadcastTensors("weights", stored))
        after = await client.generate(PROMPTS[0], max_tokens=4, temperature=0.0, ignore_eos=True)
        assert after.usage.weight_version == "g"


@pytest.mark.slow
async def test_weights_of_a_group(config: EngineConfig, new: Path, tmp_path: Path) -> None:
    """By gloo: a trainer, and each worker that runs the target."""
    fresh = await alone(EngineConfig(**{**vars(config), "model": str(new)}), tmp_path, "g")
    stored = load_file(new / "model.safetensors")
    names, port = sorted(stored), next(free_ports())
    async with real_cluster(config, tmp_path, (BOTH,)) as cluster:
        fields: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port, "backend": "gloo"}
        said = await post(
            cluster,
            "/init_weights_update_group",
            **fields,
            world_size=1 + 1,
            rank_offset=2,
            group_name="weights",
        )
        assert said["error"]["param"] == "world_size"
        arguments = (port, 2, str(new), names)
        trainer = multiprocessing.get_context("spawn").Process(target=train, args=arguments, daemon=True)
        trainer.start()
        said = await post(cluster, "/init_weights_update_group", **fields, world_size=2, group_name="weights")
        assert said["success"], said
        said = await post(
            cluster,
            "/update_weights_from_distributed",
            names=names,
            dtypes=[str(stored[name].dtype) for name in names],
            shapes=[list(stored[name].shape) for name in names],
            group_name="weights",
            weight_version="g",
            whole=True,
        )
        assert said["success"], said
        for number, prompt in enumerate(PROMPTS):
            assert await generate(cluster, prompt) == ("g", fresh["g", number])
        assert (await post(cluster, "/destroy_weights_update_group", group_name="weights"))["success"]
        trainer.join(10)
        body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "weights"}
        said = await post(cluster, "/update_weights_from_distributed", **body)
        assert said["error"]["param"] == "group_name"


async def test_workers_that_are_quiet_stay_closed_until_all_are(
    config: EngineConfig, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill has nothing to do while decode still answers, for longer than a closed worker waits alone."""
    monkeypatch.setattr("gateway.routing.weights.HOLD_S", 0.3)
    async with real_cluster(config, tmp_path, SPLIT) as cluster:
        long = body(PROMPTS[0], 400)
        running = [asyncio.create_task(cluster.http.post("/generate", json=long, timeout=60)) for _ in "abcd"]
        async with asyncio.timeout(20):
            while not any(info.running for info in cluster.cluster.workers()):
                await asyncio.sleep(0.05)
        began = time.monotonic()
        said = await post(cluster, "/update_weights_from_disk", model_path=str(new), weight_version="v1")
        assert time.monotonic() - began > 1.0, "it waited"
        assert said["success"] and not said["behind"], said
        for answer in await asyncio.gather(*running):
            assert answer.status_code == 200
            assert answer.json()["meta_info"]["weight_version"] == "default"


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["closed", "committed"])
async def test_a_gateway_that_dies_in_the_middle(
    config: EngineConfig, new: Path, tmp_path: Path, phase: str
) -> None:
    """Before the first commit workers open again by themselves; after it another gateway has the others
    commit too.
    """
    fresh = await alone(EngineConfig(**{**vars(config), "model": str(new)}), tmp_path, "x")
    expected = await alone(config, tmp_path, "default")
    async with (
        real_cluster(config, tmp_path, (BOTH, BOTH)) as cluster,
        contextlib.AsyncExitStack() as channels,
    ):
        clients = []
        for worker in cluster.workers:
            channel = await channels.enter_async_context(worker.dial(worker.address))
            clients.append(ControlClient(channel))
        prepare = PrepareWeights("x", 1, FolderSource(str(new)), whole=True)
        (digest,) = {(await client.change(prepare, 30.0)).digest for client in clients}
        for client in clients:
            await client.change(CloseForWeights(digest, Running.DRAIN, 5.0, 3.0), 30.0)
        if phase == "committed":
            await clients[0].change(CommitWeights(digest), 30.0)
        load = Load(cluster)
        await load.until("x" if phase == "committed" else "default")
        async with asyncio.timeout(20):
            while any(info.weights.closed or not info.serving for info in cluster.cluster.workers()):
                await asyncio.sleep(0.05)
        await load.stop()
        assert not load.failed
        assert load.judge(expected | fresh) == {"x" if phase == "committed" else "default"}
        assert {info.weights.version for info in cluster.cluster.workers()} == {load.seen[0][0]}


async def test_the_sdk_changes_weights(config: EngineConfig, new: Path, tmp_path: Path) -> None:
    """Of shared memory, whose bytes are compared; an answer says its version."""
    async with real_cluster(config, tmp_path, (BOTH,)) as cluster, AsyncClient(cluster.grpc) as client:
        before = await client.generate(PROMPTS[0], max_tokens=4, temperature=0.0, ignore_eos=True)
        assert before.usage.weight_version == "default"
        with SharedTensors(load_file(new / "model.safetensors")) as shared:
            done = await client.update_weights(shared, version="sdk", whole=True)
            assert (done.version, done.generation, done.behind) == ("sdk", 1, ())
            Path(shared.path).write_bytes(Path(shared.path).read_bytes()[:-1] + b"!")
            with pytest.raises(InvalidRequest, match="not those of its digest"):
                await client.update_weights(shared)
        after = await client.generate(PROMPTS[0], max_tokens=4, temperature=0.0, ignore_eos=True)
        assert after.usage.weight_version == "sdk"
        with pytest.raises(InvalidRequest, match="no folder"):
            await client.update_weights(str(tmp_path / "none"))
        with pytest.raises(InvalidRequest, match="running must be"):
            await client.update_weights("x", running="never")


async def test_no_group_is_joined_where_no_worker_is() -> None:
    async def refresh() -> None: ...

    weights = ClusterWeights(TargetWorkers(list, ChannelPool(), refresh))
    with pytest.raises(Unavailable, match="no worker is known"):
        await weights.join(JoinGroup("g", "127.0.0.1:1", 1, 2, "gloo"))
    with pytest.raises(Unavailable, match="no worker is known"):
        await weights.leave("g")


async def test_no_worker_waits_for_a_group_that_another_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one leave a group of that name which it is in."""
    heard: list[WeightsCommand] = []

    class Client:
        def __init__(self, worker: str) -> None:
            self.worker = worker

        async def change(self, command: WeightsCommand, wait_s: float) -> WeightsReply:
            heard.append(command)
            if self.worker == "b":
                raise InvalidRequest("this worker is in a group 'g' already", param="group_name")
            return WeightsReply()

    async def refresh() -> None: ...

    targets = TargetWorkers(list, ChannelPool(), refresh)
    monkeypatch.setattr(targets, "names", lambda: ["a", "b"])
    weights = ClusterWeights(targets)
    monkeypatch.setattr(weights, "_client", Client)
    with pytest.raises(InvalidRequest, match="1 of 2 workers could join the group, but not b: ") as refused:
        await weights.join(JoinGroup("g", "127.0.0.1:1", 1, 3, "gloo"))
    assert refused.value.param == "group_name"
    assert heard == [CheckJoin("g", "gloo")] * 2


async def test_strangers_may_not_change_weights_nor_pause() -> None:
    """A server without keys takes such words from its own machine."""
    backend, tokenizer = ScriptedBackend(nano_tokenizer()), nano_tokenizer()
    app = create_app(GatewayConfig(grpc_port=0), backend, tokenizer, GatewayMetrics(CollectorRegistry()))
    for host, status in (("10.0.0.7", 403), ("127.0.0.1", 400)):
        transport = httpx.ASGITransport(app, client=(host, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            assert (await http.post("/update_weights_from_disk", json={})).status_code == status
            wrong = {"mode": "gently"}
            assert (await http.post("/pause_generation", json=wrong)).status_code == status
            for path in ("/continue_generation", "/release_memory_occupation", "/resume_memory_occupation"):
                assert (await http.post(path, content="[]")).status_code == status
