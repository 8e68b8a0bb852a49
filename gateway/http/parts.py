"""The parts of a streamed body, as an HTTP server takes them past the layers of calls around ASGI's `send`.

It says what a server offers.
"""

from __future__ import annotations

from typing import Protocol

PARTS = "eyas.parts"
"""An extension of ASGI: under this name, a scope may have the `BodyParts` of its response."""


class BodyParts(Protocol):
    """The short way for parts of a body that has begun: past the layers of calls around `send`."""

    __slots__ = ()

    blocked: bool
    """Whether the client reads slowly. It is read for every token."""

    def write(self, part: bytes) -> None:
        """Takes a part, which leaves soon. A no-op once the client is gone."""
        ...

    def flush(self) -> None:
        """All parts leave now: before anything else is sent."""
        ...

    async def drain(self) -> None:
        """Waits until the client has read, or is gone."""
        ...
