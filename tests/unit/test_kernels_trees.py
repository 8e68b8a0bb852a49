"""Trees grown on the device against `TreeExpansion`: every level's frontier and rows, and what is kept."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch

from eyas.common.config import SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.engine.batch.tables import SlotTables
from eyas.engine.batch.tree import DraftTree
from eyas.engine.kernels.drafts.rounds import verdict
from eyas.engine.kernels.drafts.trees import TreeFrontier, TreeGrowth, grow, new_growth, select
from eyas.engine.kernels.sampling.draft_noise import add_noise
from eyas.engine.sampling.sampler import SampledRow, draft_probabilities
from eyas.engine.speculation.draft_worker.draft_runner import TreeExpansion
from eyas.engine.speculation.verify import walk
from tests.unit.rounds_rig import DEVICE, Case, ints, new_rows, new_verdicts, random_case, visible, words_of

pytestmark = pytest.mark.slow

VOCAB = 50
SHAPES = [(1, 3, 8), (2, 1, 4), (3, 2, 8), (4, 3, 8), (5, 8, 32), (3, 8, 64), (8, 3, 16), (4, 16, 40)]
SHAPES += [(3, 8, 65), (11, 8, 200)]  # of several words: the nodes, and the rows of a level as well


def spec_of(shape: tuple[int, int, int]) -> SpeculationConfig:
    return SpeculationConfig(*shape)  # steps, topk, draft_tokens


def level_of(
    rng: random.Random, rows: int, topk: int, coarse: bool, strange: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a draft head's top-k gives: probabilities sorted within a row; `strange`: some are no numbers."""
    odd = (0.0, float("nan"), 1.0 + 1e-6, 1.0)
    probabilities, ids = [], []
    for _ in range(rows):
        drawn = [rng.randrange(5) / 4 if coarse else rng.random() ** 2 for _ in range(topk)]
        found = sorted(drawn, reverse=True)
        if strange and rng.random() < 0.1:
            found[rng.randrange(topk)] = rng.choice(odd)
        probabilities.append(found)
        ids.append(rng.sample(range(VOCAB), topk))
    return torch.tensor(probabilities, device=DEVICE), torch.tensor(ids, device=DEVICE)


def new_frontier(batch: int, topk: int) -> TreeFrontier:
    return TreeFrontier(new_rows(batch, topk), ints(batch * topk))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coarse", [False, True])
def test_growing(shape: tuple[int, int, int], coarse: bool) -> None:
    """`coarse`: probabilities in quarters, so that most scores are tied."""
    spec, rng = spec_of(shape), random.Random(sum(shape) + coarse)
    case = random_case(sum(shape), spec.draft_tokens)
    token_map = torch.randperm(4 * VOCAB, generator=torch.Generator().manual_seed(1))[:VOCAB].to(DEVICE)
    growth = new_growth(spec, case.batch.size, token_map if coarse else None, DEVICE)
    twins = grow_both(case, growth, rng, coarse)
    padding = case.tables.padding_slot
    untouched = rows_of(case.tables, padding)
    select(case.batch, growth)
    for slot, twin in zip(case.slots, twins, strict=True):
        if slot != padding:
            check_tables(case, slot, twin.select(), spec.draft_tokens)
    assert all(map(torch.equal, rows_of(case.tables, padding), untouched))


