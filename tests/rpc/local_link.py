"""A link that joins two threads of one process: the interfaces of `eyas.worker.link`, without sockets."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence

from eyas.engine.ipc.link import EngineLink
from eyas.engine.ipc.messages import Command, Event

LOOK_S = 0.001


class LocalFront:
    """The front's end of an in-process link. Construct it on the front's event loop, before the engine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[list[Event]] = asyncio.Queue()
        self.commands: queue.SimpleQueue[Sequence[Command]] = queue.SimpleQueue()

    def send(self, commands: Sequence[Command]) -> None:
        """Queues the commands; never blocks."""
        self.commands.put(commands)

    async def recv(self) -> list[Event]:
        """Waits for the engine's next events."""
        return await self._events.get()

    def deliver(self, events: Sequence[Event]) -> None:
        """Hands a batch to the front. The engine's thread calls it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, list(events))


class LocalEngine(EngineLink):
    """The engine's end of an in-process link."""

    def __init__(self, front: LocalFront) -> None:
        self._front = front

    def recv(self, timeout_s: float, bells: Sequence[int] = ()) -> list[Command]:
        timeout_s = min(timeout_s, LOOK_S) if bells else timeout_s  # a queue has no descriptor to wait for
        commands: list[Command] = []
        try:
            commands += self._front.commands.get(timeout=timeout_s) if timeout_s > 0 else ()
            while True:
                commands += self._front.commands.get_nowait()
        except queue.Empty:
            return commands

    def send(self, events: Sequence[Event]) -> None:
        if events:
            self._front.deliver(events)
