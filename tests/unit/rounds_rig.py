"""Random rounds on the device tables, and what the plain host code says they should become."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.batch.tree import DraftTree
from eyas.engine.kernels.drafts.accepted_path import PathRows
from eyas.engine.kernels.drafts.rounds import FACTS, RoundBatch, RoundRows, RoundVerdicts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 4
VOCAB = 3  # few tokens: drafts are often right, and siblings often equal


@dataclass(frozen=True)
class Case:
    """Sequences b = 0 .. B - 1, the last of them padding, and the trees that hang below their roots."""

    tables: SlotTables
    slots: list[int]
    trees: dict[int, DraftTree]  # by slot; none: nothing is drafted

    @property
    def batch(self) -> RoundBatch:
        slots = torch.tensor(self.slots, dtype=torch.int32, device=DEVICE)
        return RoundBatch(self.tables, slots, PAGE)

    def tree(self, slot: int) -> DraftTree:
        return self.trees.get(slot, DraftTree([], []))

    def row(self, slot: int, logical: int) -> int:
        """The physical row; -1 past the page table."""
        pages = self.tables.pages[slot].tolist()
        page = logical // PAGE
        return pages[page] * PAGE + logical % PAGE if page < len(pages) else -1


def random_tree(rng: random.Random, size: int) -> DraftTree:
    parents = [rng.choice([-1, node - 1, rng.randint(-1, node - 1)]) for node in range(size)]
    return DraftTree([rng.randrange(VOCAB) for _ in range(size)], parents)


def chain(rng: random.Random, size: int) -> DraftTree:
    return DraftTree([rng.randrange(VOCAB) for _ in range(size)], range(-1, size - 1))


def put_tree(tables: SlotTables, slot: int, tree: DraftTree) -> None:
    """As the host would: the nodes' tables of a slot; nodes beyond the tree have no draft."""
    tables.drafts[slot] = -1
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        tables.drafts[slot, node] = token
        tables.parents[slot, node] = parent
        tables.mask[:, slot, node + 1] = words_of(visible(tree, node + 1), len(tables.mask))
        tables.depth[slot, node + 1] = tree.depth(node)


def visible(tree: DraftTree, node: int) -> int:
    """The bits of what `node` (0: the root) sees."""
    return 1 | sum(1 << (above + 1) for above in (tree.path(node - 1) if node else []))


def words_of(bits: int, words: int) -> torch.Tensor:
    """The bits in signed words of 64."""
    parts = [(bits >> (64 * i)) % (1 << 64) for i in range(words)]
    signed = [part - (1 << 64) if part >> 63 else part for part in parts]
    return torch.tensor(signed, device=DEVICE)


def random_case(seed: int, width: int, batch: int = 5, grow=random_tree) -> Case:
    """One sequence stands at the end of its page table; the last of the batch is padding."""
    rng = random.Random(seed)
    slots = batch + 3
    max_pages = 6 + width // PAGE
    tables = SlotTables(TableSizes(slots, max_pages, width), DEVICE)
    order = torch.randperm(slots * max_pages, generator=torch.Generator().manual_seed(seed))
    tables.pages.copy_(order.view(slots, max_pages).int())
    tables.pages[-1] = 0
    taken = rng.sample(range(slots - 1), batch - 1)
    trees = {}
    for slot in taken:
        tables.length[slot] = rng.randrange(1, 4 * PAGE)
        tables.root[slot] = rng.randrange(VOCAB)
        tables.seed[slot] = rng.getrandbits(63) * rng.choice([-1, 1])
        tables.speculative[slot] = 0 if rng.random() < 0.3 else rng.choice((1, 2, 32, 32))
        if width > 1 and rng.random() < 0.9:
            trees[slot] = grow(rng, rng.choice([width - 1, rng.randrange(width)]))
            put_tree(tables, slot, trees[slot])
    tables.length[taken[0]] = max_pages * PAGE - 2
    return Case(tables, [*taken, slots - 1], trees)


def new_rows(batch: int, width: int) -> RoundRows:
    tokens, positions, kv_rows = (ints(batch * width) for _ in range(3))
    return RoundRows(tokens, positions, kv_rows, ints(batch))


def new_verdicts(batch: int, width: int, deepest: int) -> RoundVerdicts:
    return RoundVerdicts(ints(batch, FACTS + width), ints(batch, deepest))


def new_extension(batch: int, deepest: int, features: torch.Tensor) -> PathRows:
    rows = new_rows(batch, deepest)
    return PathRows(features.new_full((batch * deepest, features.shape[1]), -7), rows, ints(batch))


def ints(*shape: int) -> torch.Tensor:
    """int32 full of a number that no kernel writes."""
    return torch.full(shape, -7, dtype=torch.int32, device=DEVICE)


def snapshot(tables: SlotTables) -> dict[str, torch.Tensor]:
    names = ("length", "root", "drafts", "parents", "mask", "depth", "pages", "speculative")
    return {name: getattr(tables, name).clone() for name in names}
