"""Rounds on the device against their plain twins: the host's walk, its page arithmetic, its draft runner."""

from __future__ import annotations

import random

import pytest
import torch

from eyas.common.errors import ConfigError
from eyas.engine.batch.tables import mask_words
from eyas.engine.batch.tree import DraftTree
from eyas.engine.kernels.drafts.rounds import FACTS, prepare, verdict
from eyas.engine.sampling.noise import _philox, streams
from eyas.engine.speculation.synthetic import resolve
from eyas.engine.speculation.verify import walk
from tests.unit.crossed import crossed
from tests.unit.rounds_rig import (
    DEVICE,
    VOCAB,
    Case,
    chain,
    new_rows,
    new_verdicts,
    put_tree,
    random_case,
    random_tree,
    snapshot,
    visible,
    words_of,
)

WIDTHS = [1, 2, 4, 7, 33, 64, 150]


def picked(case: Case, width: int, seed: int) -> torch.Tensor:
    """The target's tokens at every node; after them those of other rows, which a round must not read."""
    rng = random.Random(seed)
    rows = len(case.slots) * width + 3
    return torch.tensor([rng.randrange(VOCAB) for _ in range(rows)], dtype=torch.int32, device=DEVICE)


# --- what the forward reads -----------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("grow", [random_tree, chain])
def test_prepare(width: int, grow) -> None:
    case = random_case(width, width, grow=grow)
    check_prepare(case, width)
    check_prepare(case, 1)
    check_prepare(case, (width + 1) // 2)  # a narrower round of the same drafts


def check_prepare(case: Case, width: int) -> None:
    batch, tables = case.batch, case.tables
    rows = new_rows(batch.size, width)
    words = mask_words(width)
    mask = torch.full((words, batch.size, width), -7, dtype=torch.int64, device=DEVICE)
    before = snapshot(tables)
    prepare(batch, rows, mask)
    for b, slot in enumerate(case.slots):
        start, tree = int(tables.length[slot]), case.tree(slot)
        assert int(rows.starts[b]) == start
        for node in range(width):
            row, real = b * width + node, slot != tables.padding_slot and node <= len(tree)
            physical = case.row(slot, start + node) if real else -1
            assert int(rows.kv_rows[row]) == physical
            token = position = 0
            if physical >= 0:
                token = tree.tokens[node - 1] if node else int(tables.root[slot])
                position = start + (tree.depth(node - 1) if node else 0)
            assert (int(rows.tokens[row]), int(rows.positions[row])) == (token, position)
            if real:
                assert torch.equal(mask[:, b, node], words_of(visible(tree, node), words))
    assert all(torch.equal(value, before[name]) for name, value in snapshot(tables).items())


# --- the verdict ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grow", "width"),
    crossed(
        [random_tree, chain],
        WIDTHS,
        quick=lambda grow, width: width in (1, 7, 150 if grow is random_tree else 64),
    ),
)
def test_verdict_is_the_walk(width: int, grow) -> None:
    deep = 0
    for seed in range(6):
        case = random_case(100 * width + seed, width, grow=grow)
        deep = max(deep, check_verdict(case, width, picked(case, width, seed), deepest=width))
    assert deep > 0 or width == 1, "no draft was ever accepted: this tests nothing"


def check_verdict(case: Case, width: int, chosen: torch.Tensor, deepest: int) -> int:
    """Compares everything that a verdict writes; the deepest path that was accepted."""
    batch, tables = case.batch, case.tables
    found, before = new_verdicts(batch.size, width, deepest), snapshot(tables)
    verdict(batch, chosen, found)
    deep = 0
    for b, slot in enumerate(case.slots):
        tree = case.tree(slot).narrow(width - 1)
        tokens, path = expected(tree, chosen[b * width : (b + 1) * width].tolist(), deepest)
        facts, empty = [len(tokens), tree.height, len(tree)], [-1] * (width - len(tokens))
        assert found.result[b].tolist() == [*facts, *tokens, *empty]
        assert found.path[b].tolist() == [*path, *[-1] * (deepest - len(path))]
        if slot != tables.padding_slot:
            before["length"][slot] += len(tokens)
            before["root"][slot] = tokens[-1]
            before["drafts"][slot] = -1
        deep = max(deep, len(path) - 1)
    assert all(torch.equal(value, before[name]) for name, value in snapshot(tables).items())
    return deep


