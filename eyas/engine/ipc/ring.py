"""A ring of fixed records in memory that two processes of one host share: one writes, the other reads.

It knows the records' order and who may touch which. What a record says, how the memory came to both, and how
the reader learns that something is there, is not its business. The writer never waits: a full ring takes
nothing. Nothing of a record is seen before all of it is there, so a writer that dies in the middle leaves
what was there before. That rests on stores which become visible in their order (`STORES_IN_ORDER`).

A block of `BLOCK` bytes holds the reader's credit, the number of records it has taken. Behind it every record
has a block for its own number, counted from 1 and written last, and then its bytes.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

BLOCK = 128
"""Bytes: what one processor writes here stands in no cache line of the other's."""

STORES_IN_ORDER = platform.machine() == "x86_64"


@dataclass(frozen=True)
class RingShape:
    """`records` records of `size` bytes each."""

    records: int
    size: int

    @property
    def stride(self) -> int:
        """Bytes from one record to the next."""
        return BLOCK + -(-self.size // BLOCK) * BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of the whole ring."""
        return BLOCK + self.records * self.stride


class _Ring:
    """What both ends see. `memory`: writable, at least the shape's `nbytes`, all zeros at first."""

    def __init__(self, memory: memoryview, shape: RingShape) -> None:
        whole = memory[: shape.nbytes]
        self._records = shape.records
        self._words = whole.cast("Q")  # stored and loaded as one
        self._number_at = [(BLOCK + i * shape.stride) // 8 for i in range(shape.records)]
        starts = [8 * at + BLOCK for at in self._number_at]
        self._payloads = [whole[start : start + shape.size] for start in starts]

    def close(self) -> None:
        """Lets go of the memory."""
        self._words.release()
        for payload in self._payloads:
            payload.release()


class RingWriter(_Ring):
    """The end that writes; there is one."""

    def __init__(self, memory: memoryview, shape: RingShape) -> None:
        super().__init__(memory, shape)
        self._written = 0

    def begin(self) -> memoryview | None:
        """The bytes of the next record, to be filled; None: the ring is full, or its credit is none."""
        if not 0 <= self._written - self._words[0] < self._records:
            return None
        place = self._written % self._records
        self._words[self._number_at[place]] = 0
        return self._payloads[place]

    def publish(self) -> None:
        """What `begin` gave is filled: from now on it is seen."""
        place = self._written % self._records
        self._written += 1
        self._words[self._number_at[place]] = self._written


class RingReader(_Ring):
    """The end that reads; there is one."""

    def __init__(self, memory: memoryview, shape: RingShape) -> None:
        super().__init__(memory, shape)
        self._taken = 0

    def look(self) -> memoryview | None:
        """The bytes of the next record, to be copied before `release`; None: there is none yet."""
        place = self._taken % self._records
        return self._payloads[place] if self._is_next(place) else None

    def release(self) -> bool:
        """The record may be written again. False: it was, meanwhile, and what was copied is worth nothing."""
        whole = self._is_next(self._taken % self._records)
        self._taken += 1
        self._words[0] = self._taken
        return whole

    def _is_next(self, place: int) -> bool:
        return self._words[self._number_at[place]] == self._taken + 1
