"""What the scheduler asks about prompts whose KV comes from another worker, or goes to one.

It says what is asked; how pages travel is the business of those who answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from eyas.engine.batch.sequence import Generation


class Incoming(Protocol):
    """Prompts that come from elsewhere, as far as they want pages or have them."""

    def waiting(self) -> Iterable[Generation]:
        """Those that wait for pages."""
        ...

    def coming(self) -> Iterable[Generation]:
        """Those that were given pages."""
        ...

    def preempt(self) -> bool:
        """Take pages back from one of these, now or soon; False if none gives any back."""
        ...


class Outgoing(Protocol):
    """Room for what prompts offer that are decoded elsewhere."""

    def reserve(self, generation: Generation) -> bool:
        """Room for what it will offer, if not reserved before; False: not now."""
        ...

    def leave(self, generation: Generation) -> None:
        """What is reserved for it is free."""
        ...
