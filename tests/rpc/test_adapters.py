"""Adapters of a cluster: loaded on every worker or on none, chosen by name, and the same on every gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeWorker, Traits
from prometheus_client import CollectorRegistry
from scripted_backend import nano_tokenizer
from scripted_cluster import until

from eyas.common.cluster.discovery import registry
from eyas.common.config import AdapterConfig, GatewayConfig
from eyas.common.errors import Busy, ConfigError, ModelNotFound, Unavailable
from eyas.common.page_names import salt_of
from eyas.common.params import SamplingParams
from eyas.common.types import Adapter, AdapterRoster, GenerationRequest, Role, WorkerInfo
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient
from eyas.engine.ipc.adapter_messages import LoadAdapter, UnloadAdapter
from eyas.engine.ipc.messages import SubmitGeneration
from gateway.backends.generate import ClusterBackend
from gateway.http.front import create_app
from gateway.observe.metrics import GatewayMetrics
from gateway.routing.adapters import ClusterAdapters, newest
from gateway.routing.cluster import Cluster
from gateway.routing.targets import TargetWorkers

BOTH = (Role.PREFILL, Role.DECODE)
ASK = {"prompt": [5, 6, 7], "max_tokens": 3}
PATIENCE_S = 20.0


@dataclass
class Rig:
    """Fake engines behind real fronts; gateways of their own before them."""

    folder: Path
    owned: contextlib.AsyncExitStack
    workers: list[FakeWorker] = field(default_factory=list)
    registry: str = ""

    def adapter(self, name: str, content: str = "") -> str:
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "adapter_config.json").write_text(content or name)
        return name

    async def worker(self, roles: tuple[Role, ...], port: int = 0, **changes: Any) -> FakeWorker:
        changes = {"max_loras": 2, "adapters": AdapterConfig(dirs=(str(self.folder),))} | changes
        traits = Traits(epoch=1 + len(self.workers) + 100 * bool(port))  # one that begins again has another
        worker = await FakeWorker(roles, traits, port=port, **changes).start()
        self.workers.append(worker)
        return worker

    async def gateway(self) -> tuple[httpx.AsyncClient, Cluster]:
        """A gateway of all workers."""
        cluster = Cluster(registry("static:" + ",".join(worker.address for worker in self.workers)))
        await cluster.start()
        self.owned.push_async_callback(cluster.aclose)
        decodes = [worker for worker in self.workers if Role.DECODE in worker.front.describe().roles]
        await until(lambda: sum(info.serving for info in cluster.workers()) == len(self.workers))
        await until(lambda: sum(one.connected for one in cluster.candidates()) == len(decodes))
        app = create_app(
            GatewayConfig(grpc_port=0),
            ClusterBackend(cluster),
            nano_tokenizer(),
            GatewayMetrics(CollectorRegistry()),
        )
        transport = httpx.ASGITransport(app)
        client = httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=20)
        return await self.owned.enter_async_context(client), cluster

    def rosters(self) -> list[set[str] | None]:
        """The names that each worker has."""
        infos = [worker.front.describe() for worker in self.workers]
        return [info.adapters and {one.name for one in info.adapters.adapters} for info in infos]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as owned:
        rig = Rig(tmp_path, owned)
        yield rig
        await owned.aclose()
        await asyncio.gather(*(worker.stop() for worker in rig.workers))


async def load(http: httpx.AsyncClient, name: str, path: str | None = None, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path or name} | more
    return await http.post("/v1/load_lora_adapter", json=body)


async def unload(http: httpx.AsyncClient, name: str, **more: Any) -> httpx.Response:
    return await http.post("/v1/unload_lora_adapter", json={"lora_name": name} | more)


async def ask(http: httpx.AsyncClient, name: str, **more: Any) -> httpx.Response:
    return await http.post("/v1/completions", json=ASK | {"model": name} | more)


def named(response: httpx.Response, status: int, param: str) -> str:
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param, response.text
    return str(response.json()["error"]["message"])


async def test_an_adapter_is_loaded_on_every_worker_and_requests_reach_it(rig: Rig) -> None:
    first, second, draft = [await rig.worker(roles) for roles in (BOTH, BOTH, (Role.DRAFT,))]
    http, _ = await rig.gateway()
    rig.adapter("tenant")
    named(await ask(http, "tenant"), 404, "model")
    loaded = await load(http, "tenant")
    assert loaded.status_code == 200, loaded.text
    told = loaded.json()
    id = told["lora_id"]
    assert told["success"] and told["loaded_adapters"] == {"tenant": "tenant"} and len(id) == 16
    assert rig.rosters() == [{"tenant"}, {"tenant"}, None]  # draft workers verify nothing
    answer = await ask(http, "tenant")
    assert answer.status_code == 200 and answer.json()["model"] == "tenant"
    plain = await ask(http, "eyas-nano")
    assert plain.status_code == 200 and plain.json()["model"] == "eyas-nano"
    submits = [*first.engine.of(SubmitGeneration), *second.engine.of(SubmitGeneration)]
    heard = {(submit.request.adapter, submit.request.salt) for submit in submits}
    assert heard == {(id, salt_of("", id)), ("", b"")}
    assert not draft.engine.of(LoadAdapter)
    listed = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
    assert listed.keys() == {"eyas-nano", "tenant"}
    assert "parent" not in listed["eyas-nano"]
    assert (listed["tenant"]["parent"], listed["tenant"]["rank"]) == ("eyas-nano", 8)
    assert (await http.get("/v1/models/tenant")).json() == listed["tenant"]


async def test_what_one_worker_refuses_no_worker_has(rig: Rig) -> None:
    """Here because a folder has other content there: each front reads the files of its own machine."""
    first, second = await rig.worker(BOTH), await rig.worker(BOTH, adapters=AdapterConfig(dirs=("/nowhere",)))
    http, cluster = await rig.gateway()
    rig.adapter("tenant")
    message = named(await load(http, "tenant"), 404, "lora_path")
    assert second.address in message
    assert rig.rosters() == [set(), set()] and not first.engine.adapters
    named(await ask(http, "tenant"), 404, "model")
    assert not cluster.adapters.roster.adapters


async def test_every_gateway_knows_at_once_what_one_of_them_loaded_and_unloaded(rig: Rig) -> None:
    await rig.worker(BOTH)
    (one, _), (other, _) = await rig.gateway(), await rig.gateway()
    rig.adapter("tenant")
    assert (await load(one, "tenant")).status_code == 200
    assert (await ask(other, "tenant")).status_code == 200
    assert (await unload(other, "tenant")).status_code == 200
    named(await ask(other, "tenant"), 404, "model")
    stale = await ask(one, "tenant")  # it does not know yet: the worker does
    assert stale.status_code == 404
    named(await unload(one, "tenant"), 404, "lora_name")


async def test_changes_through_two_gateways_at_once_all_happen(rig: Rig) -> None:
    await rig.worker(BOTH), await rig.worker(BOTH)
    gateways = [(await rig.gateway())[0] for _ in range(2)]
    names = [rig.adapter(f"a{number}") for number in range(6)]
    loads = [load(gateways[number % 2], name) for number, name in enumerate(names)]
    answers = await asyncio.gather(*loads)
    assert [answer.status_code for answer in answers] == [200] * 6, [answer.text for answer in answers]
    assert rig.rosters() == [set(names)] * 2
    answers = await asyncio.gather(*(unload(gateways[n % 2], name) for n, name in enumerate(names[1:])))
    assert [answer.status_code for answer in answers] == [200] * 5, [answer.text for answer in answers]
    await until(lambda: rig.rosters() == [{"a0"}] * 2)


async def test_a_worker_that_comes_later_gets_what_the_others_have(rig: Rig) -> None:
    await rig.worker(BOTH)
    late = await rig.worker(BOTH)
    port = late.port
    http, _ = await rig.gateway()
    rig.adapter("a"), rig.adapter("b")
    assert (await load(http, "a")).status_code == 200
    assert (await load(http, "b", pinned=True)).status_code == 200
    rig.workers.remove(late)
    await late.stop()
    again = await rig.worker(BOTH, port)
    await until(lambda: rig.rosters() == [{"a", "b"}] * 2)
    (pinned,) = [command for command in again.engine.of(LoadAdapter) if command.pinned]
    assert pinned.name == "b" and pinned.id in again.engine.adapters


async def test_a_request_waits_while_no_worker_has_its_adapter_yet(rig: Rig) -> None:
    """The only worker starts again, without what was loaded into it."""
    only = await rig.worker(BOTH)
    port = only.port
    http, _ = await rig.gateway()
    rig.adapter("tenant")
    assert (await load(http, "tenant")).status_code == 200
    rig.workers.remove(only)
    await only.stop()
    asked = asyncio.create_task(ask(http, "tenant", timeout=PATIENCE_S))
    await asyncio.sleep(0.2)
    await rig.worker(BOTH, port)
    assert (await asked).status_code == 200


async def test_a_request_does_not_wait_for_an_adapter_that_is_gone(rig: Rig) -> None:
    """Not even if it was admitted before: nothing else would tell why it waits."""
    await rig.worker(BOTH)
    http, cluster = await rig.gateway()
    rig.adapter("tenant")
    id = (await load(http, "tenant")).json()["lora_id"]
    assert (await unload(http, "tenant")).status_code == 200
    request = GenerationRequest("r", (5, 6), SamplingParams(max_tokens=3), adapter=id)
    async with asyncio.timeout(2.0):
        with pytest.raises(ModelNotFound, match="has been unloaded"):
            await ClusterBackend(cluster).start(request)


async def test_requests_go_to_the_worker_that_has_the_adapter_on_its_device(rig: Rig) -> None:
    first, second = await rig.worker(BOTH), await rig.worker(BOTH)
    http, cluster = await rig.gateway()
    for name in ("a", "b"):
        rig.adapter(name)
        assert (await load(http, name)).status_code == 200
    home = second
    home.engine.adapters -= {cluster.adapters.roster.named("a").id}  # type: ignore[union-attr]
    await until(lambda: len({info.adapter_slots for info in cluster.workers()}) == 2)
    for _ in range(3):
        assert (await ask(http, "b")).status_code == 200
    placed = [len(worker.engine.of(SubmitGeneration)) for worker in (first, second)]
    on_device = [worker.front.describe().adapter_slots for worker in (first, second)]
    id = cluster.adapters.roster.named("b").id  # type: ignore[union-attr]
    assert placed == [3 * (id in slots) for slots in on_device]


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"lora_path": "tenant"}, 400, "lora_name"),
    ({"lora_name": "x"}, 400, "lora_path"),
    ({"lora_name": "", "lora_path": "tenant"}, 400, "lora_name"),
    ({"lora_name": "a b", "lora_path": "tenant"}, 400, "lora_name"),
    ({"lora_name": "a:b", "lora_path": "tenant"}, 400, "lora_name"),
    ({"lora_name": "x" * 257, "lora_path": "tenant"}, 400, "lora_name"),
    ({"lora_name": "eyas-nano", "lora_path": "tenant"}, 400, "lora_name"),
    ({"lora_name": "there", "lora_path": "tenant"}, 400, "lora_name"),
    ({"lora_name": "x", "lora_path": "bad"}, 400, "lora_path"),
    ({"lora_name": "x", "lora_path": "nowhere"}, 404, "lora_path"),
    ({"lora_name": "x", "lora_path": "tenant", "pinned": 1}, 400, "pinned"),
    *(
        ({"lora_name": "x", "lora_path": path}, 403, "lora_path")
        for path in ("/etc", "..", "tenant/../..", "out", "out of it", "head out of it", "a\0b")
    ),
]


async def test_a_bad_load_names_its_field(rig: Rig) -> None:
    await rig.worker(BOTH)
    http, _ = await rig.gateway()
    rig.adapter("tenant"), rig.adapter("bad"), rig.adapter("other")
    (rig.folder / "out").symlink_to("/etc")
    (rig.folder / rig.adapter("out of it") / "adapter_model.safetensors").symlink_to("/etc/passwd")
    (rig.folder / rig.adapter("head out of it") / "draft").symlink_to("/etc")
    assert (await load(http, "there", "other")).status_code == 200
    for body, status, param in BAD:
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            named(await http.post(path, json=body), status, param)
    assert rig.rosters() == [{"there"}]


async def test_an_adapter_can_take_anothers_place_by_its_name(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that has not heard of it still gets the old one's answers, not a refusal."""
    monkeypatch.setattr("eyas.worker.adapters.HEARD_S", 1.0)
    worker = await rig.worker(BOTH)
    (http, cluster), (other, _) = await rig.gateway(), await rig.gateway()
    rig.adapter("one"), rig.adapter("two")
    assert (await load(http, "tenant", "one")).status_code == 200
    old = cluster.adapters.roster.named("tenant")
    assert old is not None and (await ask(other, "tenant")).status_code == 200
    response = await load(http, "tenant", "two", load_inplace=True)
    assert response.status_code == 200
    for gateway in (http, other):
        assert (await ask(gateway, "tenant")).status_code == 200
    asked = [submit.request.adapter for submit in worker.engine.of(SubmitGeneration)]
    assert asked == [old.id, response.json()["lora_id"], old.id]
    await until(lambda: worker.engine.adapters == {response.json()["lora_id"]} != {old.id})
    assert [command.id for command in worker.engine.of(UnloadAdapter)] == [old.id]
    named(await unload(http, "tenant", lora_id=old.id), 400, "lora_id")
    assert (await unload(http, "tenant", lora_id=response.json()["lora_id"])).status_code == 200
    assert not worker.engine.adapters


