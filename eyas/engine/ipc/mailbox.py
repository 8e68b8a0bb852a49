"""A mailbox per sequence, in memory that a decode engine and a draft worker of one host share: rounds go one
way, drafts the other.

The decode engine's end is its host, or its GPU without the host (`eyas.engine.kernels.exchange.mailbox`); the
draft worker's end is its host (`eyas.engine.speculation.draft_worker.draft_engine`). Who writes never waits
and asks for nothing.

A place has a ring of rows, that of position p in word p mod `rows`: the token of position p + 1, and whether
this was the newest row when it was written. Behind the ring lies one proposal: a header, the number of nodes;
then each node's token, then each node's parent. Every word has 8 bytes, a tag of the sequence and the
position (`eyas.engine.ipc.row_ring`) above 4 bytes of content; a proposal's position is that of its root. A
word is stored as one: who finds a tag has the content too. Where hosts write rows, their features lie behind
all places, that of position p in row p mod `rows`; a GPU writes them into the draft worker's GPU instead.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eyas.engine.ipc.messages import DraftProposal
from eyas.engine.ipc.row_ring import WORD_BYTES, LocalGpu, tag

PAGE = 4096
"""Bytes: the memory begins and ends at a page, since drivers lock whole ones."""
BLOCK = 128
"""Bytes: what one processor writes here stands in no cache line of the other's."""
STORES_IN_ORDER = platform.machine() == "x86_64"
"""Does this processor show its stores to others in their order? The draft worker's rely on it."""
MISSED_ROUNDS = 8
"""Late rounds in a row after which a sequence's drafts are not waited for, until some come in time. A device
waits once more after 8, 16, 32 of them: where it does not wait, hardly any can be in time.
"""
HALF = 0xFFFFFFFF
NEWEST = 1 << 31
"""In the lower half of a row's word, whose other bits are a token."""
LAPS = 1 << 20
"""Positions by which a word can be ahead of the one that is looked for. Tags of other sequences are further
away, but by chance.
"""

Words = NDArray[np.uint64]


