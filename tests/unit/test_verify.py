"""Speculation must not change one token: plain decoding against rounds over random trees.

The target is a toy whose logits depend on the last three ids; the sampler with all its processors, the walk
and the stopping rules are the real ones. Each mutation below is an error that a programmer could make; the
comparison must see it.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
import torch

from eyas.common.params import SamplingParams
from eyas.common.types import FinishCause
from eyas.engine.batch.stopping import banned_ids, finish
from eyas.engine.batch.tree import DraftTree
from eyas.engine.sampling.sampler import SampledRow, draft_probabilities, sample
from eyas.engine.speculation.draft_worker.draft_runner import TreeExpansion
from eyas.engine.speculation.verify import TreeVerdict, walk

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 13
EOS = (2,)
TARGET = torch.randn(VOCAB**3, VOCAB, generator=torch.Generator().manual_seed(0)) * 2

BAD_WORDS = ((3,), *((a, b) for a in range(4, VOCAB) for b in range(0, VOCAB, 3)), (4, 4, 5))

PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {4: 1.5, 7: -3.0}},
    {"temperature": 1.3, "top_k": 6, "min_p": 0.02},
    {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": (5,)},
    {"temperature": 0.7, "ignore_eos": True, "repetition_penalty": 1.8},
    {"temperature": 0.9, "ignore_eos": True, "bad_words": BAD_WORDS},
]


@dataclass
class Stream:
    """One generation of the toy: what it was asked, and how far it is."""

    params: SamplingParams
    prompt: list[int]
    output: list[int] = dataclasses.field(default_factory=list)
    finish: FinishCause | None = None
    rounds: int = 0

    def after(self, ancestors: list[int]) -> int:
        a, b, c = [*self.prompt, *self.output, *ancestors][-3:]
        return (a * VOCAB + b) * VOCAB + c


def streams(count: int, max_tokens: int = 14) -> list[Stream]:
    rng = random.Random(count)
    return [
        Stream(
            SamplingParams(seed=rng.getrandbits(64), max_tokens=max_tokens, **PARAMS[i % len(PARAMS)]),
            [rng.randrange(VOCAB) for _ in range(rng.randint(3, 6))],
        )
        for i in range(count)
    ]


Drafting = Callable[[Stream, random.Random], DraftTree | None]
Rows = Callable[[Stream, DraftTree | None], list[SampledRow]]


def rows_of(stream: Stream, tree: DraftTree | None) -> list[SampledRow]:
    """The sampling contexts of a round, root first: as an engine must build them."""
    paths = [[]] + [tree.path(i) for i in range(len(tree))] if tree else [[]]
    return [
        SampledRow(
            stream.params,
            choice=0,
            position=len(stream.prompt) + len(stream.output) + len(path),
            prompt=stream.prompt,
            output=stream.output,
            ancestors=[tree.tokens[i] for i in path] if tree else [],
            banned=banned_ids(stream.params, EOS, len(stream.output) + len(path)),
        )
        for path in paths
    ]


def run(
    asked: list[Stream],
    draft: Drafting = lambda stream, rng: None,
    rows: Rows = rows_of,
    verdict: Callable[[DraftTree | None, list[int]], TreeVerdict] = walk,
) -> list[Stream]:
    """Decode all streams to their end, one round of all of them a call to the sampler."""
    rng = random.Random(5)
    running = [dataclasses.replace(stream, output=[], rounds=0) for stream in asked]
    done = list(running)
    while running:
        drafts = [draft(stream, rng) for stream in running]
        asked_rows = [rows(stream, tree) for stream, tree in zip(running, drafts, strict=True)]
        contexts = [
            stream.after(list(row.ancestors))
            for stream, tree in zip(running, drafts, strict=True)
            for row in rows_of(stream, tree)
        ]
        chosen = iter(sample(TARGET[contexts], [row for some in asked_rows for row in some]).tokens)
        for stream, tree, some in zip(running, drafts, asked_rows, strict=True):
            found = verdict(tree, [next(chosen) for _ in some])
            kept, stream.finish = finish(stream.params, EOS, len(stream.output), found.tokens)
            stream.output += kept
            stream.rounds += 1
        running = [stream for stream in running if stream.finish is None]
    return done


def random_tree(stream: Stream, rng: random.Random) -> DraftTree | None:
    """Up to eight nodes anywhere: likely tokens and nonsense, deep and flat, equal siblings included."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = [[]]
    for node in range(rng.randint(0, 8)):
        parent = rng.choice([-1, node - 1, rng.randint(-1, node - 1)])
        likely = int(TARGET[stream.after(paths[1 + parent])].argmax())
        tokens.append(likely if rng.random() < 0.6 else rng.randrange(VOCAB))
        parents.append(parent)
        paths.append([*paths[1 + parent], tokens[-1]])
    return DraftTree(tokens, parents) if tokens else None


