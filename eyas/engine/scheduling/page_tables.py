"""The page tables of sequences: how many pages each group of layers takes, and which a window leaves behind.

Of a group with a window a sequence has the pages of one window and a few ahead. What its window leaves behind
follows at the table's end, unless others read it, or the cache has it: then another one does. So a prompt of
any length goes on with as many pages as it got when it was admitted. Rows of prompts are cached when a window
leaves them: others may share the beginning of one, and its window there.

Where layers have states, a sequence also has a slot for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from eyas.engine.batch.page_table import PageTable
from eyas.engine.batch.sequence import GenerationKind, Sequence
from eyas.engine.kv.groups import KvGroup, KvGroups, most_of_window, pages_of_length
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.kv.states import NO_STATE, PagesAndStates
from eyas.engine.scheduling.limits import BatchLimits
from eyas.engine.scheduling.sequence_states import SequenceStates
from eyas.engine.states.shape import SPAN
from kv_transfer.layout import pages_for

Columns = tuple[list[int], ...]
"""Pages of each group of layers, by position; -1: none."""


def most_rows(pages: int, groups: KvGroups, limits: BatchLimits) -> int:
    """Rows of the longest sequence that `pages` pages can hold."""
    if not any(group.windowed for group in groups):
        return limits.most_rows(pages)
    size, ahead = limits.page_size, limits.rows_ahead
    longest, most = 0, size * pages  # positions; windowed groups alone could hold any number
    while longest < most:
        positions = (longest + most + 1) // 2
        fits = pages_of_length(groups, positions, size, ahead) <= pages
        longest, most = (positions, most) if fits else (longest, positions - 1)
    return longest * size - ahead


class PageTables:
    """Gives sequences pages of `pool`, after those that `cache` does not need, and takes them back."""

    def __init__(self, pool: PagePool, cache: PrefixCache, limits: BatchLimits) -> None:
        self._pool = pool
        self._cache = cache
        self.limits = limits
        self.groups = cache.groups
        self._windowed = [(place, group) for place, group in enumerate(self.groups) if group.windowed]
        self.windowed = bool(self._windowed)
        self.states = None if cache.states is None else SequenceStates(cache, cache.states)

    @property
    def caches_early(self) -> bool:
        """True if pages of a prompt are cached before its end."""
        return self.windowed or self.states is not None

    def make_room(self, count: int, *, spare: bool = False) -> bool:
        """Evicts cached pages until `count` are free, if there are enough; `spare`: as `evict` does."""
        if count > self._pool.free:
            self._cache.evict(count - self._pool.free, spare=spare)
        return count <= self._pool.free

    def needed(self, rows: int) -> int:
        """Pages that a sequence of `rows` rows needs to come from elsewhere, or to be computed here."""
        kinds = GenerationKind.ATTACH, GenerationKind.LOCAL
        both = (self.counts(rows, 0, kind, pulled=kind is GenerationKind.ATTACH) for kind in kinds)
        return max(sum(map(sum, counts)) for counts in both)

    def rows_in(self, pages: int) -> int:
        """Rows of a sequence for which `pages` pages are enough."""
        return most_rows(pages, self.groups, self.limits) + self.limits.rows_ahead

    # --- a sequence gets its first pages ---------------------------------------------------------------

    def counts(self, rows: int, cached: int, kind: GenerationKind, *, pulled: bool) -> list[tuple[int, int]]:
        """The new pages of each group for `rows` rows after `cached` pages: (those that follow, its tail).

        `pulled`: the rows come from elsewhere, so that only the window before their end is needed.
        """
        counts, positions = [], self._pages(rows)
        for group in self.groups:
            if not group.windowed:
                counts.append((positions - cached, 0))
            elif pulled:
                counts.append((positions - self._first(group, rows), 0))
            else:
                ahead = min(positions - cached, self._most(group))
                tail = 0
                if kind is GenerationKind.PREFILL:  # the handle names its last pages ahead
                    tail = positions - max(self._first(group, rows), cached + ahead)
                counts.append((ahead, tail))
        return counts

    def made(
        self, cached: Columns, counts: SequenceOf[tuple[int, int]], rows: int, *, pulled: bool
    ) -> list[PageTable]:
        """Tables with the `cached` pages, which the caller owns, and as many new ones as `counts` says."""
        tables = []
        for group, pages, (ahead, tail) in zip(self.groups, cached, counts, strict=True):
            gone = sum(page < 0 for page in pages)
            if pulled and group.windowed:
                gone = self._first(group, rows)
                pages = [-1] * gone
            table = PageTable([max(page, 0) for page in pages], gone)
            table.pages += self._pool.take(ahead, settled=pulled)
            table.tail += self._pool.take(tail, settled=pulled)
            tables.append(table)
        return tables

    def begin_state(self, cached: Columns, *, pulled: bool) -> int | None:
        """The slot of a sequence that resumes behind `cached` pages; NO_STATE where there are none, None:
        there is no room.
        """
        return NO_STATE if self.states is None else self.states.begin(cached[0], pulled=pulled)

    def drop_columns(self, columns: Columns) -> None:
        """Gives pages of a match back."""
        for pages in columns:
            self._pool.drop(page for page in pages if page >= 0)

    # --- a sequence goes on ----------------------------------------------------------------------------

    def grow(self, seq: Sequence) -> bool:
        """Takes pages for all rows that the coming rounds may write, if there is room for them."""
        rows = seq.kv_len + self.limits.rows_ahead
        if self.windowed:
            self._slide(seq)
            counts = self._missing(seq, rows)
        else:
            counts = [max(self._pages(rows) - len(table.pages), 0) for table in seq.tables]
        total = sum(counts)
        if total and not self.make_room(total):
            return False
        for table, count in zip(seq.tables, counts, strict=True):
            table.pages += self._pool.take(count)
        self._join_tails(seq)
        return True

    def cover(self, seq: Sequence, stop: int) -> int:
        """Takes pages for the rows below `stop` that a chunk may compute now; returns how far they go."""
        if not self.windowed:
            return stop
        self._slide(seq)
        size = self.limits.page_size
        while not self.make_room(sum(counts := self._missing(seq, stop))):
            stop = (stop - 1) // size * size
        for table, count in zip(seq.tables, counts, strict=True):
            table.pages += self._pool.take(count)
        self._join_tails(seq)
        return stop

    def fork(self, leader: Sequence, follower: Sequence, rows: int) -> list[tuple[int, int]] | None:
        """Gives `follower` the leader's first `rows` rows: whole pages shared, the last row's page copied.

        Returns (source, target) in each group, which the caller copies. None: no room, or the leader has
        given back what the follower would read.
        """
        boundary = (rows - 1) // self.limits.page_size
        fresh = self._pages(rows + self.limits.rows_ahead) - boundary
        behind = any(table.gone > self._first(group, rows) for group, table in self._windows(leader))
        if not leader.tables or behind or not self.make_room(fresh * len(self.groups)):
            return None
        if self.states is not None and not self.states.fork(leader, follower):
            return None
        copies = []
        for table in leader.tables:
            self._pool.share(table.pages[table.gone : boundary])
            own = self._pool.take(fresh)
            follower.tables.append(PageTable([*table.pages[:boundary], *own], table.gone))
            copies.append((table.pages[boundary], own[0]))
        return copies

    def give_back(self, seq: Sequence) -> None:
        """Drops all that the sequence has: its state first, whose place in the cache its pages tell."""
        if self.states is not None:
            self.states.give_back(seq)
        for table in seq.tables:
            self._pool.drop(table.owned)
        seq.tables = []

    def complete_rows(self, seq: Sequence) -> int:
        """The number of its rows that may be cached: where pages also hold draft KV, that is complete too."""
        return min(seq.kv_len, seq.draft_len) if self._cache.lookahead else seq.kv_len

    def remember(self, seq: Sequence, rows: int) -> None:
        """Caches the pages of its first `rows` rows."""
        if seq.tables:
            first, *others = seq.tables
            there = [table.there for table in others]
            self._cache.insert(seq.all_tokens(), first.there, rows, there, seq.salt)

    # --- pages that travel -----------------------------------------------------------------------------

    def pages_of_state(self, slot: int) -> list[int]:
        """The pages of a slot of states; none, if there are no states."""
        return self._pool.pages_of(slot) if isinstance(self._pool, PagesAndStates) else []

    def offered(self, seq: Sequence) -> tuple[list[int], list[int]]:
        """Pages of a prompt for another worker: of all its rows, and of windowed groups at its end."""
        rows = len(seq.prompt)
        whole, ends = [], []
        for group, table in zip(self.groups, seq.tables, strict=True):
            if not group.windowed:
                whole += table.pages[: self._pages(rows)]
                continue
            last = self._pages(rows) - len(table.tail)
            ends += [*table.pages[self._first(group, rows) : last], *table.tail]
        return whole, ends + self.pages_of_state(seq.state)

    def seat(self, seq: Sequence, pages: SequenceOf[int], rows: int) -> None:
        """Gives the sequence the `pages` of its pulled rows: those of `made`, one group after the other, then
        those of its state.
        """
        seq.tables, seq.kv_len = self._arrived(pages, rows), rows
        if isinstance(self._pool, PagesAndStates):
            seq.state, seq.bound = self._pool.slot_of(pages), rows // SPAN * SPAN

    def _arrived(self, pages: SequenceOf[int], rows: int) -> list[PageTable]:
        tables, at = [], 0
        for group in self.groups:
            gone = self._first(group, rows) if group.windowed else 0
            count = self._pages(rows) - gone
            tables.append(PageTable([*[0] * gone, *pages[at : at + count]], gone))
            at += count
        return tables

    # --- inside ----------------------------------------------------------------------------------------

    def _pages(self, rows: int) -> int:
        return pages_for(rows, self.limits.page_size)

    def _most(self, group: KvGroup) -> int:
        return most_of_window(group, self.limits.page_size, self.limits.rows_ahead)

    def _first(self, group: KvGroup, rows: int) -> int:
        """The first position that the rows from `rows` on read."""
        return group.first(rows) // self.limits.page_size

    def _end(self, seq: Sequence) -> int:
        """Rows behind which it writes nothing."""
        elsewhere = seq.generation.kind is GenerationKind.PREFILL
        return len(seq) + (0 if elsewhere else self.limits.rows_ahead)

    def _missing(self, seq: Sequence, rows: int) -> list[int]:
        """Pages that each table must take for `rows` rows; its tail needs none."""
        pages, end = self._pages(rows), self._pages(self._end(seq))
        return [max(min(pages, end - len(table.tail)) - len(table.pages), 0) for table in seq.tables]

    def _windows(self, seq: Sequence) -> Iterator[tuple[KvGroup, PageTable]]:
        return ((group, seq.tables[place]) for place, group in self._windowed if seq.tables)

    def _slide(self, seq: Sequence) -> None:
        """Each window has moved on: what lies behind it is replaced at the table's end, if that is short."""
        moved = [
            (group, table, first)
            for group, table in self._windows(seq)
            if (first := self._first(group, seq.kv_len)) > table.gone
        ]
        if any(table.gone * self.limits.page_size < len(seq.prompt) for _, table, _ in moved):
            self.remember(seq, self.complete_rows(seq))
        end = self._pages(self._end(seq)) if moved else 0
        for group, table, first in moved:
            behind, table.gone = table.pages[table.gone : first], first
            most = min(first + self._most(group), end - len(table.tail))
            for page in behind:
                short = len(table.pages) < most
                if short and self._pool.owners(page) == 1 and not self._pool.is_kept(page):
                    table.pages.append(page)
                    continue
                self._pool.drop((page,))
                if short and self.make_room(1):
                    table.pages += self._pool.take(1)

    def _join_tails(self, seq: Sequence) -> None:
        """The tail follows once it is next."""
        for _, table in self._windows(seq):
            if table.tail and len(table.pages) + len(table.tail) == self._pages(self._end(seq)):
                table.pages += table.tail
                table.tail = []
