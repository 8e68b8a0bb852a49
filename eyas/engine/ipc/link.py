"""The engine's end of its link to the front, as the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from eyas.engine.ipc.messages import Command, Event


class EngineLink(Protocol):
    """Batches of commands in, batches of events out. Only the engine's thread calls it."""

    def recv(self, timeout_s: float, bells: Sequence[int] = ()) -> list[Command]:
        """All commands that have arrived; waits up to `timeout_s` for the first, or until one of the
        descriptors `bells` can be read. Perhaps none.
        """
        ...

    def send(self, events: Sequence[Event]) -> None:
        """Sends one batch; never waits. An empty batch is not sent."""
        ...
