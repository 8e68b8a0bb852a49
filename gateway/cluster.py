"""The workers behind this gateway: who they are, how loaded, and the open lines to them.

It knows discovery and owns channels and sessions. It refuses to know requests: who goes where is
`router`'s decision, what happens then is `generate`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import grpc
import msgspec

from eyas.common import rpc
from eyas.common.clients import DecodeSessionClient, InfoClient, PrefillClient
from eyas.common.errors import ConfigError, EyasError, Unavailable
from eyas.common.types import Role, WorkerInfo
from gateway.router import Candidate
from gateway.sessions import Session

POLL_S = 1.0
FORGET_S = 5.0  # a worker that is only slow to answer stays known this long

_log = logging.getLogger("eyas.gateway")


class Lines:
    """One channel per worker, shared by everything this gateway says to it."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def to(self, worker: str) -> grpc.aio.Channel:
        if worker not in self._channels:
            self._channels[worker] = rpc.channel(worker)
        return self._channels[worker]

    async def aclose(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))


class Registry(Protocol):
    """Where workers are found. `workers` answers from the last snapshot and never waits."""

    async def start(self) -> None: ...
    def workers(self) -> Sequence[WorkerInfo]: ...
    async def aclose(self) -> None: ...


class StaticRegistry:
    """A fixed list of addresses, each asked once a second what it is. `worker` of an info is its address."""

    def __init__(self, addresses: Sequence[str], lines: Lines) -> None:
        self._clients = {address: InfoClient(lines.to(address)) for address in addresses}
        self._known: dict[str, tuple[WorkerInfo, float]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Ask everybody once, then keep asking."""
        await asyncio.gather(*(self._ask(address) for address in self._clients))
        self._tasks = [asyncio.create_task(self._poll(address)) for address in self._clients]

    def workers(self) -> list[WorkerInfo]:
        oldest = time.monotonic() - FORGET_S
        return [self._known[a][0] for a in self._clients if a in self._known and self._known[a][1] > oldest]

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _poll(self, address: str) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._ask(address)

    async def _ask(self, address: str) -> None:
        try:
            info = await self._clients[address].info(POLL_S)
        except Unavailable:
            self._known.pop(address, None)  # nobody is there
        except EyasError as error:
            _log.debug("worker %s does not say what it is: %s", address, error)
        else:
            # The address that reaches it from here, whatever it calls itself.
            self._known[address] = msgspec.structs.replace(info, worker=address), time.monotonic()


def registry(spec: str, lines: Lines) -> Registry:
    """The registry of `static:host:port,host:port`. Raises ConfigError for anything else."""
    kind, _, rest = spec.partition(":")
    addresses = [address.strip() for address in rest.split(",") if address.strip()]
    if kind != "static":
        raise ConfigError(f"registry must start with 'static:', not {spec!r}", param="registry")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"registry names {address!r}, which is not host:port", param="registry")
    return StaticRegistry(list(dict.fromkeys(addresses)), lines)


class Cluster:
    """What the gateway routes to: workers of one model, a session per decode worker, requests in flight.

    The first target worker seen fixes the model; workers with another fingerprint are left alone.
    """

    def __init__(self, registry: Registry, lines: Lines) -> None:
        self._registry = registry
        self._lines = lines
        self._sessions: dict[str, Session] = {}
        self._in_flight: Counter[str] = Counter()
        self._fingerprint = ""
        self._strangers: set[tuple[str, str]] = set()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._registry.start()
        self._open_sessions()
        self._task = asyncio.create_task(self._follow(), name="cluster")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(session.aclose() for session in self._sessions.values()))
        await self._registry.aclose()
        await self._lines.aclose()

    def workers(self) -> list[WorkerInfo]:
        """Everybody who may be routed to, from the last snapshot."""
        return [info for info in self._registry.workers() if self._is_ours(info)]

    def candidates(self) -> list[Candidate]:
        """The router's view of `workers`."""
        return [
            Candidate(info, self._in_flight[info.worker], self._connected(info.worker))
            for info in self.workers()
        ]

    def session(self, worker: str) -> Session:
        return self._sessions[worker]

    def prefill_client(self, worker: str) -> PrefillClient:
        return PrefillClient(self._lines.to(worker))

    def occupy(self, worker: str) -> None:
        """A leg of a request starts on `worker`; `vacate` when it has ended."""
        self._in_flight[worker] += 1

    def vacate(self, worker: str) -> None:
        self._in_flight[worker] -= 1

    def _connected(self, worker: str) -> bool:
        return worker in self._sessions and self._sessions[worker].connected

    def _is_ours(self, info: WorkerInfo) -> bool:
        if not {Role.PREFILL, Role.DECODE} & set(info.roles):
            return True
        self._fingerprint = self._fingerprint or info.fingerprint
        if info.fingerprint == self._fingerprint:
            return True
        stranger = (info.worker, info.fingerprint)
        if stranger not in self._strangers:
            self._strangers.add(stranger)
            _log.warning("worker %s serves another model (%s): it gets no requests", info.worker, info.model)
        return False

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_S / 4)
            self._open_sessions()

    def _open_sessions(self) -> None:
        """A session once opened is kept: it reconnects by itself when its worker returns."""
        for info in self.workers():
            if Role.DECODE in info.roles and info.worker not in self._sessions:
                session = Session(DecodeSessionClient(self._lines.to(info.worker), info.worker), info.worker)
                self._sessions[info.worker] = session
                session.start()