def outputs(found: list[Stream]) -> list[tuple[list[int], FinishCause | None]]:
    return [(stream.output, stream.finish) for stream in found]


@functools.cache
def plain_outputs(count: int) -> list[tuple[list[int], FinishCause | None]]:
    """Of `streams(count)` without drafts."""
    return outputs(run(streams(count)))


@pytest.mark.parametrize("seeds", [420, pytest.param(2100, marks=pytest.mark.slow)])
def test_speculation_equals_plain_decoding_token_for_token(seeds: int) -> None:
    """Seven kinds of parameters, a fresh random tree every round."""
    asked = streams(seeds)
    plain, spec = run(asked), run(asked, random_tree)
    assert outputs(spec) == outputs(plain)
    assert sum(s.rounds for s in spec) < 0.75 * sum(s.rounds for s in plain)  # drafts were really accepted
    assert {s.finish for s in plain} == {FinishCause.STOP, FinishCause.LENGTH}
    lengths = {len(s.output) for s in plain if s.params.min_tokens and s.finish is FinishCause.STOP}
    assert min(lengths) == 7


def _root_ancestors(stream: Stream, tree: DraftTree | None) -> list[SampledRow]:
    return [dataclasses.replace(row, ancestors=[]) for row in rows_of(stream, tree)]


def _root_position(stream: Stream, tree: DraftTree | None) -> list[SampledRow]:
    rows = rows_of(stream, tree)
    return [dataclasses.replace(row, position=rows[0].position) for row in rows]


def _node_position(stream: Stream, tree: DraftTree | None) -> list[SampledRow]:
    rows = rows_of(stream, tree)
    return [dataclasses.replace(row, position=rows[0].position + i) for i, row in enumerate(rows)]


def _root_bans(stream: Stream, tree: DraftTree | None) -> list[SampledRow]:
    rows = rows_of(stream, tree)
    return [dataclasses.replace(row, banned=rows[0].banned) for row in rows]


def _prompt_forgotten(stream: Stream, tree: DraftTree | None) -> list[SampledRow]:
    return [
        dataclasses.replace(row, prompt=[] if row.ancestors else row.prompt) for row in rows_of(stream, tree)
    ]


@pytest.mark.parametrize(
    "mutation", [_root_ancestors, _root_position, _node_position, _root_bans, _prompt_forgotten]
)
def test_a_wrong_context_is_seen(mutation: Rows) -> None:
    assert outputs(run(streams(140), random_tree, rows=mutation)) != plain_outputs(140)


def _bonus_of_the_parent(tree: DraftTree | None, chosen: list[int]) -> TreeVerdict:
    found = walk(tree, chosen)
    if not found.path:
        return found
    above = chosen[1 + tree.parents[found.path[-1]]]
    return TreeVerdict(found.path, (*found.tokens[:-1], above))


def _leaf_below_wrong_parent(tree: DraftTree | None, chosen: list[int]) -> TreeVerdict:
    """Accepts a child that equals the token chosen at the node before it, whatever its parent is."""
    accepted = 0
    while tree and accepted < len(tree) and tree.tokens[accepted] == chosen[accepted]:
        accepted += 1
    return TreeVerdict(tuple(range(accepted)), tuple(chosen[: accepted + 1]))