def expected(tree: DraftTree, chosen: list[int], deepest: int) -> tuple[list[int], list[int]]:
    """Tokens emitted, and the path with its root: the walk's, as far as there is room for it."""
    plain = walk(tree, chosen)
    path = [0, *(1 + node for node in plain.path)]
    return list(plain.tokens[:deepest]), path[:deepest]


def test_a_walk_ends_where_its_room_ends() -> None:
    case = random_case(3, 5, grow=lambda rng, size: DraftTree([1] * size, range(-1, size - 1)))
    chosen = torch.ones(len(case.slots) * 5, dtype=torch.int32, device=DEVICE)
    assert check_verdict(case, 5, chosen, deepest=3) == 2


def test_a_narrower_round_leaves_the_other_drafts_unread() -> None:
    """And all are used up: what was drafted below an older root is no draft of this one."""
    case = random_case(4, 9)
    check_verdict(case, 4, picked(case, 4, 0), deepest=4)
    case = random_case(5, 9)
    check_verdict(case, 1, picked(case, 1, 0), deepest=1)


def test_of_equal_siblings_the_first() -> None:
    case = random_case(0, 7)
    slot = case.slots[0]
    case.trees[slot] = DraftTree([7, 8, 7, 9, 8, 8], [-1, -1, 0, 0, 3, -1])
    for chosen, path in [((8, 0, 3, 0, 0, 0, 4), [0, 2]), ((7, 9, 0, 0, 8, 5, 0), [0, 1, 4, 5])]:
        put_tree(case.tables, slot, case.trees[slot])
        found = new_verdicts(len(case.slots), 7, 4)
        all_chosen = torch.zeros(len(case.slots) * 7, dtype=torch.int32, device=DEVICE)
        all_chosen[:7] = torch.tensor(chosen)
        verdict(case.batch, all_chosen, found)
        assert found.path[0].tolist()[: len(path)] == path
        assert int(found.result[0, 0]) == len(path)


# --- synthetic acceptance -------------------------------------------------------------------------------


def uniform(seed: int, length: int, step: int) -> float:
    """The draw of draft `step` at `length`, within [0, 1): noise of a choice that no request has."""
    stream = streams([(seed & (2**64 - 1), length, 2**32 - 1)])
    word = int(_philox(stream, torch.tensor([[step]]))[0, 0, 0])
    folded = 2**32 - 1 - word if word >= 2**31 else word
    return float(torch.tensor(folded, dtype=torch.float32) * torch.tensor(4.6566127342e-10))


def synthetic_walk(tree: DraftTree, chosen: list[int], draws: list[bool]) -> tuple[list[int], list[int]]:
    node, path, tokens = -1, [0], []
    for accepted in draws:
        below = tree.children(node)
        if not below or not accepted:
            break
        node = below[0]
        path.append(node + 1)
        tokens.append(tree.tokens[node])
    return [*tokens, chosen[path[-1]]], path