@dataclass(frozen=True)
class MailLayout:
    """The layout of one place: `rows` rows, then a proposal of up to `nodes` nodes.

    `width`: float32 values of a row's feature; 0: features are elsewhere.
    """

    rows: int
    nodes: int
    width: int = 0

    @property
    def header(self) -> int:
        """The word of a proposal's header."""
        return self.rows

    @property
    def words(self) -> int:
        """The words of a place; no cache line belongs to two places."""
        return -(-(self.rows + 1 + 2 * self.nodes) * WORD_BYTES // BLOCK) * BLOCK // WORD_BYTES

    def features_at(self, places: int) -> int:
        """The byte where the features of this number of places begin: the words have whole pages."""
        return -(-places * self.words * WORD_BYTES // PAGE) * PAGE

    def nbytes(self, places: int) -> int:
        """Bytes of this number of places."""
        return self.features_at(places) + 4 * places * self.rows * self.width


class DraftMailbox:
    """All places of a channel, as this process sees them, until `close`.

    `memory`: at least `place.nbytes(places)` bytes, zeros at first. `gpu`: whose kernels are to use it; None:
    none. Raises DriverError if the driver does not let the GPU use it.
    """

    def __init__(
        self, memory: memoryview, place: MailLayout, places: int, gpu: LocalGpu | None = None
    ) -> None:
        self.place = place
        self.places = places
        behind = place.features_at(places)
        self._stores = memory[:behind].cast("Q")  # each is one
        whole = np.frombuffer(memory[:behind], np.uint64)
        self._here = whole.ctypes.data
        self._gpu = gpu
        self._address = 0 if gpu is None else gpu.driver.register(self._here, behind)
        self.words: Words = whole[: places * place.words].reshape(places, place.words)
        features = np.frombuffer(memory[behind : place.nbytes(places)], np.float32)
        self._features = features.reshape(places, place.rows, place.width)

    @property
    def on_device(self) -> bool:
        """May kernels use it?"""
        return self._gpu is not None

    def address(self, number: int) -> int:
        """The address of a place, for kernels."""
        return self._address + number * self.place.words * WORD_BYTES

    # --- rows, from the decode engine's host to the draft worker's -------------------------------------

    def post(
        self, number: int, generation: int, base: int, tokens: Sequence[int], features: NDArray[np.float32]
    ) -> None:
        """Writes accepted rows, at most a place's: row j of position base + j.

        Their features go before the words; what lay there before counts as no row meanwhile.
        """
        ring, first, stores = self.place.rows, number * self.place.words, self._stores
        at = [first + position % ring for position in range(base, base + len(tokens))]
        for word in at:
            stores[word] = 0
        done = 0
        for part in self._parts(base, len(tokens)):
            rows = part.stop - part.start
            self._features[number, part] = features[done : done + rows]
            done += rows
        newest = len(tokens) - 1
        for j, (word, token) in enumerate(zip(at, tokens, strict=True)):
            above = (tag(generation, base + j) & HALF) << 32
            stores[word] = above | token | (NEWEST if j == newest else 0)

    def rounds(self, number: int, generation: int, base: int) -> tuple[int, ...] | None:
        """The tokens of the round whose first row has position `base`, if all of it is there; else none.
        None: that row has given way to one of a later lap.
        """
        rows, first, stores = self.place.rows, number * self.place.words, self._stores
        expected = tag(generation, base) & HALF
        ahead = (stores[first + base % rows] >> 32) - expected & HALF
        if ahead:
            return None if ahead < LAPS and ahead % rows == 0 else ()
        tokens: list[int] = []
        for i in range(rows):
            word = stores[first + (base + i) % rows]
            if word >> 32 != expected + i & HALF:
                break
            tokens.append(word & (NEWEST - 1))
            if word & NEWEST:
                return tuple(tokens)
        return ()

    def features(self, number: int, generation: int, base: int, count: int) -> bytes | None:
        """The features of rows whose words are present; None: they are gone."""
        copied = b"".join([self._features[number, part].tobytes() for part in self._parts(base, count)])
        rows, first, stores = self.place.rows, number * self.place.words, self._stores
        there = all(
            stores[first + position % rows] >> 32 == tag(generation, position) & HALF
            for position in range(base, base + count)
        )
        return copied if there else None

    def _parts(self, base: int, count: int) -> list[slice]:
        """The location of up to `rows` rows from position `base` on: two parts around the ring's end."""
        rows, at = self.place.rows, base % self.place.rows
        end = at + count
        return [slice(at, end)] if end <= rows else [slice(at, rows), slice(0, end - rows)]

    # --- proposals, from the draft worker's host --------------------------------------------------------

    def propose(self, number: int, proposal: DraftProposal) -> bool:
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

    def proposal(self, number: int, seq: int, generation: int, newest: int) -> DraftProposal | None:
        """A proposal of `seq` for a root at position `newest`, or up to `rows` before it; None if none."""
        header = number * self.place.words + self.place.header
        above, nodes = self._stores[header] >> 32, self._stores[header] & HALF
        back = ((tag(generation, newest) & HALF) - above) & HALF
        if not nodes or nodes > self.place.nodes or back >= self.place.rows:
            return None
        words = self._stores[header + 1 : header + 1 + self.place.nodes + nodes].tolist()
        tokens, parents = words[:nodes], words[self.place.nodes :]
        if any(word >> 32 != above for word in (*tokens, *parents)):
            return None  # the next one is being written
        signed = [(word & HALF) - ((word & NEWEST) << 1) for word in parents]
        ids = tuple(word & HALF for word in tokens)
        return DraftProposal(seq, generation, newest - back, ids, tuple(signed))

    def answered(self, number: int, generation: int, newest: int) -> bool:
        """Has anything been proposed to this sequence, for a root up to position `newest`?"""
        above = self._stores[number * self.place.words + self.place.header] >> 32
        return above != 0 and ((tag(generation, newest) & HALF) - above) & HALF < LAPS

    def close(self) -> None:
        """Lets go of the memory, once no kernel that was launched uses it."""
        if self._gpu is not None:
            self._gpu.wait()
            self._gpu.driver.unregister(self._here)
        self._stores.release()
        self.words = np.zeros((0, self.place.words), np.uint64)
        self._features = np.zeros((0, 0, 0), np.float32)
        self.places = 0