async def test_one_adapter_may_have_two_names(rig: Rig) -> None:
    worker = await rig.worker(BOTH)
    http, _ = await rig.gateway()
    rig.adapter("one")
    assert (await load(http, "a", "one")).status_code == 200
    assert (await load(http, "b", "one")).status_code == 200
    assert (await unload(http, "a")).status_code == 200
    assert (await ask(http, "b")).status_code == 200 and len(worker.engine.adapters) == 1


async def test_callers_load_nothing_where_no_folder_is_theirs(rig: Rig) -> None:
    """What the server began with is there, and stays."""
    rig.adapter("own")
    own = AdapterConfig(loras=(("own", str(rig.folder / "own")),))
    await rig.worker(BOTH, adapters=own)
    http, _ = await rig.gateway()
    assert (await ask(http, "own")).status_code == 200
    assert "--lora-dir" in named(await load(http, "x", "own"), 403, "lora_path")
    named(await unload(http, "own"), 403, "lora_path")
    assert rig.rosters() == [{"own"}]


async def test_a_server_without_adapters_says_how_to_have_some(rig: Rig) -> None:
    await rig.worker(BOTH, max_loras=0, adapters=AdapterConfig())
    http, _ = await rig.gateway()
    assert "--max-loras" in named(await load(http, "x"), 400, "lora_name")


