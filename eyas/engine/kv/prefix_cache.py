"""The prefix cache: a radix tree whose edges are whole pages of tokens, evicted in LRU order.

If draft KV is stored in the same pages, draft row i depends on feature i *and token i + 1*. The key of a page
is then its own tokens and the token after them (`lookahead` 1). The pool keeps each page of the tree for the
cache; a sequence whose prompt matches becomes an owner of the matched pages.

Each salt has its own root: texts with different salts, or with and without one, share no pages.

If groups of layers have separate pages, each edge has one page per group. Pages of groups with a window may
be evicted before the others: a prefix is usable while the pages of the window before its end are cached. If
layers have recurrent states, a prefix is usable if the state at its end is cached.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from eyas.common.page_names import SHORT_BYTES, PageShape, named, packed
from eyas.engine.kv.groups import ONE_GROUP, KvGroups
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.states import NO_STATE, StateSlots


class CacheNode:
    """A node of the tree: one page of tokens. A page that is evicted and cached again gets a new node.

    `page`: the page of the first group of layers; `others`: of the further groups; -1 if evicted. `state`:
    the slot of the recurrent state behind the page, or NO_STATE.
    """

    __slots__ = ("_name", "children", "key", "others", "page", "parent", "state")

    def __init__(self, parent: CacheNode | None, key: tuple[int, ...], page: int, others: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.others = others
        self.state = NO_STATE
        self.children: dict[tuple[int, ...], CacheNode] = {}
        self._name = b""

    @classmethod
    def root(cls, salt: bytes) -> CacheNode:
        """The root of all texts with this salt, which is its name."""
        root = cls(None, (), -1, [])
        root._name = salt
        return root

    @property
    def name(self) -> bytes:
        """A digest of the salt and of all tokens up to the end of the page's key; for a root, the salt."""
        return self._name or self._compute_name()

    def _compute_name(self) -> bytes:
        unnamed, node = [], self
        while not node._name and node.parent is not None:
            unnamed.append(node)
            node = node.parent
        for below in reversed(unnamed):
            below._name = named(node._name, below.key)
            node = below
        return self._name


