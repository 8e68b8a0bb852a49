"""Who is in the cluster: a list of addresses, or a Redis into which every worker writes itself.

    static:host:port,...      everybody listed is asked once a second what it is
    redis://host:port/db      every worker keeps a key, its description, alive for as long as it lives

Nobody waits here for an answer to a request: `workers` is the last snapshot, and whatever happens to Redis,
the workers themselves are asked instead. It knows descriptions and addresses; it refuses to know what a
worker is wanted for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

import grpc
import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from eyas.common import rpc
from eyas.common.clients import InfoClient
from eyas.common.errors import ConfigError, EyasError, Unavailable
from eyas.common.types import WorkerInfo

POLL_S = 1.0
FORGET_S = 5.0  # a worker that is only slow to answer stays known this long
RETURN_S = 20.0
"""A worker that was lost counts as returning for this time: `eyas serve` starts a dead one again after 8 s at
most, and a second or two later its front says that it is starting, for as long as its engine loads."""
CANCEL_AGAIN_S = 0.2
TTL_S = 5.0  # of a worker's key in Redis,
REFRESH_S = 1.0  # which it writes again and again
REDIS_S = 1.0  # Redis counts as away when it has not answered within this time
KEY_PREFIX = "eyas:worker:"

_log = logging.getLogger("eyas.discovery")


Wanted = Callable[[WorkerInfo], bool]


def everybody(_: WorkerInfo) -> bool:
    return True


class Registry(Protocol):
    """Where workers are found. `workers` and `returning` answer from the last snapshot and never wait.

    `returning`: who is expected to serve soon: those whose engine loads, and those that were lost less than
    `RETURN_S` ago. They are described as they were known last.
    """

    async def start(self) -> None: ...
    def workers(self) -> Sequence[WorkerInfo]: ...
    def returning(self) -> Sequence[WorkerInfo]: ...
    async def aclose(self) -> None: ...


def registry(spec: str) -> Registry:
    """The registry that `spec` names. Raises ConfigError if it names none."""
    if spec.startswith("redis:"):
        return RedisRegistry(spec)
    kind, _, rest = spec.partition(":")
    addresses = [address.strip() for address in rest.split(",") if address.strip()]
    if kind != "static":
        raise ConfigError(f"registry must start with 'static:' or 'redis://', not {spec!r}", param="registry")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"registry names {address!r}, which is not host:port", param="registry")
    return StaticRegistry(list(dict.fromkeys(addresses)))


# --- what is known ---------------------------------------------------------------------------------------


class _Roster:
    """The `wanted` workers by the address that reaches them, as last heard of; and lines to ask them by."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._known: dict[str, tuple[WorkerInfo, float]] = {}
        self._returning: dict[str, tuple[WorkerInfo, float]] = {}
        self._lines: dict[str, grpc.aio.Channel] = {}

    def workers(self) -> list[WorkerInfo]:
        return [info for info, _ in self._known.values()]

    def returning(self) -> list[WorkerInfo]:
        now = time.monotonic()
        return [info for info, lost_at in self._returning.values() if now - lost_at < RETURN_S]

    def _expect(self, address: str, info: WorkerInfo) -> None:
        now = time.monotonic()
        recent = {a: found for a, found in self._returning.items() if now - found[1] < RETURN_S}
        self._returning = recent | {address: (info, now)}

    def heard(self, address: str, info: WorkerInfo) -> None:
        if info.starting:
            self.lose(address, "it starts again")
            known, _ = self._returning.get(address, (info, 0.0))
            self._expect(address, msgspec.structs.replace(known, roles=info.roles))
            return
        if not self._wanted(info):
            self.lose(address, "it is now another kind of worker")
            return
        if address not in self._known:
            _log.info("worker %s is here: %s", address, ", ".join(info.roles))
        self._known[address] = info, time.monotonic()
        self._returning.pop(address, None)

    def lose(self, address: str, reason: str) -> None:
        if (lost := self._known.pop(address, None)) is not None:
            self._expect(address, lost[0])
            _log.info("worker %s is gone: %s", address, reason)

    async def ask(self, addresses: Iterable[str]) -> None:
        """Have these workers say themselves what they are; within `POLL_S`."""
        await asyncio.gather(*(self._ask(address) for address in addresses))

    async def _ask(self, address: str) -> None:
        if address not in self._lines:
            self._lines[address] = rpc.channel(address)
        try:
            info = await InfoClient(self._lines[address]).info(POLL_S)
        except Unavailable as error:
            self.lose(address, error.message)  # nobody is there
        except EyasError as error:
            _, heard_at = self._known.get(address, (None, 0.0))
            if time.monotonic() - heard_at > FORGET_S:
                self.lose(address, error.message)
        else:
            # The address that reaches it from here, whatever it calls itself.
            self.heard(address, msgspec.structs.replace(info, worker=address))

    async def hang_up(self, but: Collection[str] = ()) -> None:
        """End the lines that were opened to ask, but for those to some addresses."""
        ended = [self._lines.pop(address) for address in list(self._lines) if address not in but]
        await asyncio.gather(*(line.close() for line in ended))


# --- a list of addresses ---------------------------------------------------------------------------------


class StaticRegistry:
    """A fixed list of addresses, each asked once a second what it is. `worker` of an info is its address."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._roster = _Roster(wanted=everybody)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Ask everybody once, then keep asking."""
        await self._roster.ask(self._addresses)
        self._tasks = [_every(POLL_S, partial(self._roster.ask, [address])) for address in self._addresses]

    def workers(self) -> list[WorkerInfo]:
        """In the order of the list."""
        return sorted(self._roster.workers(), key=lambda info: self._addresses.index(info.worker))

    def returning(self) -> list[WorkerInfo]:
        return self._roster.returning()

    async def aclose(self) -> None:
        await _end(self._tasks)
        await self._roster.hang_up()


