"""The last features of a sequence: a drafter begins with them where it has nothing else.

This file holds the tensors that it is given and reads only their lengths.
"""

from __future__ import annotations

from collections import deque
from typing import Any

ROWS = 128  # a window has at least this many rows before the newest, if the sequence has them


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
        """A copy for a sequence that forks off here."""
        twin = FeatureWindow()
        twin.base, twin.chunks, twin._rows = self.base, self.chunks.copy(), self._rows
        return twin

    def add(self, base: int, features: Any) -> None:
        """Adds the features [n, head width] of rows base, base + 1, ...

        Rows that these do not continue are dropped, and so are rows beyond ROWS.
        """
        if base != self.end:
            self.chunks.clear()
            self.base, self._rows = base, 0
        self.chunks.append(features)
        self._rows += len(features)
        while self._rows - len(self.chunks[0]) >= ROWS:
            oldest = self.chunks.popleft()
            self.base += len(oldest)
            self._rows -= len(oldest)
