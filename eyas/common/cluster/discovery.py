"""Finds the workers of a cluster: by a list of addresses, or a Redis into which every worker writes its own.

    static:host:port,...      the addresses of all workers
    redis://host:port/db      every worker keeps a key, named after its cluster and address, while it lives
    rediss://host:port/db     the same, and Redis is reached by TLS

Either way only addresses are taken from there: each address is asked once a second what it is, and a worker
counts once it has answered. No request ever waits here: `workers` is the last snapshot. While Redis is away,
the known addresses are still asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from eyas.common.cluster.names import CLUSTER, SCHEMES, checked_cluster, is_address, is_redis, listed
from eyas.common.cluster.roster import POLL_S, WorkerRoster
from eyas.common.errors import ConfigError, Unavailable
from eyas.common.logging import OutageLog
from eyas.common.security.tls import client_context
from eyas.common.types import WorkerInfo
from eyas.common.wire import rpc

CANCEL_AGAIN_S = 0.2
TTL_S = 5.0  # of a worker's key in Redis
REFRESH_S = 1.0  # from one write of that key to the next
REDIS_S = 1.0  # Redis counts as away when it has not answered within this time
MAX_KEYS = 1024  # the most addresses taken from Redis

_log = logging.getLogger("eyas.discovery")


class WorkerRegistry(Protocol):
    """The registry of workers. All but `start` and `aclose` answer from the last snapshot and never wait."""

    async def start(self) -> None:
        """Asks every address once, then keeps asking until `aclose`."""
        ...

    def workers(self) -> Sequence[WorkerInfo]:
        """The workers that answer and have loaded; `worker` is the address that reaches one from here."""
        ...

    def returning(self) -> Sequence[WorkerInfo]:
        """The workers expected to serve soon, as last known: loading ones, and those just lost."""
        ...

    def find(self, name: str) -> str | None:
        """The address of the worker that calls itself `name`, as its handles do."""
        ...

    def silent(self) -> Mapping[str, str]:
        """The addresses where no worker answered, and why."""
        ...

    def trouble(self) -> str:
        """Why it hears of no new workers, as a sentence; "": it does."""
        ...

    async def refresh(self) -> None:
        """Asks every known address now: what is said of workers from here on is no older."""
        ...

    async def aclose(self) -> None:
        """Stops asking and closes all connections."""
        ...


def registry(
    spec: str, dial: rpc.Dial = rpc.channel, ca: str | None = None, cluster: str = CLUSTER
) -> WorkerRegistry:
    """The registry that `spec` names; `dial` reaches the workers. Raises ConfigError if it names none.

    `ca`: a file of authorities for Redis' certificate; None: the system's. `cluster`: of those that share a
    Redis database, the one whose workers these are.
    """
    if is_redis(spec):
        return RedisRegistry(spec, dial, ca, cluster)
    if ca is not None:
        raise _no_tls()
    if cluster != CLUSTER:
        raise ConfigError("--cluster goes with a registry redis:// or rediss://", param="cluster")
    return StaticRegistry(listed(spec), dial)


# --- a list of addresses ---------------------------------------------------------------------------------


class StaticRegistry(WorkerRegistry):
    """A fixed list of addresses. A worker may be listed by another address than its own name."""

    def __init__(self, addresses: Sequence[str], dial: rpc.Dial) -> None:
        self._addresses = addresses
        self._roster = WorkerRoster(aliases=True, dial=dial)

    async def start(self) -> None:
        await self._roster.follow(self._addresses)

    def workers(self) -> list[WorkerInfo]:
        """Returns the workers, in the order of the list."""
        return sorted(self._roster.workers(), key=lambda info: self._addresses.index(info.worker))

    def find(self, name: str) -> str | None:
        return self._roster.find(name)

    def silent(self) -> Mapping[str, str]:
        return self._roster.silent()

    def trouble(self) -> str:
        return ""

    def returning(self) -> list[WorkerInfo]:
        return self._roster.returning()

    async def refresh(self) -> None:
        await self._roster.refresh()

    async def aclose(self) -> None:
        await self._roster.aclose()


# --- Redis -----------------------------------------------------------------------------------------------


class RedisRegistry(WorkerRegistry):
    """The workers that answer at addresses with a key in Redis; the keys are read once a second.

    A known worker whose key is missing stays while it answers: Redis may have come back empty. While Redis is
    away all known addresses are asked, those of lost workers too, for they may return. Raises ConfigError for
    a bad `url`.
    """

    def __init__(self, url: str, dial: rpc.Dial, ca: str | None, cluster: str = CLUSTER) -> None:
        self._keys = WorkerKeys(url, "going on with the workers that are known", ca, cluster)
        self._roster = WorkerRoster(aliases=False, dial=dial)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Reads the keys once (Redis may be away), then every second."""
        await self._look()
        self._tasks = [_every(POLL_S, self._look)]

    def workers(self) -> list[WorkerInfo]:
        return self._roster.workers()

    def find(self, name: str) -> str | None:
        return self._roster.find(name)

    def silent(self) -> Mapping[str, str]:
        return self._roster.silent()

    def trouble(self) -> str:
        return self._keys.trouble

    def returning(self) -> list[WorkerInfo]:
        return self._roster.returning()

    async def refresh(self) -> None:
        await self._roster.refresh()

    async def aclose(self) -> None:
        await _end(self._tasks)
        await self._roster.aclose()
        await self._keys.aclose()

    async def _look(self) -> None:
        with contextlib.suppress(Unavailable):
            addresses = await self._keys.read()
            await self._roster.follow(addresses | self._roster.known)


