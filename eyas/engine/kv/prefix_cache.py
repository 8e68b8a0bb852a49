"""The prefix cache: a tree whose edges are whole pages of tokens. The page idle for longest is evicted first.

Where draft KV lives in the same pages, draft row i depends on feature i *and token i + 1*. So the key of a
page is then its own tokens and the token after them (`lookahead` 1). The pool keeps each page of the tree for
the cache; sequences whose prompt matches become owners of its pages.

A text with a salt has a root of its own: it shares no page with the same text under another salt, or none.

Where groups of layers have pages of their own, each edge has one of every group. Those of a windowed group
may go before the others: a prefix can be used as long as the pages in the window before its end are there.
Where layers have states, one can be used if the state at its end is there.
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
    """A page of the tree, and what stands in it. A page that leaves and comes again has another node.

    `page`: of the first group of layers; `others`: of the further ones; -1: it has left. `state`: the slot of
    the state behind the page, or NO_STATE.
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
        """Stands before the first pages of texts with this salt, and is named by it."""
        root = cls(None, (), -1, [])
        root._name = salt
        return root

    @property
    def name(self) -> bytes:
        """A digest of all tokens from the root to the page's key, and of the salt; the salt for a root."""
        return self._name or self._made_name()

    def _made_name(self) -> bytes:
        unnamed, node = [], self
        while not node._name and node.parent is not None:
            unnamed.append(node)
            node = node.parent
        for below in reversed(unnamed):
            below._name = named(node._name, below.key)
            node = below
        return self._name