class PrefixCache:
    """Finds, keeps and evicts pages by their tokens. `groups`: the groups of layers with separate pages.
    `states`: the state slots of layers with recurrent states; None for models without such layers.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        *,
        lookahead: int,
        groups: KvGroups = ONE_GROUP,
        states: StateSlots | None = None,
    ) -> None:
        self._pool = pool
        self.states = states
        self.groups = groups
        self._windowed = [(place, group) for place, group in enumerate(groups) if group.windowed]
        self.shape = PageShape(page_size, lookahead)
        self.lookahead = lookahead
        self._changes: dict[CacheNode, bool] = {}  # to report: True: cached, False: evicted
        self._roots: dict[bytes, CacheNode] = {}  # by salt, while there are pages below
        self._nodes: dict[int, CacheNode] = {}  # by page
        # Every idle leaf, and some other pages; the next one to evict is first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.turnover = 0  # running total of pages that became idle or were evicted
        self.arrivals = 0  # running total of pages that moved to the end of the LRU order
        self.spared: set[CacheNode] = set()  # being copied to the host: `evict(spare=True)` skips them
        pool.on_idle = self._page_idle

    @property
    def cached_pages(self) -> int:
        """The number of pages that the cache keeps."""
        return len(self._nodes)

    def match(self, tokens: Sequence[int], salt: bytes = b"") -> list[int]:
        """The pages of the longest cached prefix without the last token. The caller becomes their owner."""
        return self.matches(tokens, salt)[0]

    def matches(
        self, tokens: Sequence[int], salt: bytes = b"", *, windows: bool = True
    ) -> tuple[list[int], ...]:
        """The pages of the longest usable prefix for each group of layers, by position; -1 for pages that the
        window has passed. See `match`.

        `windows` False: the longest prefix of the groups without windows, which may be longer; pages of the
        other groups are all -1, and no state is needed.
        """
        nodes = self._prefix(tokens, salt, windows=windows)
        pages = [node.page for node in nodes]
        if not self._windowed:
            self._pool.share(pages)
            return (pages,)
        tables = [pages, *([node.others[i] for node in nodes] for i in range(len(self.groups) - 1))]
        for place, group in self._windowed:
            first = group.first(len(nodes) * self.shape.size) // self.shape.size if windows else len(nodes)
            tables[place][:first] = [-1] * first
        for column in tables:
            self._pool.share(page for page in column if page >= 0)
        return tuple(tables)

    def reach(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """The number of pages that `match` would return; changes nothing."""
        return len(self._prefix(tokens, salt))

    def whole_rows(self, tokens: Sequence[int], pages: Sequence[int], salt: bytes = b"") -> int:
        """The number of rows of these tokens whose pages are cached, whether or not a state is. `pages`:
        those of a sequence with these tokens.
        """
        return self._reached(tokens, len(tokens) - 1, pages, salt)[1] * self.shape.size

    def _prefix(self, tokens: Sequence[int], salt: bytes, *, windows: bool = True) -> list[CacheNode]:
        nodes: list[CacheNode] = []
        node = self._root(salt)
        for key in self._keys(tokens, len(tokens) - 1):
            child = node.children.get(key)
            if child is None:
                break
            nodes.append(child)
            node = child
        if self.states is not None and windows:
            while nodes and nodes[-1].state == NO_STATE:
                nodes.pop()
            return nodes
        if not self._windowed:
            return nodes
        if windows:
            return nodes[: self._usable(nodes)]
        return nodes if not self.groups[0].windowed else []

    def _usable(self, nodes: Sequence[CacheNode]) -> int:
        """The length of the longest prefix of these nodes whose windows before its end are cached."""
        longest, gaps = 0, [0] * len(self.groups)  # per group: the position after the last missing page
        for count, node in enumerate(nodes, 1):
            usable = True
            for place, group in self._windowed:
                if (node.others[place - 1] if place else node.page) < 0:
                    gaps[place] = count
                usable = usable and gaps[place] <= group.first(count * self.shape.size) // self.shape.size
            longest = count if usable else longest
        return longest

    def state_behind(self, pages: Sequence[int]) -> int:
        """The slot of the state at the end of `pages`, the pages of a match; NO_STATE if there are none."""
        return self._nodes[pages[-1]].state if pages else NO_STATE

    def at(
        self, tokens: Sequence[int], rows: int, pages: Sequence[int], salt: bytes = b""
    ) -> CacheNode | None:
        """The node of the last of `rows` rows of these tokens; None unless these are whole, cached pages.
        `pages`: those of a sequence with these tokens.
        """
        count, rest = divmod(rows, self.shape.size)
        node, known = self._reached(tokens, rows, pages, salt)
        return None if known < count or rest or node.parent is None else node

    def _reached(
        self, tokens: Sequence[int], rows: int, pages: Sequence[int], salt: bytes
    ) -> tuple[CacheNode, int]:
        """The deepest cached node within the first `rows` rows, and its depth in pages. `pages`: as of
        `at`.
        """
        node, known = self._behind(pages[: rows // self.shape.size], salt)
        for key in self._keys(tokens, rows, known):
            if key not in node.children:
                break
            node, known = node.children[key], known + 1
        return node, known

    def _behind(self, pages: Sequence[int], salt: bytes) -> tuple[CacheNode, int]:
        """The deepest node that has one of a sequence's pages, and its depth: the tokens before it need not
        be compared.
        """
        for count in range(len(pages), 0, -1):
            if (node := self._nodes.get(pages[count - 1])) is not None:
                return node, count
        return self._root(salt), 0

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        rows: int,
        others: Sequence[Sequence[int]] = (),
        salt: bytes = b"",
    ) -> None:
        """Caches the pages whose rows all lie below `rows`. A prefix that is already cached keeps its pages.

        `others`: the pages of further groups of layers; -1 for a missing page.
        """
        node, known = self._root(salt), 0
        if not self._windowed and not others:
            node, known = self._behind(pages[: rows // self.shape.size], salt)
            self._refresh_to(node)
        further = zip(*others, strict=True) if others else itertools.repeat(())
        own = itertools.islice(pages, known, None)
        for page, more, key in zip(own, further, self._keys(tokens, rows, known), strict=False):
            child = node.children.get(key)
            if child is None:
                child = CacheNode(node, key, page, [*more])
                if node.parent is None:
                    self._roots[salt] = node
                node.children[key] = child
                self._changes[child] = True
                for cached in (page, *more):
                    self._keep(child, cached)
            elif more or child.page != page:
                self._fill_gaps(child, page, more)
            elif page in self._idle:
                self._refresh(page)
            node = child
        if self.groups[0].windowed:
            self._prune(node)

    def _refresh_to(self, node: CacheNode) -> None:
        """Marks the path to a node as recently used."""
        pages = []
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        for page in reversed(pages):
            if page in self._idle:
                self._refresh(page)

    def _keep(self, node: CacheNode, page: int) -> None:
        if page >= 0:
            self._nodes[page] = node
            self._pool.keep(page)

    def _fill_gaps(self, node: CacheNode, page: int, others: Sequence[int]) -> None:
        """Replaces evicted pages of a node by those of another sequence with the same prefix."""
        for place, (own, new) in enumerate(zip((node.page, *node.others), (page, *others), strict=True)):
            if own in self._idle:
                self._refresh(own)
            elif own < 0 <= new:
                if place:
                    node.others[place - 1] = new
                else:
                    node.page = new
                self._keep(node, new)

    def _refresh(self, page: int) -> None:
        """Moves an idle page to the end of the LRU order."""
        self._idle.move_to_end(page)
        self.arrivals += 1

    def evict(self, count: int, *, spare: bool = False) -> int:
        """Frees up to `count` idle pages in LRU order; returns the number of freed pages.

        `spare`: skip the pages in `spared`. A page that is used again, or has children, leaves the LRU list
        and returns when that changes, so the work is proportional to the pages freed and used, not to the
        cache.
        """
        freed, left = 0, list[int]()
        while freed < count and self._idle:
            page, _ = self._idle.popitem(last=False)
            if self._pool.owners(page):
                continue
            node = self._nodes[page]
            if spare and node in self.spared:
                left.append(page)
            elif page != node.page or self.groups[0].windowed:
                self._detach(node, page)
                freed += 1
            elif not node.children:
                freed += self._remove(node)
        for page in reversed(left):
            self._idle[page] = None
            self._idle.move_to_end(page, last=False)
        return freed

    def cut(self, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Removes every prefix that begins with the first page of these tokens, in use or not."""
        first, root = next(iter(self._keys(tokens, len(tokens))), None), self._root(salt)
        branch = [root.children[first]] if first in root.children else []
        for node in branch:  # `branch` grows in the loop
            branch += node.children.values()
        for node in reversed(branch):
            self._remove(node)

    def next_out(self, count: int) -> list[CacheNode]:
        """The nodes of the first `count` pages in LRU order, without those in use."""
        first = islice(self._idle, count)
        return [self._nodes[page] for page in first if not self._pool.owners(page)]

    def last_in(self, count: int) -> list[CacheNode]:
        """The nodes of the last `count` pages in LRU order, without those in use."""
        last = list(islice(reversed(self._idle), count))
        return [self._nodes[page] for page in reversed(last) if not self._pool.owners(page)]

    @property
    def changed(self) -> bool:
        """True if `take_changes` has something to report."""
        return bool(self._changes)

    def take_changes(self, most: int) -> tuple[bytes, bytes]:
        """(packed short names of newly cached pages, of evicted pages) since the last call.

        At most `most` pages, the oldest changes first. A page that was cached and evicted between two calls
        is not reported.
        """
        names: dict[bool, list[bytes]] = {True: [], False: []}
        for node in list(islice(self._changes, most)):
            names[self._changes.pop(node)].append(node.name[:SHORT_BYTES])
        return b"".join(names[True]), b"".join(names[False])

    def origins(self, most: int) -> tuple[bytes, bytes, bytes]:
        """The context of the cached pages that `take_changes` reports next: (packed short names of their
        parent pages, zeros for first pages; their own tokens, packed; for first pages the beginning of the
        salt, as long as a short name, zeros for others).
        """
        added = [node for node, cached in islice(self._changes.items(), most) if cached]
        before, salts = [], []
        for node in added:
            assert node.parent is not None  # roots are not reported
            name, is_first = node.parent.name[:SHORT_BYTES].ljust(SHORT_BYTES, b"\0"), not node.parent.parent
            before.append(bytes(SHORT_BYTES) if is_first else name)
            salts.append(name if is_first else bytes(SHORT_BYTES))
        tokens = (packed(node.key[: self.shape.size]) for node in added)
        return b"".join(before), b"".join(tokens), b"".join(salts)

    def holds(self, node: CacheNode) -> bool:
        """True if the page of `node` has stayed in the cache since the node was made."""
        return self._nodes.get(node.page) is node

    def names_after(self, tokens: Sequence[int], pages: Sequence[int], salt: bytes = b"") -> Iterator[bytes]:
        """The names of the pages that follow `pages`, a match of `tokens`, without the last token."""
        name = self._nodes[pages[-1]].name if pages else salt
        for key in self._keys(tokens, len(tokens) - 1, first=len(pages)):
            name = named(name, key)
            yield name

    def _remove(self, leaf: CacheNode) -> int:
        """Removes a leaf; returns the number of its pages that are free now. A used page is freed with its
        last owner.
        """
        parent = leaf.parent
        assert parent is not None  # the root is never idle
        del parent.children[leaf.key]
        if self._changes.pop(leaf, None) is None:
            self._changes[leaf] = False
        freed = 0
        if self.states is not None:
            self.states.forget(leaf)
        for page in (leaf.page, *leaf.others):
            if page >= 0:
                self._idle.pop(page, None)
                freed += not self._pool.owners(page)
                self._drop_page(page)
        if parent.parent is None and not parent.children:
            del self._roots[parent.name]
        bare = parent.parent is not None and not parent.children and parent.page >= 0
        if bare and not self._pool.owners(parent.page) and parent.page not in self._idle:
            self._idle[parent.page] = None
            self._idle.move_to_end(parent.page, last=False)
        return freed

    def _detach(self, node: CacheNode, page: int) -> None:
        """Frees a page of a windowed group. Its node stays while it has another page or a child."""
        if page == node.page:
            node.page = -1
        else:
            node.others[node.others.index(page)] = -1
        self._drop_page(page)
        self._prune(node)

    def _drop_page(self, page: int) -> None:
        del self._nodes[page]
        self._pool.forget(page)
        self.turnover += 1

    def _prune(self, node: CacheNode) -> None:
        """Removes nodes without a page or a child, from `node` up."""
        while node.parent is not None and not node.children and max(node.page, *node.others, -1) < 0:
            parent = node.parent
            self._remove(node)
            node = parent

    def _root(self, salt: bytes) -> CacheNode:
        """The root of a salt; it is stored when its first page is cached."""
        return self._roots.get(salt) or CacheNode.root(salt)

    def _page_idle(self, page: int) -> None:
        self._idle[page] = None
        self._idle.move_to_end(page)
        self.turnover += 1
        self.arrivals += 1

    def _keys(self, tokens: Sequence[int], rows: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        """The keys, from number `first` on, of the whole pages below `rows` whose look-ahead is known."""
        return self.shape.keys(tokens, rows, first)
