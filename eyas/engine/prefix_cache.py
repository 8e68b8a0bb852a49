"""The prefix cache: a tree whose edges are whole pages of tokens, evicted least recently used first.

Where draft KV lives in the same pages, draft row i is made of feature i *and token i + 1*; so a page's key
is then its own tokens and the token after them (`lookahead` 1). The cache owns one reference of each page
it holds; sequences that match take their own.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from eyas.engine.pages import PagePool


class _Node:
    __slots__ = ("children", "key", "offered", "page", "parent", "used")

    def __init__(self, parent: _Node | None, key: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.used = 0
        self.offered = False  # it is in the heap, maybe with a use that is not its last
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixCache:
    """Finds, keeps and evicts pages by the tokens that made them."""

    def __init__(self, pool: PagePool, page_size: int, *, lookahead: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self.lookahead = lookahead
        self._root = _Node(None, (), -1)
        self._clock = itertools.count(1)
        self._leaves: list[tuple[int, int, _Node]] = []  # heap of (used, serial, node), checked when taken
        self._serials = itertools.count()
        self._fruitless = -1  # pages that had been dropped when a search of the whole tree found nothing
        self.held = 0  # pages the cache keeps alive

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest cached prefix, shared for the caller. At least the last token is left out."""
        pages: list[int] = []
        node, now = self._root, next(self._clock)
        for key in self._keys(tokens, len(tokens) - 1):
            child = node.children.get(key)
            if child is None:
                break
            child.used = now
            pages.append(child.page)
            node = child
        self._pool.share(pages)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], rows: int) -> None:
        """Keep the pages whose rows are all below `rows`; a prefix that is already here keeps its pages."""
        node, now = self._root, next(self._clock)
        for page, key in zip(pages, self._keys(tokens, rows), strict=False):
            child = node.children.get(key)
            if child is None:
                child = _Node(node, key, page)
                node.children[key] = child
                self._pool.share([page])
                self.held += 1
            child.used = now
            node = child
        self._offer(node)

    def evict(self, count: int) -> int:
        """Free up to `count` pages that nobody else uses, oldest first; returns how many were freed.

        Leaves are offered when a sequence leaves them behind. One that was in use when its turn came is
        offered again by whoever used it; should it not be, a search of the whole tree finds it.
        """
        freed = self._evict_offered(count)
        if freed < count and self._fruitless != self._pool.drops:
            for node in self._nodes():
                self._offer(node)
            freed += self._evict_offered(count - freed)
            self._fruitless = self._pool.drops if freed < count else -1
        return freed

    def _evict_offered(self, count: int) -> int:
        freed = 0
        while freed < count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.offered = False
            if not self._evictable(node):
                continue  # it is in use, or no longer a leaf
            if node.used != used:
                self._offer(node)
                continue
            parent = node.parent
            assert parent is not None  # the root is never offered
            del parent.children[node.key]
            self._pool.drop([node.page])
            self.held -= 1
            freed += 1
            self._offer(parent)
        return freed

    def _offer(self, node: _Node) -> None:
        """A candidate for eviction, once, if it is a leaf."""
        if node is not self._root and not node.children and not node.offered:
            node.offered = True
            heapq.heappush(self._leaves, (node.used, next(self._serials), node))

    def _keys(self, tokens: Sequence[int], rows: int) -> list[tuple[int, ...]]:
        """Keys of the whole pages below row `rows` whose look-ahead token is known."""
        size = self._page_size
        count = min(rows, len(tokens) - self.lookahead) // size
        return [tuple(tokens[i * size : (i + 1) * size + self.lookahead]) for i in range(max(count, 0))]

    def _evictable(self, node: _Node) -> bool:
        return not node.children and self._pool.owners(node.page) == 1

    def _nodes(self) -> list[_Node]:
        found: list[_Node] = []
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found