async def test_a_load_while_workers_sleep_says_what_wakes_them() -> None:
    info = WorkerInfo("w:1", BOTH, 1, "m", "f", "", 64, 64, 8, serving=False, released=("weights",))

    async def refresh() -> None: ...

    adapters = ClusterAdapters(TargetWorkers(lambda: [info], rpc.ChannelPool(), refresh))
    with pytest.raises(Unavailable, match="resume_memory_occupation"):
        await adapters.load(Adapter("a", "/a"), replace=False)
    await adapters.aclose()


async def test_a_worker_does_not_begin_without_an_adapter_of_its_start(rig: Rig) -> None:
    rig.adapter("bad")
    own = AdapterConfig(loras=(("tenant", str(rig.folder / "bad")),))
    worker = FakeWorker(BOTH, max_loras=1, adapters=own)
    starting = asyncio.create_task(worker.start())
    await until(lambda: hasattr(worker, "_running") and worker._running.done())
    with pytest.raises(ConfigError, match="--lora tenant=.*bad: it is bad"):
        worker._running.result()
    starting.cancel()
    await worker.front.stop()


async def test_a_worker_takes_no_roster_that_is_older_than_its_own(rig: Rig) -> None:
    worker = await rig.worker(BOTH)
    rig.adapter("a")
    async with rpc.channel(worker.address) as channel:
        client = InfoClient(channel)
        loaded = await client.load_adapter(Adapter("a", "a"))
        roster = AdapterRoster(3, (loaded,))
        await client.set_adapters(roster)
        await client.set_adapters(roster)  # as another gateway does that saw the same
        for older in (AdapterRoster(2), AdapterRoster(3)):
            with pytest.raises(Busy):
                await client.set_adapters(older)
        assert (await client.info(1.0)).adapters == roster


def test_of_several_rosters_the_newest_counts_and_equals_are_joined() -> None:
    a, b, other = Adapter("a", "/a", "1" * 16), Adapter("b", "/b", "2" * 16), Adapter("a", "/x", "0" * 16)
    assert newest([]) == AdapterRoster()
    assert newest([AdapterRoster(1, (a,)), AdapterRoster(2, (b,))]) == AdapterRoster(2, (b,))
    assert newest([AdapterRoster(2, (a,)), AdapterRoster(2, (b,))]) == AdapterRoster(3, (a, b))
    for order in ((a, other), (other, a)):  # whoever joins them
        assert newest([AdapterRoster(0, (one,)) for one in order]) == AdapterRoster(1, (other,))
    elsewhere = Adapter("a", "/elsewhere", a.id)  # the same content
    assert newest([AdapterRoster(0, (a,)), AdapterRoster(0, (elsewhere,))]).revision == 0
