"""A mailbox per sequence, in memory that a decode engine's GPU and a draft worker's host share: rounds go one
way, drafts the other, and the host of the decode engine is not asked.

It knows where words lie, how they are told from what lay there before, and which process sees the memory
how. What the device makes of them is the business of `eyas.engine.kernels.mailbox`, what a draft worker does
that of `eyas.engine.speculation.posted`.

A place has a ring of rows, that of position p in word p mod `kept`: the token of position p + 1, and whether
this was the newest row when it was written. Behind the ring lies one proposal: a header, the number of nodes;
then each node's token, then each node's parent. Every word has 8 bytes, a tag of the sequence and the
position (`eyas.engine.ipc.row_ring`) above 4 bytes of content; a proposal's position is that of its root. A
word is stored as one: who finds a tag has the content too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eyas.engine.ipc.messages import Proposal
from eyas.engine.ipc.ring import BLOCK
from eyas.engine.ipc.row_memory import Gpu
from eyas.engine.ipc.row_ring import GOLDEN, WORD_BYTES, tag

PAGE = 4096
"""Bytes: the memory begins and ends at a page, since drivers lock whole ones."""
LATE_ROUNDS = 8
"""Late rounds in a row after which a sequence's drafts are not waited for, until some come in time. A device
waits once more after 8, 16, 32 of them: where it does not wait, hardly any can be in time.
"""
HALF = 0xFFFFFFFF
NEWEST = 1 << 31
"""In the lower half of a row's word, whose other bits are a token."""

Words = NDArray[np.uint64]


@dataclass(frozen=True)
class MailLayout:
    """Where words lie in one place: `kept` rows, then a proposal of up to `nodes` nodes."""

    kept: int
    nodes: int

    @property
    def header(self) -> int:
        """The word of a proposal's header."""
        return self.kept

    @property
    def words(self) -> int:
        """Of a place; no cache line belongs to two."""
        return -(-(self.kept + 1 + 2 * self.nodes) * WORD_BYTES // BLOCK) * BLOCK // WORD_BYTES

    def nbytes(self, places: int) -> int:
        """Bytes of this number of places: whole pages."""
        return -(-places * self.words * WORD_BYTES // PAGE) * PAGE


def tags(generations: Sequence[int] | NDArray[np.int64], positions: NDArray[np.int64]) -> Words:
    """As `row_ring.tag`, but the 32 bits as a number that is not negative."""
    sums = np.asarray(generations, np.int64).astype(np.uint64) * np.uint64(GOLDEN)
    found: Words = (sums + positions.astype(np.uint64) + np.uint64(1)) & np.uint64(HALF)
    return found


class Mailbox:
    """All places of a line, as this process sees them, until `close`.

    `memory`: at least `place.nbytes(places)` bytes, zeros at first. `gpu`: whose kernels are to use it; None:
    this process is the draft worker's. Raises DriverError if the driver does not let the GPU use it.
    """

    def __init__(self, memory: memoryview, place: MailLayout, places: int, gpu: Gpu | None = None) -> None:
        self.place = place
        self.places = places
        size = place.nbytes(places)
        self._stores = memory[:size].cast("Q")  # each is one
        whole = np.frombuffer(memory[:size], np.uint64)
        self._here = whole.ctypes.data
        self._gpu = gpu
        self._address = 0 if gpu is None else gpu.driver.register(self._here, size)
        self.words: Words = whole[: places * place.words].reshape(places, place.words)

    def address(self, number: int) -> int:
        """Of a place, for kernels."""
        return self._address + number * self.place.words * WORD_BYTES

    def propose(self, number: int, proposal: Proposal) -> bool:
        """Leaves a proposal at a place, for the round whose root is at its base. False: it has no room there.

        The header is stored last: who finds it finds the nodes, if stores keep their order, and else no more
        than some of them.
        """
        nodes = len(proposal.tokens)
        if not 0 <= number < self.places or nodes > self.place.nodes:
            return False
        above = (tag(proposal.generation, proposal.base_len) & HALF) << 32
        header, stores = number * self.place.words + self.place.header, self._stores
        for i, token in enumerate(proposal.tokens, start=header + 1):
            stores[i] = above | token & HALF
        for i, parent in enumerate(proposal.parents, start=header + 1 + self.place.nodes):
            stores[i] = above | parent & HALF
        stores[header] = above | nodes
        return True

    def close(self) -> None:
        """Lets go of the memory, once no kernel that was launched uses it."""
        if self._gpu is not None:
            self._gpu.wait()
            self._gpu.driver.unregister(self._here)
        self._stores.release()
        self.words = np.zeros((0, self.place.words), np.uint64)
        self.places = 0
