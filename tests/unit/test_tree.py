"""Draft trees: cutting and trimming keep them trees; EAGLE-2 expansion against a worked example."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eyas.engine.batch.tree import DraftTree
from eyas.engine.speculation.draft_worker.draft_runner import TreeExpansion

#        a  b  c  d  e     a and b below the root; c, d below a; e below c
EXAMPLE = DraftTree([10, 11, 12, 13, 14], [-1, -1, 0, 0, 2])


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    size = draw(st.integers(0, 12))
    tokens = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    return DraftTree(tokens, [draw(st.integers(-1, i - 1)) for i in range(size)])


def words(tree: DraftTree) -> list[tuple[int, ...]]:
    """The token path of every node: what a tree says, however its nodes are numbered."""
    return [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]


def test_shape() -> None:
    assert [EXAMPLE.depth(i) for i in range(5)] == [1, 1, 2, 2, 3]
    assert EXAMPLE.path(4) == [0, 2, 4] and EXAMPLE.path(-1) == []
    assert EXAMPLE.children(-1) == [0, 1] and EXAMPLE.children(0) == [2, 3] and EXAMPLE.children(4) == []
    assert EXAMPLE.height == 3 and DraftTree([], []).height == 0
    assert not EXAMPLE.is_chain
    assert DraftTree([1, 2, 3], [-1, 0, 1]).is_chain and DraftTree([], []).is_chain


@pytest.mark.parametrize(
    "tokens, parents", [([1], []), ([1], [0]), ([1, 2], [-1, 1]), ([1, 2], [1, -1]), ([1], [-2])]
)
def test_what_is_not_a_tree_is_refused(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parents"):
        DraftTree(tokens, parents)


def test_trim() -> None:
    assert EXAMPLE.trim([]) == EXAMPLE
    assert EXAMPLE.trim([10]) == DraftTree([12, 13, 14], [-1, -1, 0])
    assert EXAMPLE.trim([10, 12]) == DraftTree([14], [-1])
    leaf = EXAMPLE.trim([11])
    assert leaf == DraftTree([], []) and not leaf
    assert EXAMPLE.trim([12]) is None and EXAMPLE.trim([10, 11]) is None
    assert EXAMPLE.trim([11, 10]) is None


@given(tree=trees(), committed=st.lists(st.integers(0, 3), max_size=4))
@settings(max_examples=60, deadline=None)
def test_trim_keeps_what_was_said_below(tree: DraftTree, committed: list[int]) -> None:
    """Without equal siblings a trimmed tree says exactly what the whole one said after `committed`."""
    assume(len(set(words(tree))) == len(tree))
    below = [path[len(committed) :] for path in words(tree) if path[: len(committed)] == tuple(committed)]
    trimmed = tree.trim(committed)
    if committed and () not in below:
        assert trimmed is None
    else:
        assert trimmed is not None
        assert sorted(words(trimmed)) == sorted(path for path in below if path)


@given(tree=trees(), size=st.integers(0, 13))
@settings(max_examples=80, deadline=None)
def test_cuts(tree: DraftTree, size: int) -> None:
    assert words(tree.narrow(size)) == words(tree)[:size]
    assert words(tree.truncate_depth(size)) == [path for path in words(tree) if len(path) <= size]
    first = {child for parent in range(-1, len(tree)) for child in tree.children(parent)[:size]}
    kept = [node for node in range(len(tree)) if first.issuperset(tree.path(node))]
    assert words(tree.thin(size)) == [words(tree)[node] for node in kept]


# --- EAGLE-2 expansion --------------------------------------------------------------------------------


def test_worked_example() -> None:
    """k = 2, three levels, N = 6; the pool's flat indices 0 .. 9 are the letters a .. j."""
    a, b, c, d, e, f, g, h, i, j = (ord(letter) for letter in "abcdefghij")
    growing = TreeExpansion(topk=2, draft_tokens=6)
    growing.grow([[a, b]], [[0.6, 0.3]])
    assert [(n.token, n.parent_slot, n.rows) for n in growing.frontier()] == [(a, 0, (0,)), (b, 0, (1,))]
    growing.grow([[c, d], [e, f]], [[0.7, 0.2], [0.5, 0.4]])
    frontier = growing.frontier()
    assert [(n.token, n.parent_slot, n.rows) for n in frontier] == [(c, 0, (0, 2)), (e, 1, (1, 3))]
    assert [n.score for n in frontier] == pytest.approx([0.42, 0.15])
    growing.grow([[g, h], [i, j]], [[0.9, 0.05], [0.6, 0.3]])
    assert growing.select() == DraftTree([a, b, c, e, g], [-1, -1, 0, 1, 2])