def _no_bonus_replacement(tree: DraftTree | None, chosen: list[int]) -> TreeVerdict:
    """Always takes the first child of the root, as if it had been accepted."""
    if not tree:
        return walk(tree, chosen)
    return TreeVerdict((0,), (tree.tokens[0], chosen[1]))


@pytest.mark.parametrize("mutation", [_bonus_of_the_parent, _leaf_below_wrong_parent, _no_bonus_replacement])
def test_a_wrong_verdict_is_seen(mutation: Callable[[DraftTree | None, list[int]], TreeVerdict]) -> None:
    assert outputs(run(streams(140), random_tree, verdict=mutation)) != plain_outputs(140)


def test_no_output_holds_a_bad_word() -> None:
    """Nor does a tree's node complete one with the ids before it."""
    asked = [stream for stream in streams(64) if stream.params.bad_words]
    free = [dataclasses.replace(s, params=msgspec.structs.replace(s.params, bad_words=())) for s in asked]
    assert asked and all(_bad_words(stream.output) for stream in run(free, random_tree))
    assert not any(_bad_words(stream.output) for stream in run(asked, random_tree))


def _bad_words(output: list[int]) -> list[tuple[int, ...]]:
    ends = range(1, len(output) + 1)
    return [word for word in BAD_WORDS if any(tuple(output[:end])[-len(word) :] == word for end in ends)]


def test_harmless_changes_are_harmless() -> None:
    """Equal siblings, another order of siblings, stale drafts: advice that may be worse, never wrong."""

    def mirrored(stream: Stream, rng: random.Random) -> DraftTree | None:
        tree = random_tree(stream, rng)
        if tree is None:
            return None
        order = sorted(range(len(tree)), key=lambda i: (tree.depth(i), -i))
        place = {-1: -1} | {node: i for i, node in enumerate(order)}
        return DraftTree([tree.tokens[i] for i in order], [place[tree.parents[i]] for i in order])

    def doubled(stream: Stream, rng: random.Random) -> DraftTree | None:
        tree = random_tree(stream, rng)
        if tree is None:
            return None
        shifted = [p if p == -1 else p + len(tree) for p in tree.parents]
        return DraftTree([*tree.tokens, *tree.tokens], [*tree.parents, *shifted])

    def stale(stream: Stream, rng: random.Random) -> DraftTree | None:
        return random_tree(dataclasses.replace(stream, output=stream.output[:-1]), rng)

    for drafting in (mirrored, doubled, stale):
        assert outputs(run(streams(105), drafting)) == plain_outputs(105)


def grown(*, coupled: bool) -> Drafting:
    """EAGLE-2 trees of three levels from a draft head that is nearly right, with or without the seed."""
    error = torch.randn(TARGET.shape, generator=torch.Generator().manual_seed(1)) * 0.7

    def drafting(stream: Stream, rng: random.Random) -> DraftTree:
        growing, params = TreeExpansion(topk=2, draft_tokens=6), stream.params
        params = params if coupled else msgspec.structs.replace(params, temperature=0.0)
        paths: list[list[int]] = [[]]
        for level in range(3):
            position = len(stream.prompt) + len(stream.output) + level
            contexts = [stream.after(path) for path in paths]
            rows = [SampledRow(params, 0, position, (), (), ())] * len(paths)
            found = draft_probabilities((TARGET + error)[contexts], rows, None).topk(2)
            growing.grow(found.indices.tolist(), found.values.tolist())
            paths = [[*paths[node.parent_slot], node.token] for node in growing.frontier()]
        return growing.select()

    return drafting


def test_drafts_that_know_the_noise_change_no_token() -> None:
    """The tree then depends on what it is verified with. It is accepted more often, and that is all."""
    asked = [stream for stream in streams(80) if not stream.params.greedy]
    plain, coupled, blind = run(asked), run(asked, grown(coupled=True)), run(asked, grown(coupled=False))
    assert outputs(coupled) == outputs(blind) == outputs(plain)
    assert sum(s.rounds for s in coupled) < 0.9 * sum(s.rounds for s in blind)