# --- Redis -----------------------------------------------------------------------------------------------


class RedisRegistry:
    """Whoever is `wanted` and has a key in Redis, read once a second.

    A known worker whose key is missing is asked itself, and stays for as long as it answers: Redis may have
    come back empty. While Redis is away everybody known is asked, also who has died meanwhile, for it may
    return to its address. Raises ConfigError for a bad `url`.
    """

    def __init__(self, url: str, wanted: Wanted = everybody) -> None:
        self._keys = WorkerKeys(url, "going on with the workers that are known")
        self._roster = _Roster(wanted)
        self._snapshot: set[str] = set()  # the addresses known when Redis last answered
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Read once (Redis may be away), then keep reading."""
        await self._look()
        self._tasks = [_every(POLL_S, self._look)]

    def workers(self) -> list[WorkerInfo]:
        return self._roster.workers()

    def returning(self) -> list[WorkerInfo]:
        return self._roster.returning()

    async def aclose(self) -> None:
        await _end(self._tasks)
        await self._roster.hang_up()
        await self._keys.aclose()

    async def _look(self) -> None:
        try:
            records = await self._keys.read()
        except Unavailable:
            await self._roster.ask(self._snapshot)
            return
        for info in records:
            self._roster.heard(info.worker, info)
        missing = self._snapshot - {info.worker for info in records}
        await self._roster.ask(missing)
        await self._roster.hang_up(but=missing)
        self._snapshot = {info.worker for info in self._roster.workers()}


class Presence:
    """A worker's own key, written every second from `start` to `aclose`.

    Raises ConfigError for a bad `url`.
    """

    def __init__(self, url: str, describe: Callable[[], WorkerInfo]) -> None:
        self._keys = WorkerKeys(url, "who looks for workers now will not find this one")
        self._describe = describe
        self._worker = ""  # once it was written
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [_every(REFRESH_S, self._write)]

    async def aclose(self) -> None:
        await _end(self._tasks)
        with contextlib.suppress(Unavailable):  # then the key ends by itself
            if self._worker:
                await self._keys.remove(self._worker)
        await self._keys.aclose()

    async def _write(self) -> None:
        with contextlib.suppress(Unavailable):  # the next time comes soon
            info = self._describe()
            self._worker = info.worker
            await self._keys.write(info)


class WorkerKeys:
    """The workers' keys in one Redis database. Every call ends within `REDIS_S`, or raises Unavailable.

    That Redis went away (and what follows: `meanwhile`) or came back is logged once.
    """

    def __init__(self, url: str, meanwhile: str) -> None:
        """Raises ConfigError unless `url` is redis://[user:password@]host[:port][/db]."""
        self._name = _check(url)
        self._meanwhile = meanwhile
        self._redis = redis.asyncio.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=REDIS_S,
            socket_connect_timeout=REDIS_S,
            retry=Retry(NoBackoff(), 0),  # whoever calls comes again in a second
        )
        self._away = False

    async def write(self, info: WorkerInfo) -> None:
        """This worker lives, for the next `TTL_S` seconds."""
        async with self._reached():
            await self._redis.set(_key(info.worker), msgspec.json.encode(info), px=round(TTL_S * 1000))

    async def remove(self, worker: str) -> None:
        async with self._reached():
            await self._redis.delete(_key(worker))

    async def read(self) -> list[WorkerInfo]:
        """Everybody who has a key. A value that does not describe its key's worker is passed over."""
        async with self._reached():
            keys = sorted({key async for key in self._redis.scan_iter(f"{KEY_PREFIX}*", count=1000)})
            values = await self._redis.mget(keys) if keys else []
        records = ((key, _record(value)) for key, value in zip(keys, values, strict=True))
        return [info for key, info in records if info is not None and key == _key(info.worker)]

    async def aclose(self) -> None:
        await self._redis.aclose()

    @contextlib.asynccontextmanager
    async def _reached(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(REDIS_S):
                yield
        except (RedisError, OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {REDIS_S:g} s"
            if not self._away:
                _log.warning("%s is away (%s): %s", self._name, reason, self._meanwhile)
            self._away = True
            raise Unavailable(f"{self._name} is away: {reason}") from error
        if self._away:
            _log.warning("%s is back", self._name)
        self._away = False


def _check(url: str) -> str:
    """How to name the Redis at `url`, without its password. Raises ConfigError for another kind of URL."""
    shape = "registry must be redis://host:port/db"
    try:
        parts = urlsplit(url)
        port, db = parts.port or 6379, parts.path.strip("/") or "0"
    except ValueError as error:
        raise ConfigError(f"{shape}: {error}", param="registry") from error
    if parts.scheme != "redis" or not parts.hostname or not db.isdigit() or parts.query or parts.fragment:
        raise ConfigError(shape, param="registry")
    return f"redis {parts.hostname}:{port}/{db}"


def _key(worker: str) -> bytes:
    return f"{KEY_PREFIX}{worker}".encode()


def _record(value: bytes | str | None) -> WorkerInfo | None:
    """What a key says; None if it ended meanwhile, or was written by something else."""
    try:
        return None if value is None else msgspec.json.decode(value, type=WorkerInfo)
    except msgspec.DecodeError:
        return None


def _every(pause_s: float, step: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """Takes the step again and again, for as long as the task is wanted: a defect costs one turn."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                await step()
            except Exception:
                _log.exception("discovery failed, and goes on")

    return asyncio.create_task(repeat(), name="discovery")


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel until it is heard: the Redis client loses a cancel that meets a breaking connection."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
