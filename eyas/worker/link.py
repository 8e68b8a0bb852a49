"""The link between a front and its engine: batches of commands down, batches of events up.

`ZmqFront` and `ZmqEngine` connect two processes. Their users see only the interfaces `FrontLink` and
`eyas.engine.ipc.link.EngineLink`. `send` never waits on either side: admission bounds the requests in flight,
and the front monitors the engine's progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
import zmq

from eyas.engine.ipc.link import EngineLink
from eyas.engine.ipc.messages import Command, Event

RECONNECT_MS = 600_000  # an engine without its front ends long before that

_COMMANDS = msgspec.msgpack.Decoder(list[Command])
_EVENTS = msgspec.msgpack.Decoder(list[Event])


class FrontLink(Protocol):
    """The front's end. All calls come from the front's event loop."""

    def send(self, commands: Sequence[Command]) -> None:
        """Sends one batch; never waits."""
        ...

    async def recv(self) -> list[Event]:
        """Waits for the next batch."""
        ...


def _socket(context: zmq.SyncContext) -> zmq.SyncSocket:
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 500)  # ms: time for a last `EngineStopped` or `ShutdownEngine` to leave
    return socket


def new_endpoint() -> str:
    """A new address in Linux's abstract namespace: it has no file, and disappears with its owner."""
    return f"ipc://@eyas-{secrets.token_hex(16)}"


class ZmqFront:
    """Binds `endpoint`, to which only processes of this user can connect.

    The event loop polls the socket's descriptor directly: zmq's own asyncio layer would cost more than all
    other work of the front per step.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = _socket(self._context)
        self._socket.set(zmq.IPC_FILTER_UID, os.getuid())  # abstract names have no permissions
        self._socket.bind(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._unsent: deque[bytes] = deque()  # batches wait here only until the engine has connected
        self._events: asyncio.Queue[list[Event]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._transfer)

    def send(self, commands: Sequence[Command]) -> None:
        """Queues the commands and sends as many as the socket takes; never blocks."""
        self._unsent.append(self._encoder.encode(commands))
        self._transfer()

    async def recv(self) -> list[Event]:
        """Waits for the engine's next events."""
        return await self._events.get()

    def close(self) -> None:
        """Closes the socket; unsent batches get half a second."""
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()
        self._context.term()

    def _transfer(self) -> None:
        """Sends and receives until the socket would block: the descriptor only signals later changes."""
        while ready := int(self._socket.get(zmq.EVENTS)) & (
            zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0)
        ):
            with contextlib.suppress(zmq.Again):  # the engine has just ended
                if ready & zmq.POLLOUT:
                    self._socket.send(self._unsent[0], zmq.NOBLOCK)
                    self._unsent.popleft()
                if ready & zmq.POLLIN:
                    self._events.put_nowait(_EVENTS.decode(self._socket.recv(zmq.NOBLOCK)))


class ZmqEngine(EngineLink):
    """Connects to the front's `endpoint`, which is bound already, and never reconnects.

    Fronts do not restart, and another process that reuses the name of a dead one must not receive events.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = _socket(self._context)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()

    def recv(self, timeout_s: float, bells: Sequence[int] = ()) -> list[Command]:
        commands: list[Command] = []
        wait_ms = round(timeout_s * 1000)
        if wait_ms and bells:
            zmq.zmq_poll([(self._socket, zmq.POLLIN), *((bell, zmq.POLLIN) for bell in bells)], wait_ms)
            wait_ms = 0
        while self._socket.poll(0 if commands else wait_ms):
            commands += _COMMANDS.decode(self._socket.recv())
        return commands

    def send(self, events: Sequence[Event]) -> None:
        if events:
            self._socket.send(self._encoder.encode(events))

    def close(self) -> None:
        """Closes the socket; unsent events get half a second."""
        self._socket.close()
        self._context.term()
