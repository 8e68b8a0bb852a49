"""The last features of a sequence: a drafter begins with them where it has nothing else.

This file holds the tensors that it is given, or says where a device keeps them, and reads only lengths.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

ROWS = 128  # a window has at least this many rows before the newest, if the sequence has them
FIRST_ROWS = 96
"""The most rows of a prompt with which a drafter far away begins, where a device sends it them."""


class DeviceFeatures(Protocol):
    """The memory of a device."""

    def read(self, slot: int, rows: range) -> Any:
        """[len(rows), head width] of the sequence in `slot`, on the host."""
        ...


@dataclass(slots=True)
class DeviceRows:
    """Features of the rows `rows` that have not come to the host: `keeper` has them, for as long as the
    sequence sits in `slot` by the same `occupancy` and makes no more rows than a window has.
    """

    keeper: DeviceFeatures
    slot: int
    occupancy: int
    rows: range

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> DeviceRows:
        return DeviceRows(self.keeper, self.slot, self.occupancy, self.rows[part])

    def read(self) -> Any:
        """[n, head width], on the host. May wait for the device."""
        return self.keeper.read(self.slot, self.rows)


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
            self._forget_oldest()

    def forget_others(self, slot: int, occupancy: int) -> None:
        """Drops rows that were kept while the sequence sat elsewhere, and all before them."""
        resident = [(i, one) for i, one in enumerate(self.chunks) if isinstance(one, DeviceRows)]
        lost = [i for i, one in resident if (one.slot, one.occupancy) != (slot, occupancy)]
        for _ in range(lost[-1] + 1 if lost else 0):
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest = self.chunks.popleft()
        self.base += len(oldest)
        self._rows -= len(oldest)