@pytest.mark.parametrize("topk", [0, 1, 2])
@pytest.mark.parametrize("nodes", [0, 1, 4])
def test_a_sequences_own_limits(topk: int, nodes: int) -> None:
    """As deep, branched and large as its request allows: the best child first, the upper levels first."""
    spec, rng = spec_of((4, 3, 12)), random.Random(0)
    case = random_case(7, spec.draft_tokens)
    case.tables.most_topk[:-1], case.tables.most_nodes[:-1] = topk, nodes
    growth = new_growth(spec, case.batch.size, None, DEVICE)
    twins = [twin.select() for twin in grow_both(case, growth, rng, coarse=False, strange=False)]
    select(case.batch, growth)
    for slot, tree in zip(case.slots, twins, strict=True):
        if slot == case.tables.padding_slot:
            continue
        drafts, parents = case.tables.drafts[slot].tolist(), case.tables.parents[slot].tolist()
        wanted = tree.truncate_depth(int(case.tables.speculative[slot])).thin(topk or spec.topk)
        wanted = wanted.narrow(nodes or spec.draft_tokens)
        assert sum(token >= 0 for token in drafts) == len(wanted)
        assert paths_of(drafts, parents) == paths_of(wanted.tokens, wanted.parents)


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> set[tuple[int, ...]]:
    """The tokens down to each node that is a draft; all nodes above one are drafts."""
    tree, found = DraftTree([token % 2**31 for token in tokens], parents), set()
    for node in range(len(tree)):
        if tokens[node] >= 0:
            found.add(tuple(tokens[above] for above in tree.path(node)))
            assert min(tokens[above] for above in tree.path(node)) >= 0
    return found


def rows_of(tables: SlotTables, slot: int) -> list[torch.Tensor]:
    """A copy of what is told of a slot's drafts."""
    rows = tables.drafts[slot], tables.parents[slot], tables.depth[slot], tables.mask[:, slot]
    return [row.clone() for row in rows]


def grow_both(
    case: Case, growth: TreeGrowth, rng: random.Random, coarse: bool, strange: bool = True
) -> list[TreeExpansion]:
    """All levels, on the device and by the twins, compared level by level."""
    spec, batch = growth.spec, case.batch
    twins = [TreeExpansion(spec.topk, spec.draft_tokens) for _ in case.slots]
    parents = 1
    for level in range(spec.steps):
        probabilities, ids = level_of(rng, batch.size * parents, spec.topk, coarse, strange)
        below = new_frontier(batch.size, spec.topk) if level + 1 < spec.steps else None
        grow(batch, growth, level, probabilities, ids, below)
        targets = ids if growth.token_map is None else growth.token_map[ids]
        for b, twin in enumerate(twins):
            own = slice(b * parents, (b + 1) * parents)
            twin.grow(targets[own].tolist(), probabilities[own].tolist())
            if below is not None:
                check_frontier(case, growth, twin, b, level, below)
        parents = spec.topk
    return twins


def check_frontier(
    case: Case, growth: TreeGrowth, twin: TreeExpansion, b: int, level: int, below: TreeFrontier
) -> None:
    slot, topk = case.slots[b], growth.spec.topk
    start = int(case.tables.length[slot])
    wanted = slot != case.tables.padding_slot and bool(case.tables.speculative[slot])
    assert int(below.rows.starts[b]) == start
    for g, node in enumerate(twin.frontier()):
        row = b * topk + g
        assert int(growth.frontier[level, b, g]) == node.candidate
        found = growth.visible[level, :, b, g]
        assert torch.equal(found, words_of(sum(1 << seen for seen in node.rows), len(found)))
        assert int(below.sources[row]) == b * (topk if level else 1) + node.parent_slot
        physical = case.row(slot, start + node.rows[-1]) if wanted else -1
        assert int(below.rows.kv_rows[row]) == physical
        held = (node.token, start + level) if physical >= 0 else (0, 0)
        assert (int(below.rows.tokens[row]), int(below.rows.positions[row])) == held


def check_tables(case: Case, slot: int, tree: DraftTree, width: int) -> None:
    tables, rest = case.tables, [-1] * (width - 1 - len(tree))
    deepest = int(tables.speculative[slot])
    drafted = [token if tree.depth(i) <= deepest else -1 for i, token in enumerate(tree.tokens)]
    assert tables.drafts[slot].tolist() == [*drafted, *rest]
    assert tables.parents[slot].tolist() == [*tree.parents, *rest]
    for node in range(len(tree) + 1):
        words = tables.mask[:, slot, node]
        assert torch.equal(words, words_of(visible(tree, node), len(words)))
        assert int(tables.depth[slot, node]) == (tree.depth(node - 1) if node else 0)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("mapped", [False, True])
