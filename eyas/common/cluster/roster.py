"""The workers at some addresses: each address is asked once a second what it is, or more often while the
worker there loads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from eyas.common.errors import Unavailable
from eyas.common.types import WorkerInfo
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient

POLL_S = 1.0
LOADING_POLL_S = 0.1
FORGET_S = 5.0  # a worker that is slow to answer stays known this long
COMPLAIN_S = 30.0  # an address where no worker has answered for this time is logged
RETURN_S = 20.0
"""A worker that was lost, or stalls, counts as returning for this time: `eyas serve` starts a dead one again
after 8 s at most, and a second or two later its front says that it is starting, for as long as its engine
loads."""

_log = logging.getLogger("eyas.discovery")


@dataclass(frozen=True)
class _KnownWorker:
    """A worker that answers."""

    info: WorkerInfo
    name: str  # the address by which it calls itself
    heard_at: float  # monotonic seconds


@dataclass
class _SilentAddress:
    """An address where no worker answers: since when (monotonic seconds), why, whether that is logged, and
    whether the worker there loads its engine.
    """

    since: float
    reason: str = ""
    logged: bool = False
    loads: bool = False


class WorkerRoster:
    """The workers that answer at some addresses, each asked in turn what it is.

    `aliases`: whether a worker's own address may differ from the one that it is asked at.
    """

    def __init__(self, *, aliases: bool, dial: rpc.Dial = rpc.channel) -> None:
        self._aliases = aliases
        self._dial = dial
        self._known: dict[str, _KnownWorker] = {}  # by address
        self._silent: dict[str, _SilentAddress] = {}  # by address
        self._returning: dict[str, tuple[WorkerInfo, float]] = {}  # by address, and since when
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._clients: dict[str, InfoClient] = {}  # of those that are asked
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def known(self) -> set[str]:
        """The addresses where a worker answers."""
        return set(self._known)

    def workers(self) -> list[WorkerInfo]:
        """The workers that answer and have loaded."""
        return [known.info for known in self._known.values()]

    def returning(self) -> list[WorkerInfo]:
        """The workers that are starting, and those lost or stalled within `RETURN_S`, as last known."""
        now = time.monotonic()
        return [info for info, known_at in self._returning.values() if now - known_at < RETURN_S]

    def find(self, name: str) -> str | None:
        """The address where a worker that calls itself `name` answers."""
        return next((address for address, known in self._known.items() if known.name == name), None)

    def silent(self) -> dict[str, str]:
        """The addresses where no worker answers, and why."""
        return {address: silence.reason for address, silence in self._silent.items()}

    async def follow(self, addresses: Collection[str]) -> None:
        """Asks these addresses and no others; new ones have been asked once when this returns."""
        for address in self._asking.keys() - set(addresses):
            self._end(address)
        events = []
        for address in set(addresses) - self._asking.keys():
            events.append(first := asyncio.Event())
            self._asking[address] = asyncio.create_task(self._keep_asking(address, first))
        await asyncio.gather(*(first.wait() for first in events))

    async def refresh(self) -> None:
        """Asks all of them now, whatever their turn is."""
        await asyncio.gather(*(self._ask(client, address) for address, client in self._clients.items()))

    async def aclose(self) -> None:
        """Stops asking and closes all connections."""
        await self.follow(())
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _end(self, address: str) -> None:
        self._known.pop(address, None)
        self._silent.pop(address, None)
        self._clients.pop(address, None)
        task = self._asking.pop(address)
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _keep_asking(self, address: str, first: asyncio.Event) -> None:
        async with self._dial(address) as channel:
            client = self._clients[address] = InfoClient(channel)
            while True:
                await self._ask(client, address)
                first.set()
                silence = self._silent.get(address)
                await asyncio.sleep(LOADING_POLL_S if silence is not None and silence.loads else POLL_S)

    async def _ask(self, client: InfoClient, address: str) -> None:
        known = self._known.get(address)
        try:
            info = await client.info(POLL_S, known.info.epoch if known else 0)
        except Exception as caught:
            error = rpc.as_eyas(caught, f"asking worker {address}")
            slow = known is not None and time.monotonic() - known.heard_at <= FORGET_S
            if isinstance(error, Unavailable) or not slow:
                self._miss(address, error.message)
            return
        if known is not None and known.info.epoch == info.epoch:
            info = msgspec.structs.replace(info, rates=known.info.rates)
        if info.worker == address or self._aliases:
            self._hear(address, info)
        else:
            self._miss(address, f"the worker there is {info.worker}")

    def _hear(self, address: str, info: WorkerInfo) -> None:
        here = msgspec.structs.replace(info, worker=address)
        if info.starting:
            self._starts(address, here)
            return
        known = self._known.get(address)
        if known is None:
            _log.info("worker %s is here: %s", address, ", ".join(info.roles))
        self._silent.pop(address, None)
        if not info.stalled:
            self._returning.pop(address, None)
        elif known is None or not known.info.stalled:
            self._expect(address, here)
        self._known[address] = _KnownWorker(here, info.worker, time.monotonic())

    def _starts(self, address: str, here: WorkerInfo) -> None:
        """Handles a worker whose front answers and whose engine loads."""
        if (known := self._known.pop(address, None)) is not None:
            _log.info("worker %s is gone: it starts again", address)
        last = self._returning.get(address, (here, 0.0))[0] if known is None else known.info
        self._expect(address, msgspec.structs.replace(last, roles=here.roles))
        self._silent[address] = _SilentAddress(
            time.monotonic(), "its engine is loading", logged=True, loads=True
        )

    def _expect(self, address: str, info: WorkerInfo) -> None:
        now = time.monotonic()
        recent = {a: entry for a, entry in self._returning.items() if now - entry[1] < RETURN_S}
        self._returning = recent | {address: (info, now)}

    def _miss(self, address: str, reason: str) -> None:
        """Handles a silent address. Logged once: at once for a known worker, else after `COMPLAIN_S`."""
        now = time.monotonic()
        silence = self._silent.setdefault(address, _SilentAddress(now))
        silence.reason, silence.loads = reason, False
        if (known := self._known.pop(address, None)) is not None:
            self._expect(address, known.info)
            _log.info("worker %s is gone: %.200s", address, reason)
        elif not silence.logged and now - silence.since > COMPLAIN_S:
            _log.warning("worker %s does not count, for it does not answer as one: %.200s", address, reason)
        else:
            return
        silence.logged = True