@pytest.mark.parametrize("grow", [random_tree, chain])
@pytest.mark.parametrize(
    "rates", [pytest.param((1.0, 1.0, 1.0), marks=pytest.mark.slow), (0.0, 1.0, 1.0), (0.8, 0.6, 0.5)]
)
def test_synthetic_verdict(grow, rates: tuple[float, ...]) -> None:
    table = torch.tensor(rates, device=DEVICE)
    for seed in range(8):
        case = random_case(seed, 6, grow=grow)
        chosen, found = picked(case, 6, seed), new_verdicts(len(case.slots), 6, 4)
        lengths = case.tables.length.tolist()
        verdict(case.batch, chosen, found, table)
        for b, slot in enumerate(case.slots):
            key = int(case.tables.seed[slot]) + slot
            draws = [uniform(key, lengths[slot], step) < rate for step, rate in enumerate(rates)]
            tokens, path = synthetic_walk(case.tree(slot), chosen[b * 6 : b * 6 + 6].tolist(), draws)
            assert found.result[b].tolist()[FACTS : FACTS + len(tokens)] == tokens
            assert int(found.result[b, 0]) == len(tokens)
            assert found.path[b].tolist() == [*path, *[-1] * (4 - len(path))]
            if slot != case.tables.padding_slot:
                assert int(case.tables.length[slot]) == lengths[slot] + len(tokens)
                assert int(case.tables.root[slot]) == tokens[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "length, rounds, error",
    [(3.0, 1, 0.0), (2.4, 8, 0.15), pytest.param(2.4, 32, 0.08, marks=pytest.mark.slow)],
)
def test_synthetic_length_is_the_mean(length: float, rounds: int, error: float) -> None:
    """Sixteen sequences with chains of three; a mean that is no whole number takes some rounds to show."""
    case = random_case(0, 4, batch=17, grow=lambda rng, size: chain(rng, 3))
    case.tables.length.copy_(torch.arange(20) * 5)
    rates = torch.tensor(resolve(3, (), length), device=DEVICE)
    tokens, chosen = 0, picked(case, 4, 0)
    for _ in range(rounds):
        found = new_verdicts(17, 4, 4)
        case.tables.drafts[:-1] = 1
        verdict(case.batch, chosen, found, rates)
        tokens += int(found.result[:-1, 0].sum())
    assert tokens / (16 * rounds) == pytest.approx(length, abs=error)


def test_greedy_sequences_of_one_length_have_draws_of_their_own() -> None:
    """A batch that accepts and refuses as one would say little about its rates."""
    case = random_case(0, 4, batch=17, grow=lambda rng, size: chain(rng, 3))
    case.tables.length.fill_(7)
    case.tables.seed.zero_()
    case.tables.drafts[:-1] = 1
    found = new_verdicts(17, 4, 4)
    verdict(case.batch, picked(case, 4, 0), found, torch.tensor((0.5, 0.5, 0.5), device=DEVICE))
    assert len(set(found.result[:-1, 0].tolist())) > 2


def test_synthetic_rates() -> None:
    assert resolve(3, (0.9, 0.45, 0.0), None) == pytest.approx((0.9, 0.5, 0.0))
    assert resolve(3, (0.5, 0.0, 0.0), None) == (0.5, 0.0, 0.0)
    assert resolve(3, (), 3.0) == (1.0, 1.0, 0.0)
    assert resolve(4, (), 2.25) == (1.0, 0.25, 0.0, 0.0)
    assert resolve(3, (), 1.0) == (0.0, 0.0, 0.0) and resolve(3, (), 4.0) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "rates, length, words",
    [
        ((), None, "either"),
        ((0.5, 0.5, 0.5), 2.0, "either"),
        ((0.5, 0.5), None, "2 entries, but 3 drafts"),
        ((0.5, 0.6, 0.1), None, "rates: entry 1 is 0.6, more than"),
        ((1.5, 0.6, 0.1), None, "rates: entry 0 is 1.5"),
        ((0.5, float("nan"), 0.1), None, "rates: entry 1 is nan"),
        ((), 0.5, r"1 .. 4 tokens"),
        ((), 4.5, r"1 .. 4 tokens"),
        ((), float("nan"), r"1 .. 4 tokens"),
    ],
)
def test_synthetic_rates_that_cannot_be(rates, length, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(3, rates, length)