class WorkerPresence:
    """A worker's own key, written every second from `start` to `aclose`.

    Raises ConfigError for a bad `url`.
    """

    def __init__(
        self,
        url: str,
        describe: Callable[[], WorkerInfo],
        ca: str | None = None,
        cluster: str = CLUSTER,
    ) -> None:
        self._keys = WorkerKeys(url, "processes that start now will not find this worker", ca, cluster)
        self._describe = describe
        self._worker = ""  # whose key was written
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Writes the key every second until `aclose`."""
        self._tasks = [_every(REFRESH_S, self._write)]

    async def aclose(self) -> None:
        """Stops writing and removes the key."""
        await _end(self._tasks)
        with contextlib.suppress(Unavailable):  # then the key expires by itself
            if self._worker:
                await self._keys.remove(self._worker)
        await self._keys.aclose()

    async def _write(self) -> None:
        with contextlib.suppress(Unavailable):  # the next try comes soon
            info = self._describe()
            self._worker = info.worker
            await self._keys.write(info)


class WorkerKeys:
    """A cluster's workers' keys in a Redis database. Every call ends within `REDIS_S`, or raises Unavailable.

    The log says when Redis goes away, with `meanwhile`: what follows from it, and when it is back.
    `trouble`: that it is away, and since when, as a sentence; "": it is not.
    """

    def __init__(self, url: str, meanwhile: str, ca: str | None = None, cluster: str = CLUSTER) -> None:
        """Raises ConfigError unless `url` is redis[s]://[user:password@]host[:port][/db], and for a `cluster`
        that is no name.

        `ca`: a file of authorities for the certificate that Redis shows by TLS; None: the system's.
        """
        self._name = _check(url)
        self._prefix = f"{checked_cluster(cluster)}:worker:"
        self._meanwhile = meanwhile
        self._redis = redis.asyncio.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=REDIS_S,
            socket_connect_timeout=REDIS_S,
            retry=Retry(NoBackoff(), 0),  # the caller tries again in a second
            **_tls(url, ca),
        )
        self._outage = OutageLog(_log)
        self.trouble = ""
        self._ignoring = False  # some keys are ignored, which is in the log

    async def write(self, info: WorkerInfo) -> None:
        """Writes the worker's key; it expires after `TTL_S`."""
        async with self._reached():
            await self._redis.set(self._key(info.worker), msgspec.json.encode(info), px=round(TTL_S * 1000))

    async def remove(self, worker: str) -> None:
        """Removes the worker's key."""
        async with self._reached():
            await self._redis.delete(self._key(worker))

    async def read(self) -> set[str]:
        """The addresses that have a key, at most `MAX_KEYS`. A key's value is not read: it is for people."""
        async with self._reached():
            keys = {key async for key in self._redis.scan_iter(f"{self._prefix}*", count=1000)}
        names = sorted(key.decode(errors="replace").removeprefix(self._prefix) for key in keys)
        addresses = [name for name in names if is_address(name)][:MAX_KEYS]
        self._log_ignored(len(names) - len(addresses))
        return set(addresses)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()

    def _key(self, worker: str) -> bytes:
        return f"{self._prefix}{worker}".encode()

    @contextlib.asynccontextmanager
    async def _reached(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(REDIS_S):
                yield
        except (RedisError, OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {REDIS_S:g} s"
            self._outage.failed("%s is away (%s): %s", self._name, reason, self._meanwhile)
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._outage.since))
            self.trouble = f"{self._name} has been unreachable since {since}: {reason}"
            raise Unavailable(f"{self._name} is away: {reason}") from error
        self._outage.works("%s is back", self._name)
        self.trouble = ""

    def _log_ignored(self, count: int) -> None:
        """Logged once, until there are none."""
        if count and not self._ignoring:
            reason = "they name no address, or are too many"
            _log.warning("%s: %d keys %s* are ignored: %s", self._name, count, self._prefix, reason)
        self._ignoring = count > 0


def _check(url: str) -> str:
    """How to name the Redis at `url`, without its password. Raises ConfigError for another kind of URL."""
    shape = "registry must be redis://host:port/db or rediss://host:port/db"
    try:
        parts = urlsplit(url)
        port, db = parts.port or 6379, parts.path.strip("/") or "0"
    except ValueError as error:
        raise ConfigError(f"{shape}: {error}", param="registry") from error
    if parts.scheme not in SCHEMES or not parts.hostname or not db.isdigit() or parts.query or parts.fragment:
        raise ConfigError(shape, param="registry")
    return f"{parts.scheme} {parts.hostname}:{port}/{db}"


def _tls(url: str, ca: str | None) -> dict[str, Any]:
    """How the library is to check Redis' certificate: it must be valid for the host of the URL."""
    if not url.startswith("rediss:"):
        if ca is not None:
            raise _no_tls()
        return {}
    client_context(ca, "registry-ca")  # the library would only say so when it connects
    least = ssl.TLSVersion.TLSv1_2
    return {"ssl_ca_certs": ca, "ssl_check_hostname": True, "ssl_min_version": least}


def _no_tls() -> ConfigError:
    return ConfigError("--registry-ca goes with a registry rediss://host:port/db", param="registry-ca")


def _every(pause_s: float, step: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """A task that takes the step every `pause_s` until it is cancelled; a step that raises is logged."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                await step()
            except Exception:
                _log.exception("discovery failed, and goes on")

    return asyncio.create_task(repeat(), name="discovery")


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels until all have ended: the Redis client loses a cancel during a breaking connection."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
