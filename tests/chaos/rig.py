"""A cluster to be tormented: two workers of every kind, its own gateway, and another one in this process.

The inner gateway is there to be watched: it tells in which phase a request is, the moment its gateway learns
it. Knows processes, addresses and load; whom to strike and what to ask is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from eyas.client import AsyncClient
from eyas.cluster.serve import LocalCluster as Processes
from eyas.common.cluster.discovery import registry
from eyas.common.cluster.listening import free_ports
from eyas.common.config import EngineConfig, GatewayConfig, ServeConfig
from eyas.common.errors import EyasError
from eyas.common.types import GenerationRequest, Role, TokenEntry, WorkerInfo
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient
from eyas.common.wire.message import PrefillDone, PrefillStarted, RequestAdmitted
from gateway.backends.generate import ClusterGeneration
from gateway.backends.legs import DecodeLeg, LegEvent, PrefillLeg
from gateway.routing import router
from gateway.routing.cluster import Cluster
from gateway.routing.layouts import RequestLayout, StaticLayout
from tests.chaos.faults import Fault, Phase, each_worker, engines, schedule
from tests.chaos.restless import Restless

WORKERS = 2  # of each kind, as long as no other number is given
# Small chunks and few pages: prompts take several steps, caches overflow, and so pages have to move. Few
# places: with 32 streams the queues of two workers are nearly full, and one by itself has no place for all.
ENGINE = EngineConfig(num_pages=320, chunk_tokens=32, max_running=6, max_waiting=12)
DEEP = 6  # output index from which on a request counts as decoding
INFO_S = 2.0
ANSWER_S = 120.0  # an answer, at most
HEAVY_S = 3600.0  # one to a heavy prompt, which waits long in queues, and may
MEET_S = 20.0  # until the inner gateway has its sessions

EVERYTHING = "worker"  # the kind of a worker that has all roles
UNSPLIT = (Phase.IDLE, Phase.SUBMITTED, Phase.DECODING)  # phases of requests that one worker answers


@dataclasses.dataclass(frozen=True)
class Site:
    """What kind of cluster it is, and what follows from that for a campaign. `each`: workers of a kind.

    `heavy`: its prompts are long.
    """

    config: ServeConfig
    each: int = WORKERS
    heavy: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of workers without their numbers."""
        if self.config.layout != "split":
            return (EVERYTHING,)
        drafts = self.config.engine.draft is not None and self.exact  # a GPU drafts where it decodes
        return (Role.PREFILL, Role.DECODE, *([Role.DRAFT] if drafts else []))

    @property
    def exact(self) -> bool:
        """Whether an answer is the same in every batch; on a GPU, near-ties fall either way."""
        return self.config.engine.device == "cpu"

    @property
    def answer_s(self) -> float:
        """A stream that takes longer has failed."""
        return HEAVY_S if self.heavy else ANSWER_S

    def faults(self, seed: int) -> Iterator[Fault]:
        """Without end: of all kinds in all phases, or for smaller clusters those that name each worker."""
        if self.kinds == tuple(Role):
            return schedule(seed, self.each)
        travel = self.config.layout in ("split", "auto")
        return each_worker(seed, self.kinds, self.each, list(Phase) if travel else UNSPLIT)


ON_CPU = Site(ServeConfig(GatewayConfig(), ENGINE, "split", WORKERS, WORKERS, WORKERS))

Saw = Callable[[Phase, set[str]], None]  # a request is in this phase, served by workers at these addresses


class Watched(ClusterGeneration):
    """A request that tells which phase it enters."""

    def __init__(self, cluster: Cluster, request: GenerationRequest, layout: RequestLayout, saw: Saw) -> None:
        super().__init__(cluster, request, layout)
        self._saw = saw

    def _start_decode(self, worker: str, attach: bool) -> int:
        missing = super()._start_decode(worker, attach)
        self._saw(Phase.SUBMITTED, {worker})
        return missing

    def _start_prefill(self, worker: str) -> int:
        missing = super()._start_prefill(worker)
        self._saw(Phase.SUBMITTED, {worker})
        return missing

    def on_event(self, leg: DecodeLeg | PrefillLeg, event: LegEvent) -> None:
        super().on_event(leg, event)
        phases = {
            RequestAdmitted: Phase.PREFILLING,
            PrefillStarted: Phase.STARTED,
            PrefillDone: Phase.TRANSFER,
        }
        if isinstance(leg, PrefillLeg) and type(event) in phases:
            self._saw(phases[type(event)], self._workers())

    def on_entry(self, leg: DecodeLeg, entry: TokenEntry) -> None:
        super().on_entry(leg, entry)
        if entry.index >= DEEP:
            self._saw(Phase.DECODING, self._workers())

    @property
    def attempts(self) -> int:
        return self._attempt

    def _workers(self) -> set[str]:
        return {leg.worker for leg in (self._prefill, self._decode) if leg is not None}