def test_noise_for_a_level(level: int, mapped: bool) -> None:
    """As the specification adds it; rows of temperature 0 keep every bit."""
    case, rng = random_case(level, 4), random.Random(level)
    tables, width, vocab = case.tables, 3 if level else 1, 2100  # more than one program
    temperatures = [0.0, 0.7, 1.0, 1.6, 0.0]
    for slot, t in zip(case.slots, temperatures, strict=True):
        tables.temperature[slot], tables.choice[slot] = t, rng.randrange(4)
    token_map = torch.randperm(9000, generator=torch.Generator().manual_seed(1))[:vocab] if mapped else None
    logits = torch.randn(5 * width, vocab, generator=torch.Generator().manual_seed(2))
    rows = [
        SampledRow(
            SamplingParams(temperature=t, seed=int(tables.seed[slot]) % (1 << 64)),
            int(tables.choice[slot]),
            int(tables.length[slot]) + 1 + level,
            *((), (), ()),
        )
        for slot, t in zip(case.slots, temperatures, strict=True)
        for _ in range(width)
    ]
    found = logits.clone().to(DEVICE)
    add_noise(case.batch, level, found, None if token_map is None else token_map.to(DEVICE))
    assert torch.equal(found.cpu()[:width], logits[:width])
    expected = draft_probabilities(logits, rows, token_map)
    assert torch.allclose(found.softmax(-1).cpu(), expected, rtol=1e-5)
    later = [dataclasses.replace(row, position=row.position + 1) for row in rows]
    assert not torch.allclose(draft_probabilities(logits, later, token_map), expected, rtol=0.1)


def test_a_grown_tree_is_verified() -> None:
    """From the top-k of a level to the tokens of a round, nothing but device tables in between."""
    spec, rng = spec_of((3, 4, 12)), random.Random(0)
    case = random_case(0, spec.draft_tokens)
    case.tables.speculative[:-1] = spec.steps
    growth = new_growth(spec, case.batch.size, None, DEVICE)
    trees = [twin.select() for twin in grow_both(case, growth, rng, coarse=False)]
    select(case.batch, growth)
    agreed = []
    for tree in trees:  # the target agrees with the deepest path
        path = tree.path(max(range(len(tree)), key=tree.depth))
        chosen = [-5] * spec.draft_tokens
        for node, child in zip([-1, *path], [*path, None], strict=True):
            chosen[node + 1] = 7 if child is None else tree.tokens[child]
        agreed.append(chosen)
    found = new_verdicts(case.batch.size, spec.draft_tokens, spec.steps + 1)
    verdict(case.batch, torch.tensor(agreed, dtype=torch.int32, device=DEVICE).view(-1), found)
    for b, (tree, chosen) in enumerate(zip(trees[:-1], agreed[:-1], strict=True)):
        tokens = walk(tree, chosen).tokens
        assert len(tokens) == max(tree.depth(node) for node in range(len(tree))) + 1
        facts = [len(tokens), len(tokens) - 1, len(tree)]
        assert found.result[b, : len(facts) + len(tokens)].tolist() == [*facts, *tokens]


def test_scores_that_differ_in_the_last_bit_only() -> None:
    """Two paths with equal products in float32; the better one in float64 has the higher flat index."""
    rng = random.Random(0)
    while True:
        a, b, c = sorted((torch.tensor(rng.uniform(0.1, 1.0)) for _ in range(3)), reverse=True)
        d = a * c / b
        if a * c == b * d and float(b) * float(d) > float(a) * float(c):
            break
    case = random_case(0, 4, batch=2)
    growth = new_growth(spec_of((3, 2, 4)), 2, None, DEVICE)
    twin = TreeExpansion(2, 4)
    for level, chances in enumerate(([[a, b]], [[c, 0.0], [d, 0.0]])):
        below = new_frontier(2, 2)
        probabilities = torch.tensor([*chances, *chances], device=DEVICE)
        ids = torch.arange(probabilities.numel(), device=DEVICE).view(probabilities.shape)
        grow(case.batch, growth, level, probabilities, ids, below)
        half = len(chances)
        twin.grow(ids[:half].tolist(), probabilities[:half].tolist())
        check_frontier(case, growth, twin, 0, level, below)
    assert twin.frontier()[0].candidate == 4