class PrefixCache:
    """Finds, keeps and evicts pages by the tokens that made them. `groups`: of layers. `states`: of the
    layers that have states instead of pages; None: there are none.
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
        self._changes: dict[CacheNode, bool] = {}  # since they were last told: whether the page came
        self._roots: dict[bytes, CacheNode] = {}  # by salt, while there are pages below
        self._nodes: dict[int, CacheNode] = {}  # by page
        # Every idle leaf, and some other pages; the next one to evict is first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.turnover = 0  # pages that fell idle or were evicted, ever
        self.arrivals = 0  # pages that came to the end of the order of eviction, ever
        self.spared: set[CacheNode] = set()  # on their way to the host: only what runs may evict them
        pool.on_idle = self._fell_idle

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
        """The pages of the longest cached prefix for each group of layers, by position, -1 for one behind the
        window; see `match`.

        `windows`: False: of the groups without one alone, whose prefix may be longer; of others all are -1,
        and no state is needed.
        """
        nodes = self._prefix(tokens, salt, windows=windows)
        pages = [node.page for node in nodes]
        if not self._windowed:
            self._pool.share(pages)
            return (pages,)
        found = [pages, *([node.others[i] for node in nodes] for i in range(len(self.groups) - 1))]
        for place, group in self._windowed:
            first = group.first(len(nodes) * self.shape.size) // self.shape.size if windows else len(nodes)
            found[place][:first] = [-1] * first
        for column in found:
            self._pool.share(page for page in column if page >= 0)
        return tuple(found)

    def reach(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """The number of pages that `match` would give; nothing changes."""
        return len(self._prefix(tokens, salt))

    def whole_rows(self, tokens: Sequence[int], pages: Sequence[int], salt: bytes = b"") -> int:
        """The rows of these tokens whose pages are cached, with a state or without one. `pages`: of a
        sequence with these tokens, from the first on.
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
        """The longest prefix of these whose windows before its end are there."""
        longest, gaps = 0, [0] * len(self.groups)  # behind the last position without a page
        for count, node in enumerate(nodes, 1):
            usable = True
            for place, group in self._windowed:
                if (node.others[place - 1] if place else node.page) < 0:
                    gaps[place] = count
                usable = usable and gaps[place] <= group.first(count * self.shape.size) // self.shape.size
            longest = count if usable else longest
        return longest

    def state_behind(self, pages: Sequence[int]) -> int:
        """The slot of the state at the end of `pages`, a match; NO_STATE: they are none."""
        return self._nodes[pages[-1]].state if pages else NO_STATE

    def at(
        self, tokens: Sequence[int], rows: int, pages: Sequence[int], salt: bytes = b""
    ) -> CacheNode | None:
        """The node behind `rows` rows of these tokens; None: they are no whole pages, or not cached. `pages`:
        of a sequence with these tokens, from the first on.
        """
        count, rest = divmod(rows, self.shape.size)
        node, known = self._reached(tokens, rows, pages, salt)
        return None if known < count or rest or node.parent is None else node

    def _reached(
        self, tokens: Sequence[int], rows: int, pages: Sequence[int], salt: bytes
    ) -> tuple[CacheNode, int]:
        """The last cached node of the first `rows` rows, and how many pages it is behind. `pages`: as of
        `at`.
        """
        node, known = self._behind(pages[: rows // self.shape.size], salt)
        for key in self._keys(tokens, rows, known):
            if key not in node.children:
                break
            node, known = node.children[key], known + 1
        return node, known

    def _behind(self, pages: Sequence[int], salt: bytes) -> tuple[CacheNode, int]:
        """The deepest node that one of a sequence's pages is of, and how many pages it is behind: what lies
        before it needs no look at its tokens.
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
        """Caches the pages whose rows all lie below `rows`. A prefix that is cached keeps its own pages.

        `others`: those of further groups of layers; -1 in any of them: there is none.
        """
        node, known = self._root(salt), 0
        if not self._windowed and not others:
            node, known = self._behind(pages[: rows // self.shape.size], salt)
            self._refresh_to(node)
        beside = zip(*others, strict=True) if others else itertools.repeat(())
        own = itertools.islice(pages, known, None)
        for page, more, key in zip(own, beside, self._keys(tokens, rows, known), strict=False):
            child = node.children.get(key)
            if child is None:
                child = CacheNode(node, key, page, [*more])
                if node.parent is None:
                    self._roots[salt] = node
                node.children[key] = child
                self._changes[child] = True
                for each in (page, *more):
                    self._take_in(child, each)
            elif more or child.page != page:
                self._join(child, page, more)
            elif page in self._idle:
                self._refresh(page)
            node = child
        if self.groups[0].windowed:
            self._prune(node)

    def _refresh_to(self, node: CacheNode) -> None:
        """Refreshes a path, as if the way to a node were used again."""
        pages = []
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        for page in reversed(pages):
            if page in self._idle:
                self._refresh(page)

    def _take_in(self, node: CacheNode, page: int) -> None:
        if page >= 0:
            self._nodes[page] = node
            self._pool.keep(page)

    def _join(self, node: CacheNode, page: int, others: Sequence[int]) -> None:
        """Takes in the pages of another sequence with the same prefix, where the node has none any more."""
        for place, (here, there) in enumerate(zip((node.page, *node.others), (page, *others), strict=True)):
            if here in self._idle:
                self._refresh(here)
            elif here < 0 <= there:
                if place:
                    node.others[place - 1] = there
                else:
                    node.page = there
                self._take_in(node, there)

    def _refresh(self, page: int) -> None:
        """An idle page is the last one to be evicted again."""
        self._idle.move_to_end(page)
        self.arrivals += 1

    def evict(self, count: int, *, spare: bool = False) -> int:
        """Frees idle pages until `count` are freed, those idle for longest first; returns how many it freed.

        `spare`: none of the spared ones.

        A page that is used again, or has pages below it, leaves the list and returns when that changes. So
        the work is proportional to the pages freed and used, not to the size of the cache.
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
        for node in branch:  # which grows meanwhile
            branch += node.children.values()
        for node in reversed(branch):
            self._remove(node)

    def next_out(self, count: int) -> list[CacheNode]:
        """The first `count` pages that `evict` looks at, in its order, without those in use."""
        first = islice(self._idle, count)
        return [self._nodes[page] for page in first if not self._pool.owners(page)]

    def last_in(self, count: int) -> list[CacheNode]:
        """The `count` pages that fell idle last, the first of them first, without those in use."""
        last = list(islice(reversed(self._idle), count))
        return [self._nodes[page] for page in reversed(last) if not self._pool.owners(page)]

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

    def origins(self, most: int) -> tuple[bytes, bytes, bytes]:
        """The context of the pages that `news` gives next: (packed short names of the pages before them,
        zeros where there is none; their own tokens, packed; the first bytes of the salts of first pages, as
        long as a short name, zeros elsewhere).
        """
        came = [node for node, here in islice(self._changes.items(), most) if here]
        before, salts = [], []
        for node in came:
            assert node.parent is not None  # roots do not come
            name, is_first = node.parent.name[:SHORT_BYTES].ljust(SHORT_BYTES, b"\0"), not node.parent.parent
            before.append(bytes(SHORT_BYTES) if is_first else name)
            salts.append(name if is_first else bytes(SHORT_BYTES))
        tokens = (packed(node.key[: self.shape.size]) for node in came)
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
        """Removes a leaf; returns how many of its pages are free now. One in use goes with its last owner."""
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
                self._leave(page)
        if parent.parent is None and not parent.children:
            del self._roots[parent.name]
        bare = parent.parent is not None and not parent.children and parent.page >= 0
        if bare and not self._pool.owners(parent.page) and parent.page not in self._idle:
            self._idle[parent.page] = None
            self._idle.move_to_end(parent.page, last=False)
        return freed

    def _detach(self, node: CacheNode, page: int) -> None:
        """Frees a page of a windowed group. Its node stays while it has another page, or a child."""
        if page == node.page:
            node.page = -1
        else:
            node.others[node.others.index(page)] = -1
        self._leave(page)
        self._prune(node)

    def _leave(self, page: int) -> None:
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
        """Kept with the first page below it."""
        return self._roots.get(salt) or CacheNode.root(salt)

    def _fell_idle(self, page: int) -> None:
        self._idle[page] = None
        self._idle.move_to_end(page)
        self.turnover += 1
        self.arrivals += 1

    def _keys(self, tokens: Sequence[int], rows: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        """The keys, from number `first` on, of the whole pages below `rows` whose look-ahead is known."""
        return self.shape.keys(tokens, rows, first)
