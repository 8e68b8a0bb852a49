"""The prefix cache: a tree whose edges are whole pages of tokens. The page idle for longest is evicted first.

Where draft KV lives in the same pages, draft row i depends on feature i *and token i + 1*. So the key of a
page is then its own tokens and the token after them (`lookahead` 1). The pool keeps each page of the tree for
the cache; sequences whose prompt matches become owners of its pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from eyas.common.page_names import SHORT_BYTES, PageShape, named
from eyas.engine.kv.pages import PagePool


class CacheNode:
    """A page of the tree, and what stands in it. A page that leaves and comes again has another node."""

    __slots__ = ("_name", "children", "key", "page", "parent")

    def __init__(self, parent: CacheNode | None, key: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[tuple[int, ...], CacheNode] = {}
        self._name = b""

    @property
    def name(self) -> bytes:
        """A digest of all tokens from the root to the page's key; empty for the root."""
        unnamed, node = [], self
        while not node._name and node.parent is not None:
            unnamed.append(node)
            node = node.parent
        for below in reversed(unnamed):
            below._name = named(node._name, below.key)
            node = below
        return self._name


class PrefixCache:
    """Finds, keeps and evicts pages by the tokens that made them."""

    def __init__(self, pool: PagePool, page_size: int, *, lookahead: int) -> None:
        self._pool = pool
        self.shape = PageShape(page_size, lookahead)
        self.lookahead = lookahead
        self._changes: dict[CacheNode, bool] = {}  # since they were last told: whether the page came
        self._root = CacheNode(None, (), -1)
        self._nodes: dict[int, CacheNode] = {}  # by page
        # Every idle leaf, and some other pages; the next one to evict is first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.turnover = 0  # pages that fell idle or were evicted, ever
        pool.on_idle = self._fell_idle

    @property
    def cached_pages(self) -> int:
        """The number of pages that the cache keeps."""
        return len(self._nodes)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest cached prefix without the last token. The caller becomes their owner."""
        pages = self._prefix(tokens)
        self._pool.share(pages)
        return pages

    def reach(self, tokens: Sequence[int]) -> int:
        """The number of pages that `match` would give; nothing changes."""
        return len(self._prefix(tokens))

    def _prefix(self, tokens: Sequence[int]) -> list[int]:
        pages: list[int] = []
        node = self._root
        for key in self._keys(tokens, len(tokens) - 1):
            child = node.children.get(key)
            if child is None:
                break
            pages.append(child.page)
            node = child
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], rows: int) -> None:
        """Caches the pages whose rows all lie below `rows`. A prefix that is cached keeps its own pages."""
        node = self._root
        for page, key in zip(pages, self._keys(tokens, rows), strict=False):
            child = node.children.get(key)
            if child is None:
                child = CacheNode(node, key, page)
                node.children[key] = self._nodes[page] = child
                self._pool.keep(page)
                self._changes[child] = True
            elif child.page in self._idle:
                self._idle.move_to_end(child.page)  # another sequence computed the same prefix
            node = child

    def evict(self, count: int) -> int:
        """Frees up to `count` idle pages, those idle for longest first; returns how many it freed.

        A page that is used again, or has pages below it, leaves the list and returns when that changes. So
        the work is proportional to the pages freed and used, not to the size of the cache.
        """
        freed = 0
        while freed < count and self._idle:
            page, _ = self._idle.popitem(last=False)
            node = self._nodes[page]
            if node.children or self._pool.owners(page):
                continue
            self._remove(node)
            freed += 1
        return freed

    def next_out(self, count: int) -> list[CacheNode]:
        """The first `count` pages that `evict` looks at, in its order, without those in use."""
        first = islice(self._idle, count)
        return [self._nodes[page] for page in first if not self._pool.owners(page)]

    @property
    def untold(self) -> bool:
        """True if `news` has something."""
        return bool(self._changes)

    def news(self, most: int) -> tuple[bytes, bytes]:
        """(packed short names of pages that came, of pages that left) since they were last asked for.

        At most `most` pages, the oldest changes first. A page that came and left in between is not named.
        """
        names: dict[bool, list[bytes]] = {True: [], False: []}
        for node in list(islice(self._changes, most)):
            names[self._changes.pop(node)].append(node.name[:SHORT_BYTES])
        return b"".join(names[True]), b"".join(names[False])

    def holds(self, node: CacheNode) -> bool:
        """True if the page of `node` has stayed in the cache since the node was made."""
        return self._nodes.get(node.page) is node

    def names_after(self, tokens: Sequence[int], pages: Sequence[int]) -> Iterator[bytes]:
        """The names of the pages that follow `pages`, a match of `tokens`, without the last token."""
        name = self._nodes[pages[-1]].name if pages else b""
        for key in self._keys(tokens, len(tokens) - 1, first=len(pages)):
            name = named(name, key)
            yield name

    def _remove(self, leaf: CacheNode) -> None:
        parent = leaf.parent
        assert parent is not None  # the root is never idle
        del parent.children[leaf.key], self._nodes[leaf.page]
        if self._changes.pop(leaf, None) is None:
            self._changes[leaf] = False
        self._pool.forget(leaf.page)
        self.turnover += 1
        bare = parent is not self._root and not parent.children and not self._pool.owners(parent.page)
        if bare and parent.page not in self._idle:
            self._idle[parent.page] = None
            self._idle.move_to_end(parent.page, last=False)

    def _fell_idle(self, page: int) -> None:
        self._idle[page] = None
        self._idle.move_to_end(page)
        self.turnover += 1

    def _keys(self, tokens: Sequence[int], rows: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        """The keys, from number `first` on, of the whole pages below `rows` whose look-ahead is known."""
        return self.shape.keys(tokens, rows, first)