def test_trimmed_late_proposals_are_as_good_as_fresh_ones() -> None:
    """A tree drafted one token ago, cut to the subtree below what was committed since."""

    def late(stream: Stream, rng: random.Random) -> DraftTree | None:
        if not stream.output:
            return None
        before = dataclasses.replace(stream, output=stream.output[:-1])
        tree = random_tree(before, rng)
        return tree.trim(stream.output[-1:]) if tree else None

    asked = streams(210)
    spec, plain = run(asked, late), run(asked)
    assert outputs(spec) == outputs(plain)
    assert sum(s.rounds for s in spec) < sum(s.rounds for s in plain)


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [2, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_trees_deeper_than_the_budget(max_tokens: int) -> None:
    """A perfect chain of eight, and one in a tree: cut by the limit or before it, the same output."""

    def perfect(stream: Stream, rng: random.Random) -> DraftTree:
        future = dataclasses.replace(stream, params=_longer(stream.params))
        tokens: list[int] = []
        for _ in range(8):
            row = rows_of(dataclasses.replace(future, output=[*stream.output, *tokens]), None)
            tokens += sample(TARGET[[future.after(tokens)]], row).tokens
        return DraftTree(tokens, range(-1, 7))

    def fitting(stream: Stream, rng: random.Random) -> DraftTree:
        return perfect(stream, rng).narrow(stream.params.max_tokens - len(stream.output) - 1)

    def beside_others(stream: Stream, rng: random.Random) -> DraftTree:
        """Each right child stands after a wrong one."""
        right = perfect(stream, rng).tokens
        tokens = [token for good in right for token in ((good + 1) % VOCAB, good)]
        return DraftTree(tokens, [max(2 * (node // 2) - 1, -1) for node in range(16)])

    def shallow(stream: Stream, rng: random.Random) -> DraftTree:
        left = stream.params.max_tokens - len(stream.output) - 1
        return beside_others(stream, rng).truncate_depth(left)

    asked = streams(35, max_tokens)
    asked = [s for s in asked if s.params.min_tokens <= max_tokens]
    plain = run(asked)
    for drafting in (perfect, fitting, beside_others, shallow):
        found = run(asked, drafting)
        assert outputs(found) == outputs(plain)
        assert all(s.rounds == 1 for s in found)


def _longer(params: SamplingParams) -> SamplingParams:
    return SamplingParams(**{f: getattr(params, f) for f in params.__struct_fields__} | {"max_tokens": 100})


def test_end_of_text_inside_a_tree() -> None:
    """A path accepted through an ending id and beyond: the output stops with it."""
    tree = DraftTree([4, 2, 6], [-1, 0, 1])
    found = walk(tree, [4, 2, 6, 8])
    assert found == TreeVerdict((0, 1, 2), (4, 2, 6, 8))
    params = SamplingParams(max_tokens=50)
    assert finish(params, EOS, 3, found.tokens) == ((4, 2), FinishCause.STOP)


def test_walks() -> None:
    #        0: 7   1: 8   2: 7 below 0   3: 9 below 0   4: 8 below 3   5: 8 again
    tree = DraftTree([7, 8, 7, 9, 8, 8], [-1, -1, 0, 0, 3, -1])
    assert walk(tree, [7, 9, 0, 0, 8, 5, 0]) == TreeVerdict((0, 3, 4), (7, 9, 8, 5))
    assert walk(tree, [8, 0, 3, 0, 0, 0, 4]) == TreeVerdict((1,), (8, 3))  # of equal siblings the first
    assert walk(tree, [6, 0, 0, 0, 0, 0, 0]) == TreeVerdict((), (6,))
    assert walk(None, [6]) == walk(DraftTree([], []), [6]) == TreeVerdict((), (6,))
