"""Recent answers, and how they went on where a text stood like this: SuffixDecoding with its tree left out.

A suffix tree over the answers says, for the longest end of a text that is in them, how often each token
followed (Oliaro et al., 2024, arXiv 2411.04975). Of such a tree a proposal reads one path. Here the answers
lie behind each other in a ring of memory, and the places behind the same few ids, a gram, are linked, the
newest first, as compressors link theirs (LZ77 with hash chains). What the tree would have counted along that
path is counted when a text asks for it, over the newest of those places.

So a token is written once, takes 24 bytes whatever it repeats, and is overwritten by the newest when the ring
is full. An answer is seen by its own tenant alone: places carry its number.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TOKENS = 1 << 20
"""Of all tenants: 24 MiB."""
MOST_OF_ONE = 8
"""One answer has at most this part of the ring: of a longer one the end counts."""
GRAMS = (8, 3)
"""Ids before a place by which it is linked. Places behind more are looked for first."""
LONGEST = 24
"""Ids that are compared: longer matches count as this long."""
PLACES = 16
"""The newest places behind a gram that are looked at."""
MOST_TOKENS = 64
"""Tokens of a proposal."""
LEAST = 0.1
"""A proposal ends where fewer of its places go on with it than this share."""
_END = -1  # behind each answer
_FACTOR, _BITS = 0x9E3779B97F4A7C15, 64
Ints = NDArray[np.int64]


class AnswerMatch(NamedTuple):
    """`tokens`, at least one, followed where the last `match` ids of a text are in answers."""

    match: int
    tokens: tuple[int, ...]


class RecentAnswers:
    """The newest `size` tokens of answers, a power of 2."""

    def __init__(self, size: int = TOKENS) -> None:
        self._size = size
        self._end = 0  # tokens that were ever written: a place is named by it, and lies at its rest by `size`
        self._view = memoryview(bytearray(4 * (LONGEST + size + MOST_TOKENS))).cast("i")
        self._ids = np.frombuffer(
            self._view, np.int32
        )  # of the ring, and beyond its ends ids that stop a match
        self._ids.fill(_END)
        self._owners = np.zeros(size, np.int32)
        self._links = [_GramLinks(length, size) for length in GRAMS]
        self._tenants: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()  # number, end of its newest
        self._newest = 0  # number of a tenant; none is used twice

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; beside them there is an entry per tenant that has an answer here."""
        return self._ids.nbytes + self._owners.nbytes + sum(links.nbytes for links in self._links)

    @property
    def tenants(self) -> int:
        """The number of tenants that may have an answer here."""
        return len(self._tenants)

    def clear(self) -> None:
        """Forgets all answers. No number of a tenant comes again, so links to them lead nowhere."""
        self._tenants.clear()
        self._ids.fill(_END)

    def add(self, tenant: Hashable, answer: SequenceOf[int]) -> None:
        """An answer of `tenant` has ended. Takes time in proportion to its length."""
        answer = answer[-(self._size // MOST_OF_ONE - 1) :]
        if len(answer) <= min(GRAMS):
            return
        count = len(answer) + 1
        if self._end % self._size + count > self._size:  # it lies in one piece
            self._end += self._size - self._end % self._size
        number = self._number(tenant, self._end + count)
        at, ids = self._end % self._size, np.array(answer, np.int64)
        self._ids[LONGEST + at : LONGEST + at + count - 1] = ids
        self._ids[LONGEST + at + count - 1] = _END
        self._owners[at : at + count] = number
        for links in self._links:
            links.add(number, ids, self._end)
        self._end += count

    def _number(self, tenant: Hashable, end: int) -> int:
        """The tenant's number; forgets those whose last token is overwritten by now."""
        number, _ = self._tenants.pop(tenant, (0, 0))
        if not number:
            self._newest = number = self._newest + 1
        self._tenants[tenant] = number, end
        while next(iter(self._tenants.values()))[1] <= end - self._size:
            self._tenants.popitem(last=False)
        return number

    def look_up(self, tenant: Hashable, ids: SequenceOf[int]) -> AnswerMatch | None:
        """The tokens that followed the longest end of `ids` in answers of `tenant`: at most `MOST_TOKENS`
        tokens, of each place the one with which most of the remaining places go on, the newest of two.

        Of the newest `PLACES` places behind the longest of `GRAMS` that has any.
        """
        number, _ = self._tenants.get(tenant, (0, 0))
        if not number:
            return None
        last = array("i", ids[-LONGEST:])
        for links in self._links:
            if len(last) < links.length:
                continue
            places = self._places(links, number, last)
            if not places:
                continue
            match, rows = self._longest(np.array(places), last)
            if tokens := _most_followed(rows):
                return AnswerMatch(match, tokens)
        return None

    def _places(self, links: _GramLinks, number: int, last: array[int]) -> list[int]:
        """The places in the ring of the tokens behind the gram that `last` ends with; the newest first."""
        length, gram = links.length, memoryview(last)[-links.length :]
        places: list[int] = []
        oldest, looks = self._end - self._size + length, 4 * PLACES
        place = links.newest(number, last[-length:])
        while place >= max(oldest, 0) and looks and len(places) < PLACES:
            at = place % self._size
            start = LONGEST + at - length
            if self._owners[at - 1] == number and self._view[start : start + length] == gram:
                places.append(at)
            step = links.step(at)
            place, looks = (place - step if step else -1), looks - 1
        return places

    def _longest(self, places: Ints, last: array[int]) -> tuple[int, NDArray[np.int32]]:
        """The longest match behind which a place stands, and what follows each place: [n, MOST_TOKENS].

        Nothing stops a match but an id: answers end with one that no text has.
        """
        back = np.arange(1, len(last) + 1)
        own = np.array(last, np.int32)[::-1]
        alike = self._ids[LONGEST + places[:, None] - back] == own
        lengths = alike.cumprod(1).sum(1)
        match = int(lengths.max())
        best = places[lengths == match]
        return match, self._ids[LONGEST + best[:, None] + np.arange(MOST_TOKENS)]


class _GramLinks:
    """Places behind grams of `length` ids: of each hash the newest, of each place the distance to the one
    before it.
    """

    def __init__(self, length: int, size: int) -> None:
        self.length = length
        self._size = size
        buckets = max(size // 2, 1 << 12)
        self._shift = _BITS - (buckets.bit_length() - 1)
        self._heads = np.full(buckets, -1, np.int64)
        self._steps = np.zeros(size, np.int32)

    @property
    def nbytes(self) -> int:
        return self._heads.nbytes + self._steps.nbytes

    def newest(self, number: int, gram: SequenceOf[int]) -> int:
        """The newest place of a hash; -1: there is none."""
        key = number
        for id in gram:
            key = (key * _FACTOR + id + 1) % (1 << _BITS)
        return int(self._heads[(key * _FACTOR) % (1 << _BITS) >> self._shift])

    def step(self, at: int) -> int:
        """How far before the place at `at` the next older one of its hash is; 0: there is none."""
        return int(self._steps[at])

    def add(self, number: int, ids: Ints, first: int) -> None:
        """The answer `ids` int64 [n] of a tenant, whose first token has the place `first`."""
        count = len(ids) - self.length  # places behind whole grams, each with a token
        if count < 1:
            return
        keys = np.full(count, number, np.uint64)
        for i in range(self.length):
            keys = keys * np.uint64(_FACTOR) + ids[i : i + count].astype(np.uint64) + np.uint64(1)
        buckets = (keys * np.uint64(_FACTOR)) >> np.uint64(self._shift)
        order = np.argsort(buckets, kind="stable")
        places, sorted_buckets = first + self.length + order, buckets[order]
        older = np.empty(count, np.int64)
        older[1:] = places[:-1]
        begins = np.ones(count, bool)
        begins[1:] = sorted_buckets[1:] != sorted_buckets[:-1]
        older[begins] = self._heads[sorted_buckets[begins]]
        steps = places - older
        self._steps[places % self._size] = np.where((older >= 0) & (steps < self._size), steps, 0)
        ends = np.append(begins[1:], True)
        self._heads[sorted_buckets[ends]] = places[ends]


def _most_followed(rows: NDArray[np.int32]) -> tuple[int, ...]:
    """`rows` [n, MOST_TOKENS]: what follows each place, the newest first."""
    same = (rows == rows[0]).all(0) & (rows[0] != _END)
    if same.all():
        return tuple(rows[0].tolist())
    common, least = int(same.argmin()), LEAST * len(rows)
    tokens, alike = rows[0, :common].tolist(), rows[:, common:].tolist()
    for at in range(MOST_TOKENS - common):
        column = [row[at] for row in alike]
        token, count = Counter(column).most_common(1)[0]
        if token == _END or count < least:
            break
        tokens.append(token)
        if count < len(alike):
            alike = [row for row in alike if row[at] == token]
    return tuple(tokens)
