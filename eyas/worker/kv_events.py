"""KV cache events: publishes the pages added to and removed from the prefix cache, over ZMQ.

The format is the one that vLLM publishes and that the routers of llm-d and Dynamo read. A message of the PUB
socket has three frames: topic, sequence number (8 bytes, big-endian) and, in msgpack, [time, [event, ..]]; an
event is an array that begins with its name. A subscriber that missed messages requests a replay from the
ROUTER socket with the first missing number in 8 bytes. The replay is one message per number, with a frame for
the number and one for the content; the number -1 ends it.
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
"""The size of the messages that are stored for replays."""

MOST_SENT = 100_000  # messages queued per slow subscriber; later ones are dropped
REPLAY_S = 30.0  # the time limit of a replay
TURN = 64  # messages of a replay between two yields to the event loop
FULL_S = 0.01  # between two attempts to send to a subscriber whose queue is full
_END = (-1).to_bytes(8, "big", signed=True)
_NONE = bytes(SHORT_BYTES)
_MEDIUM = "GPU"  # the KV pool, whatever the device is
_HOST = "CPU"  # the host memory tier


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Consecutive pages of `block_size` tokens: their hashes, and the hash of the page before them.

    `extra_keys`, per page: what its hash covers in addition to tokens. A first page has the digest of its
    salt.
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
    """The cache is empty: earlier events no longer apply."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The events of a message, and its time in seconds since 1970."""

    ts: float
    events: list[KvEvent]


async def _send(answers: zmq.asyncio.Socket, parts: tuple[bytes, ...]) -> None:
    """Sends one message, and waits while the queue of its subscriber is full.

    ZMQ's own wait does not suffice: it ends, with an error, when the queue of any other peer has capacity.
    """
    while True:
        try:
            await answers.send_multipart(parts)
            return
        except zmq.Again:
            await asyncio.sleep(FULL_S)


def events_of(update: CacheUpdate) -> list[KvEvent]:
    """Converts an engine's update to events: first the removed pages, then each run of consecutive new
    ones.
    """
    events: list[KvEvent] = []
    if update.dropped:
        events.append(BlockRemoved([_hash(name) for name in split(update.dropped)]))
    names, before, ids = list(split(update.added)), list(split(update.before)), unpacked(update.tokens)
    salts = list(split(update.salts)) or [_NONE] * len(names)
    start = 0
    for end in range(1, len(names) + 1):
        if end == len(names) or before[end] != names[end - 1]:
            parent = None if before[start] == _NONE else _hash(before[start])
            tokens = ids[start * update.page_size : end * update.page_size]
            no_keys = [None] * (end - start - 1)
            keys = None if salts[start] == _NONE else [(salts[start].hex(),), *no_keys]
            hashes = [*map(_hash, names[start:end])]
            events.append(BlockStored(hashes, parent, tokens, update.page_size, extra_keys=keys))
            start = end
    if update.host_dropped:
        events.append(BlockRemoved([_hash(name) for name in split(update.host_dropped)], _HOST))
    if update.host_added:  # their tokens were published with the pages of the pool
        hashes = [_hash(name) for name in split(update.host_added)]
        events.append(BlockStored(hashes, None, (), update.page_size, medium=_HOST))
    return events


def _hash(name: bytes) -> int:
    return int.from_bytes(name, "big")


def _is_bound(address: str) -> bool:
    """Whether this worker binds `address`, rather than connects to it."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return "*" in address or address.startswith("ipc://") or is_unspecified(host)


class KvEventPublisher:
    """Owner of the sockets. `publish` never waits.

    Raises ConfigError, which names the flag, for an address that cannot be used.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        self._config, self._topic = config, b""
        self._context = zmq.Context()
        self._sockets = contextlib.ExitStack()
        self._stored: deque[tuple[int, bytes]] = deque()
        self._bytes = self._next = 0
        bound = _is_bound(config.endpoint)
        self._out = self._sockets.enter_context(self._context.socket(zmq.PUB))
        self._out.set(zmq.SNDHWM, MOST_SENT)
        self._out.set(zmq.LINGER, 0)  # unsent messages do not delay the exit
        self._answers: zmq.asyncio.Socket | None = None
        try:
            self._use("kv-events", config.endpoint, self._out.bind if bound else self._out.connect)
            if config.replay is not None:
                answers = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
                answers.set(zmq.LINGER, 0)
                answers.set(zmq.ROUTER_MANDATORY, 1)  # a full queue raises zmq.Again instead of dropping
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
        """Publishes that the cache is empty. `topic`: of all messages, if the configuration has none."""
        self._topic = (self._config.topic or topic).encode()
        self._send([AllBlocksCleared()])

    def publish(self, update: CacheUpdate) -> None:
        """Publishes a change of the engine's cache."""
        self._send(events_of(update))

    def _send(self, events: list[KvEvent]) -> None:
        content, number = msgspec.msgpack.encode(KvEventBatch(time.time(), events)), self._next
        self._next += 1
        self._stored.append((number, content))
        self._bytes += len(content)
        while self._bytes > MOST_BYTES:
            self._bytes -= len(self._stored.popleft()[1])
        self._out.send_multipart((self._topic, number.to_bytes(8, "big"), content))

    async def serve(self) -> None:
        """Answers requests for replays, until it is cancelled."""
        if self._answers is None:
            return
        while True:
            peer, *request = await self._answers.recv_multipart()
            with contextlib.suppress(zmq.ZMQError, TimeoutError):  # the peer has left, or does not read
                async with asyncio.timeout(REPLAY_S):
                    await self._replay(self._answers, peer, request)

    async def _replay(self, answers: zmq.asyncio.Socket, peer: bytes, request: list[bytes]) -> None:
        messages = self._stored_since(request)
        while batch := list(islice(messages, TURN)):
            for number, content in batch:
                await _send(answers, (peer, b"", number, content))
            await asyncio.sleep(0)  # sends that need not wait never yield to the event loop

    def _stored_since(self, request: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """The stored messages from the requested number on, and the end; nothing for a malformed request."""
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            return
        first = int.from_bytes(request[1], "big")
        for number, content in list(self._stored):
            if number >= first:
                yield number.to_bytes(8, "big"), content
        yield _END, b""

    def close(self) -> None:
        """Closes the sockets; unsent messages are lost."""
        self._sockets.close()
        self._context.term()
