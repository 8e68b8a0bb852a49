"""The groups of layers that share page tables: rows of one group see the same rows before them.

A page has as many layers as the model has that see all rows, and each group has pages of its own, of one
pool. So those of a window's group can go as soon as no row will see them, while those of the others stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kv_transfer.layout import HandlePages, pages_for

MOST_GROUPS = 8
GRAIN = 64
"""Attention reads rows in blocks of this many, of which it leaves out those that it does not see."""

_Sight: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class KvGroup:
    """`layers` of a model, in the order of a page's. A row of them sees the last `window` rows, itself the
    last of them (0: all), and none before the last multiple of `chunk` (0: all).
    """

    layers: tuple[int, ...]
    window: int = 0
    chunk: int = 0

    @property
    def windowed(self) -> bool:
        """True if rows are not seen for ever."""
        return bool(self.window or self.chunk)

    @property
    def reach(self) -> int:
        """The most rows that are read of those before any row."""
        return min(size for size in (self.window, self.chunk) if size) + GRAIN

    def first(self, row: int) -> int:
        """The first row that may be read for `row`, or for one behind it."""
        first = max(row - self.window + 1, 0) if self.window else 0
        if self.chunk:
            first = max(first, row // self.chunk * self.chunk)
        return first // GRAIN * GRAIN


KvGroups: TypeAlias = tuple[KvGroup, ...]


def one_group(layers: int) -> KvGroups:
    """All layers in one group that sees all rows: a page has all of them."""
    return (KvGroup(tuple(range(layers))),)


ONE_GROUP = one_group(1)
"""Of layers that need not be told apart."""


def kv_groups(sights: Sequence[_Sight]) -> KvGroups:
    """The groups of layers with these (window, chunk); those without either are the first one.

    A page has as many layers as the first group, or as the largest one if every layer has a window. One group
    of all layers if the others' last pages would have too many places that no layer takes.
    """
    kinds: dict[_Sight, list[int]] = {(0, 0): []}
    for layer, sight in enumerate(sights):
        kinds.setdefault(sight, []).append(layer)
    full = kinds.pop((0, 0))
    each = _page_layers(len(full), [len(layers) for layers in kinds.values()])
    if not kinds or not each:
        return one_group(len(sights))
    groups = [KvGroup(tuple(full))] if full else []
    for sight, layers in kinds.items():
        groups += [KvGroup(tuple(layers[i : i + each]), *sight) for i in range(0, len(layers), each)]
    return tuple(groups)


def handle_pages(groups: KvGroups, rows: int, page_size: int, state: int = 0) -> HandlePages:
    """The pages of a prompt that another worker needs: of windowed groups, what the rows behind it see.
    `state`: pages of its state, which stand behind them.
    """
    count = pages_for(rows, page_size)
    ends = [count - group.first(rows) // page_size for group in groups if group.windowed]
    return HandlePages((len(groups) - len(ends)) * count, sum(ends) + state)


def most_of_window(group: KvGroup, page_size: int, rows_ahead: int) -> int:
    """Pages of a windowed group that a sequence has at once, however long it is: the window's, those that the
    next rounds write, and one more so that a prompt always goes on.
    """
    return pages_for(group.reach + rows_ahead, page_size) + 2


def pages_of_length(groups: KvGroups, positions: int, page_size: int, rows_ahead: int) -> int:
    """The pages of all groups that a sequence of `positions` pages in each may take, whatever of it is cached
    or leased: a window before its cached prefix, the one that moves on, and one before its end.
    """
    each = (most_of_window(group, page_size, rows_ahead) for group in groups if group.windowed)
    windowed = [min(positions, 3 * most) for most in each]
    return (len(groups) - len(windowed)) * positions + sum(windowed)


def pages_of_longest(groups: KvGroups, rows: int, page_size: int, rows_ahead: int) -> int:
    """Pages of all layers, one of each group, that a sequence of `rows` tokens may take."""
    pages = pages_of_length(groups, pages_for(rows + rows_ahead, page_size), page_size, rows_ahead)
    return -(-pages // len(groups))


def page_layers(groups: Iterable[KvGroup]) -> int:
    """The number of layers of a page."""
    return max(len(group.layers) for group in groups)


def _page_layers(full: int, windowed: Sequence[int]) -> int:
    """The number of layers of a page; 0: it is not worth it."""
    candidates = [full] if full else range(max(windowed, default=0), 0, -1)
    total = full + sum(windowed)
    for each in candidates:
        groups = sum(-(-count // each) for count in windowed) + bool(full)
        if groups <= MOST_GROUPS and 4 * groups * each <= 5 * total:
            return each
    return 0