@dataclasses.dataclass
class Rig:
    """`each`: workers of a kind. `saw` is told of every phase of every request of the inner gateway.
    `pages`: the ports of the workers' metrics, by name.
    """

    processes: Processes
    gateway: Cluster
    client: AsyncClient  # of the outer gateway
    layout: RequestLayout  # of the inner gateway
    saw: Saw
    each: int
    pages: Mapping[str, int]

    async def start(self, request: GenerationRequest) -> Watched:
        """Admitted by the inner gateway. The caller closes it."""
        generation = Watched(self.gateway, request, self.layout, lambda *seen: self.saw(*seen))
        await generation.admit()
        return generation

    async def infos(self) -> dict[str, WorkerInfo | None]:
        """What each worker says of itself; None: nothing."""
        addresses = self.processes.addresses
        infos = await asyncio.gather(*map(_info, addresses.values()))
        return dict(zip(addresses, infos, strict=True))

    async def whole(self, kind: str) -> bool:
        """Whether all workers of a kind can serve, and the inner gateway knows it."""
        roles = (Role.PREFILL, Role.DECODE) if kind == EVERYTHING else (Role(kind),)
        able = [one for one in self.gateway.candidates() if all(one.can(role) for role in roles)]
        if len(able) < self.each or Role.DECODE in roles and not all(one.connected for one in able):
            return False
        infos = await self.infos()
        return all(info is not None and info.serving for name, info in infos.items() if name.startswith(kind))

    async def leftovers(self) -> list[str]:
        """A line for everything that an idle cluster should not hold."""
        lines = []
        for name, info in (await self.infos()).items():
            if info is None or not info.serving:
                lines.append(f"{name} does not serve")
            elif info.running or info.waiting or info.pages_used:
                held = f"{info.running} running, {info.waiting} waiting, {info.pages_used} pages"
                lines.append(f"{name}: {held}")
            elif states := await self._metric(name, "eyas_state_slots_used"):
                lines.append(f"{name}: {states:g} slots of states")
        alive = {pid for front in self.processes.pids.values() for pid in engines(front)}
        for path in self.pool_files():
            if int(path.name.split("-")[1]) not in alive:
                lines.append(f"{path.name} belongs to no process")
        return lines

    async def tiers(self) -> dict[str, float]:
        """What pages behind the pools gave, and failed, since the workers that serve were started."""
        totals = {
            name: f"eyas_{name}_total" for name in ("host_cache_tokens", "store_tokens", "store_failures")
        }
        workers = [name for name, info in (await self.infos()).items() if info is not None and info.serving]
        return {
            name: sum([await self._metric(worker, metric) for worker in workers])
            for name, metric in totals.items()
        }

    async def _metric(self, worker: str, metric: str) -> float:
        return await asyncio.to_thread(_read_metric, self.pages[worker], metric)

    def pool_files(self) -> list[Path]:
        return list(self.processes.pool_folder.glob("*"))


async def _info(address: str) -> WorkerInfo | None:
    async with rpc.channel(address) as channel:
        try:
            return await InfoClient(channel).info(INFO_S)
        except EyasError:
            return None


def _read_metric(port: int, metric: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=INFO_S) as page:
        found = re.search(rf"^{metric}(?:{{.*}})? (.+)$", page.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


@contextlib.asynccontextmanager
async def rig(lease_s: float, log: Callable[[str, str], None], site: Site = ON_CPU) -> AsyncIterator[Rig]:
    """A cluster from ready to gone; `log` gets (process, line) for all that its processes say."""
    ports = free_ports()
    outer = dataclasses.replace(site.config.gateway, port=next(ports), grpc_port=next(ports))
    engine = dataclasses.replace(site.config.engine, lease_s=lease_s)
    config = dataclasses.replace(site.config, gateway=outer, engine=engine)
    pages: dict[str, int] = {}

    def heard(name: str, line: str) -> None:
        if found := re.search(r" metrics-port=(\d+) ", line):
            pages[name] = int(found[1])
        log(name, line)

    async with Processes(config, heard) as processes, AsyncClient(processes.grpc_address) as client:
        gateway = Cluster(registry("static:" + ",".join(processes.addresses.values())))
        await gateway.start()
        try:
            async with asyncio.timeout(MEET_S):
                while router.route(gateway.candidates()) is None:
                    await asyncio.sleep(0.05)
            async with _layout(site, gateway) as layout:
                yield Rig(processes, gateway, client, layout, lambda phase, workers: None, site.each, pages)
        finally:
            await gateway.aclose()


@contextlib.asynccontextmanager
async def _layout(site: Site, gateway: Cluster) -> AsyncIterator[RequestLayout]:
    """By roles, or for `auto` by preferences that change all the time."""
    if site.config.layout != "auto":
        yield StaticLayout()
        return
    restless = Restless(gateway.candidates)
    turning = asyncio.create_task(restless.run())
    try:
        yield restless
    finally:
        turning.cancel()
