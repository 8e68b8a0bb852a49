"""Memory that can leave its device, such as a KV pool's, or that of weights."""

from __future__ import annotations

from typing import Protocol


class MovableMemory(Protocol):
    """Memory that can leave its device while its addresses stay. Nothing may use it meanwhile."""

    def release(self) -> int:
        """Lets the bytes go; how many. Raises ConfigError if that cannot be: nothing has changed then."""
        ...

    def restore(self) -> int:
        """Takes as many bytes again; how many. Raises ConfigError if there is no room; then they are away."""
        ...