def test_a_chain_is_a_tree_of_one_candidate_a_level() -> None:
    growing = TreeExpansion(topk=1, draft_tokens=4)
    for token in (5, 6, 7):
        growing.grow([[token]], [[0.5]])
    assert growing.frontier()[0].rows == (0, 1, 2)
    assert growing.select() == DraftTree([5, 6, 7], [-1, 0, 1])


def test_a_tree_of_the_root_alone() -> None:
    growing = TreeExpansion(topk=2, draft_tokens=1)
    growing.grow([[1, 2]], [[0.5, 0.5]])
    assert growing.select() == DraftTree([], [])


def test_ties_go_to_the_lower_flat_index() -> None:
    growing = TreeExpansion(topk=2, draft_tokens=4)
    growing.grow([[1, 2]], [[0.5, 0.5]])
    growing.grow([[3, 4], [5, 6]], [[1.0, 1.0], [1.0, 1.0]])
    assert [n.token for n in growing.frontier()] == [3, 4]
    assert growing.select() == DraftTree([1, 2, 3], [-1, -1, 0])


def flat_index_algebra(levels: list[tuple[list, list]], topk: int, nodes: int) -> DraftTree:
    """The same selection by the published index arithmetic: a parent is found by division, not stored."""
    scores: list[float] = list(levels[0][1][0])
    tokens: list[int] = list(levels[0][0][0])
    parent_list, frontier = list(range(-1, topk)), list(range(topk))
    for number, (ids, probabilities) in enumerate(levels[1:]):
        first = len(scores)
        for g in range(topk):
            for c in range(topk):
                scores.append(scores[frontier[g]] * probabilities[g][c])
                tokens.append(ids[g][c])
        order = sorted(range(topk**2), key=lambda j: (-scores[first + j], j))[:topk]
        frontier = [first + j for j in order]
        parent_list += [j + topk**2 * number + topk for j in order]
    chosen = sorted(sorted(range(len(scores)), key=lambda q: (-scores[q], q))[:nodes])
    parents = [-1 if q < topk else chosen.index(parent_list[q // topk]) for q in chosen]
    return DraftTree([tokens[q] for q in chosen], parents)


@pytest.mark.parametrize("seed", range(60))
def test_expansion_equals_the_index_algebra(seed: int) -> None:
    """Random probabilities, many of them equal, and now and then 1 + eps, as float32 softmax may give."""
    rng = random.Random(seed)
    topk, steps, nodes = rng.randint(2, 4), rng.randint(1, 5), rng.randint(1, 20)
    growing, levels = TreeExpansion(topk, nodes + 1), []
    for level in range(steps):
        width = 1 if level == 0 else topk
        ids = [[rng.randrange(100) for _ in range(topk)] for _ in range(width)]
        odds = [sorted((rng.choice([0.1, 0.25, 0.5, 1.0]) for _ in range(topk)), reverse=True) for _ in ids]
        levels.append((ids, odds))
        growing.grow(ids, [[p * (1 + 1e-7) if p == 1.0 else p for p in row] for row in odds])
    assert growing.select() == flat_index_algebra(levels, topk, nodes)


def test_a_broken_head_still_gives_a_tree() -> None:
    growing = TreeExpansion(topk=2, draft_tokens=8)
    growing.grow([[1, 2]], [[math.nan, 0.5]])
    growing.grow([[3, 4], [5, 6]], [[math.nan, math.inf], [2.0, math.nan]])
    assert len(growing.select()) == 6  # DraftTree itself refuses parents out of order
