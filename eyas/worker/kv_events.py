"""Events of a worker's prefix cache, published for routers of others by ZMQ: pages that it gets and loses.

The format is the one that vLLM publishes and that the routers of llm-d and Dynamo read: messages of a PUB
socket have three frames, topic, number (8 bytes, big-endian) and, in msgpack, [time, [event, ..]]; an event
is an array that begins with its name. A number that a subscriber misses, and those after it, it gets from a
ROUTER socket, by asking for it in 8 bytes: each a frame of its number and one of its content; -1 ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import msgspec
import zmq
import zmq.asyncio

from eyas.common.cluster.names import is_unspecified
from eyas.common.config import KvEventsConfig
from eyas.common.errors import ConfigError
from eyas.common.page_names import SHORT_BYTES, split, unpacked
from eyas.engine.ipc.messages import CacheUpdate

MOST_BYTES = 64 << 20
"""Of messages that are stored for those who missed them."""

MOST_SENT = 100_000  # messages that wait for a slow subscriber; it misses those after them
REPLAY_S = 30.0  # in which a subscriber takes what it missed
TURN = 64  # messages that are sent to it at a time
FULL_S = 0.01  # until it is tried again to send to one whose queue is full
_END = (-1).to_bytes(8, "big", signed=True)
_NONE = bytes(SHORT_BYTES)
_MEDIUM = "GPU"  # of the pool, whatever the device is
_HOST = "CPU"  # of the host's memory behind it


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Pages that follow each other, each of `block_size` tokens: their hashes, and that of the one before.

    `extra_keys`: of each page what its hash is made of beside tokens: of a first page, its salt's digest.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: None = None
    medium: str = _MEDIUM
    lora_name: None = None
    extra_keys: list[tuple[str] | None] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Pages that are no longer cached."""

    block_hashes: list[int]
    medium: str = _MEDIUM


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Nothing is cached: what was said before is of another cache."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The events of a message, and when it was made, in seconds since 1970."""

    ts: float
    events: list[KvEvent]


async def _send(answers: zmq.asyncio.Socket, parts: tuple[bytes, ...]) -> None:
    """Waits while the queue of the one who asked is full. ZMQ itself waits until that of anyone is not, and
    fails then.
    """
    while True:
        try:
            await answers.send_multipart(parts)
            return
        except zmq.Again:
            await asyncio.sleep(FULL_S)


def events_of(said: CacheUpdate) -> list[KvEvent]:
    """The events of an engine's message: pages that it lost first, then stretches of new ones."""
    events: list[KvEvent] = []
    if said.dropped:
        events.append(BlockRemoved([_hash(name) for name in split(said.dropped)]))
    names, before, ids = list(split(said.added)), list(split(said.before)), unpacked(said.tokens)
    salts = list(split(said.salts)) or [_NONE] * len(names)
    first = 0
    for place in range(1, len(names) + 1):
        if place == len(names) or before[place] != names[place - 1]:
            parent = None if before[first] == _NONE else _hash(before[first])
            tokens = ids[first * said.page_size : place * said.page_size]
            others = [None] * (place - first - 1)
            keys = None if salts[first] == _NONE else [(salts[first].hex(),), *others]
            hashes = [*map(_hash, names[first:place])]
            events.append(BlockStored(hashes, parent, tokens, said.page_size, extra_keys=keys))
            first = place
    if said.host_dropped:
        events.append(BlockRemoved([_hash(name) for name in split(said.host_dropped)], _HOST))
    if said.host_added:  # whose tokens were told with the pool's pages
        hashes = [_hash(name) for name in split(said.host_added)]
        events.append(BlockStored(hashes, None, (), said.page_size, medium=_HOST))
    return events


def _hash(name: bytes) -> int:
    return int.from_bytes(name, "big")


def _is_bound(address: str) -> bool:
    """Whether this worker binds `address`; it connects to any other one."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return "*" in address or address.startswith("ipc://") or is_unspecified(host)


class KvEventPublisher:
    """The sockets. `publish` never waits. Raises ConfigError, by flag, for an address that cannot be used."""

    def __init__(self, config: KvEventsConfig) -> None:
        self._config, self._topic = config, b""
        self._context = zmq.Context()
        self._sockets = contextlib.ExitStack()
        self._stored: deque[tuple[int, bytes]] = deque()
        self._bytes = self._next = 0
        bound = _is_bound(config.endpoint)
        self._out = self._sockets.enter_context(self._context.socket(zmq.PUB))
        self._out.set(zmq.SNDHWM, MOST_SENT)
        self._out.set(zmq.LINGER, 0)  # what a subscriber does not take holds no exit up
        self._answers: zmq.asyncio.Socket | None = None
        try:
            self._use("kv-events", config.endpoint, self._out.bind if bound else self._out.connect)
            if config.replay is not None:
                answers = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
                answers.set(zmq.LINGER, 0)
                answers.set(zmq.ROUTER_MANDATORY, 1)  # a slow reader is waited for, and loses nothing
                self._answers = self._sockets.enter_context(answers)
                self._use("kv-events-replay", config.replay, answers.bind)
        except ConfigError:
            self.close()
            raise

    @staticmethod
    def _use(flag: str, address: str, use: Callable[[str], object]) -> None:
        port = address.rpartition(":")[2]
        if (
            address.startswith("tcp://") and port.isdigit() and int(port) > 65535
        ):  # ZMQ takes its last 16 bits
            raise ConfigError(f"--{flag}: {address} cannot be used: no port is {port}", param=flag)
        try:
            use(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"--{flag}: {address} cannot be used: {error.strerror}", param=flag) from error

    def begin(self, topic: str) -> None:
        """The cache is empty. `topic`: of all messages, where none is configured."""
        self._topic = (self._config.topic or topic).encode()
        self._send([AllBlocksCleared()])

    def publish(self, said: CacheUpdate) -> None:
        """Publishes what an engine said."""
        self._send(events_of(said))

    def _send(self, events: list[KvEvent]) -> None:
        content, number = msgspec.msgpack.encode(KvEventBatch(time.time(), events)), self._next
        self._next += 1
        self._stored.append((number, content))
        self._bytes += len(content)
        while self._bytes > MOST_BYTES:
            self._bytes -= len(self._stored.popleft()[1])
        self._out.send_multipart((self._topic, number.to_bytes(8, "big"), content))

    async def serve(self) -> None:
        """Answers those who missed something, until it is cancelled."""
        if self._answers is None:
            return
        while True:
            who, *question = await self._answers.recv_multipart()
            with contextlib.suppress(zmq.ZMQError, TimeoutError):  # it has left, or does not read
                async with asyncio.timeout(REPLAY_S):
                    await self._replay(self._answers, who, question)

    async def _replay(self, answers: zmq.asyncio.Socket, who: bytes, question: list[bytes]) -> None:
        messages = self._from(question)
        while some := list(islice(messages, TURN)):
            for number, content in some:
                await _send(answers, (who, b"", number, content))
            await asyncio.sleep(0)  # which a send that does not wait is not: streams go on

    def _from(self, question: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """The stored messages from a number on, and the end; nothing for what is no question."""
        if len(question) != 2 or question[0] or len(question[1]) != 8:
            return
        first = int.from_bytes(question[1], "big")
        for number, content in list(self._stored):
            if number >= first:
                yield number.to_bytes(8, "big"), content
        yield _END, b""

    def close(self) -> None:
        """Closes the sockets; what is on its way is lost."""
        self._sockets.close()
        self._context.term()
