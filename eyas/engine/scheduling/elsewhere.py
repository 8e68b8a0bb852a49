"""The scheduler's view of prompts whose KV comes from another worker.

It says what is asked; how pages travel is the business of those who answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from eyas.engine.batch.sequence import Generation


class IncomingPrompts(Protocol):
    """Prompts that come from elsewhere, as far as they want pages or have them."""

    def waiting(self) -> Iterable[Generation]:
        """Prompts that wait for pages."""
        ...

    def coming(self) -> Iterable[Generation]:
        """Prompts that were given pages."""
        ...

    def preempt(self) -> bool:
        """Take pages back from one of these, now or soon; False if none gives any back."""
        ...


class IncomingToRanks(Protocol):
    """The prompts of several ranks that come from elsewhere."""

    def waiting(self) -> Iterable[Generation]:
        """Prompts that wait for pages."""
        ...

    def coming(self) -> Iterable[Generation]:
        """Prompts that were given pages."""
        ...

    def preempt(self, among: Callable[[Any], bool]) -> bool:
        """Take pages back from one that is `among` those asked; False if none gives any back."""
        ...
