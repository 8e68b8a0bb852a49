"""A ring of feature rows per sequence, in a draft worker's GPU, into which a decode engine's device writes.

`eyas.engine.kernels.exchange.row_ring` writes and reads the rows; `eyas.engine.ipc.row_memory` owns the
memory.

Every sequence that uses it has a place, and there a ring: its row of position p is row p mod `kept`. A row
consists of words of 8 bytes, each 4 bytes of the feature with a tag of its sequence and position above them.
A word is stored as one. So a reader that finds its tag in a word has those 4 bytes too, whatever else has
been written when: no flag, no fence and no wait (the idea of NCCL's protocol LL).
"""

from __future__ import annotations

from dataclasses import dataclass

WORD_BYTES = 8
GOLDEN = 0x9E3779B1  # odd: 2^32 over the golden ratio, so that generations lie far from each other
WAITING_ROWS = 16
"""Rows of a sequence that a draft worker may leave there, beside those of two rounds, until its head takes
them: many at once cost hardly more than one."""


@dataclass(frozen=True)
class RowRing:
    """`places` sequences with `rows` rows each, a row of `words` words."""

    places: int
    rows: int
    words: int

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.places * self.place_bytes

    @property
    def place_bytes(self) -> int:
        """Bytes of one sequence's rows."""
        return self.rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, its tags too."""
        return self.words * WORD_BYTES

    def at(self, place: int, position: int) -> int:
        """The first byte of a sequence's row."""
        return place * self.place_bytes + position % self.rows * self.row_bytes


def tag(generation: int, position: int) -> int:
    """The int32 above every 4 bytes of the row; it differs from those of all rows that can lie in
    its stead.
    """
    word = (generation * GOLDEN + position + 1) & 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def ring_rows(round_rows: int) -> int:
    """Rows that a ring keeps per sequence, if a round makes up to `round_rows` certain."""
    return 1 << (WAITING_ROWS + 2 * round_rows - 1).bit_length()
