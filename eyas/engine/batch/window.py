"""The last features of a sequence: what a drafter begins with when it has nothing else.

It holds whatever tensors it is given and looks at their lengths only.
"""

from __future__ import annotations

from collections import deque
from typing import Any

ROWS = 128  # a drafter attends to so many rows before the newest, or a few more


class FeatureWindow:
    """Features of the rows base, base + 1, ... without a gap, in chunks [n, head width]."""

    def __init__(self) -> None:
        self.base = 0
        self.chunks: deque[Any] = deque()
        self._rows = 0

    @property
    def end(self) -> int:
        """The row after the newest."""
        return self.base + self._rows

    def copy(self) -> FeatureWindow:
        """The same rows, for a sequence that goes on from here on its own."""
        twin = FeatureWindow()
        twin.base, twin.chunks, twin._rows = self.base, self.chunks.copy(), self._rows
        return twin

    def add(self, base: int, features: Any) -> None:
        """Features of rows base, base + 1, ...; older ones are kept if these continue them."""
        if base != self.end:
            self.chunks.clear()
            self.base, self._rows = base, 0
        self.chunks.append(features)
        self._rows += len(features)
        while self._rows - len(self.chunks[0]) >= ROWS:
            oldest = self.chunks.popleft()
            self.base += len(oldest)
            self._rows -= len(oldest)
