"""The law of what is emitted: chi-square tests against exact probabilities, and proof that they can fail.

z = (chi2 - df) / sqrt(2 df) is about normal if the law is right; beyond 4 it is taken to be wrong. Seeds are
fixed, so a passing test passes always.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from eyas.common.params import SamplingParams
from eyas.engine.batch.tree import DraftTree
from eyas.engine.sampling.noise import gumbel_rows, streams
from eyas.engine.sampling.sampler import SampledRow, sample
from eyas.engine.speculation.verify import walk

pytestmark = pytest.mark.usefixtures("one_thread")

Z_LIMIT = 4.0


def z_score(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Bins with fewer than five expected are pooled into one."""
    expected = counts.sum() * probabilities / probabilities.sum()
    rare = expected < 5
    observed, wanted = list(counts[~rare]), list(expected[~rare])
    if rare.any() and expected[rare].sum() > 0:
        observed.append(counts[rare].sum())
        wanted.append(expected[rare].sum())
    chi2 = sum((o - e) ** 2 / e for o, e in zip(observed, wanted, strict=True))
    df = len(observed) - 1
    return (chi2 - df) / math.sqrt(2 * df)


# --- one token, real vocabulary ------------------------------------------------------------------------

VOCAB = 128_256
DRAWS = 1200


def _logits(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "flat":
        return torch.randn(VOCAB, generator=generator) * 0.5
    ranks = torch.randperm(VOCAB, generator=generator) + 1.0
    return -1.5 * ranks.log()  # Zipf: the best id holds 0.38, the tail beyond 100 ids 0.08


def _bins(p: torch.Tensor, count: int) -> torch.Tensor:
    """Bin number of each id: ids by falling probability, cut into `count` bins of nearly equal mass."""
    order = p.argsort(descending=True)
    bins = torch.empty(len(p), dtype=torch.int64)
    bins[order] = (p[order].cumsum(0) * count).long().clamp(max=count - 1)
    return bins


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "peaked"])
def test_tokens_follow_the_softmax_over_a_large_vocabulary(kind: str) -> None:
    logits = _logits(kind)
    p = logits.double().softmax(0)
    bins = _bins(p, 20)
    counts = np.zeros(20)
    for first in range(0, DRAWS, 4):
        rows = [SampledRow(SamplingParams(seed=7), 0, first + i, (), (), ()) for i in range(4)]
        tokens = sample(logits.expand(4, -1), rows).tokens
        np.add.at(counts, bins[tokens].numpy(), 1)
    mass = np.bincount(bins.numpy(), weights=p.numpy(), minlength=20)
    assert z_score(counts, mass) < Z_LIMIT
    twice_as_warm = np.bincount(bins.numpy(), weights=(logits.double() / 2).softmax(0).numpy(), minlength=20)
    assert z_score(counts, twice_as_warm) > Z_LIMIT


def test_noise_is_gumbel_and_finite() -> None:
    """4.1 million values in 40 bins of equal mass and in the two far tails."""
    noise = gumbel_rows(streams([(3, position, 0) for position in range(32)]), VOCAB).double().numpy().ravel()
    assert np.isfinite(noise).all()
    edges = -np.log(-np.log(np.concatenate([[1e-5], np.arange(1, 40) / 40, [1 - 1e-5]])))
    ends = np.concatenate([[-np.inf], edges, [np.inf]])
    mass = np.diff(np.concatenate([[0, 1e-5], np.arange(1, 40) / 40, [1 - 1e-5, 1]]))
    assert z_score(np.histogram(noise, ends)[0], mass) < Z_LIMIT
    assert z_score(np.histogram(noise * 1.01, ends)[0], mass) > Z_LIMIT


# --- the joint law of three tokens, emitted by speculative rounds ------------------------------------------

TOY = 7
SEEDS = 50_000
DEPTH = 4  # of the deepest node below
START = (0, 0)


def _toy() -> torch.Tensor:
    """log p of the next token after the last two, float32 [TOY^2, TOY]. One token takes 0.6 at the start."""
    p = torch.rand(TOY**2, TOY, generator=torch.Generator().manual_seed(6)) ** 3 + 0.02
    p[0, 1] = 1.5 * (p[0].sum() - p[0, 1])
    return (p / p.sum(-1, keepdim=True)).log()


TOY_LOGP = _toy()
#  The same advice every round, whatever was emitted: likely, unlikely and equal siblings, four levels.
ADVICE = DraftTree([1, 3, 5, 1, 2, 0, 4, 6, 2, 3, 1], [-1, -1, -1, 0, 0, 1, 2, 3, 3, 7, -1])

Chosen = Callable[[torch.Tensor, torch.Tensor, DraftTree], torch.Tensor]


def _contexts(recent: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """The toy's context at the root and at every node: last two tokens [S, 2] -> int64 [S, 1 + nodes]."""
    columns = []
    for node in range(-1, len(tree)):
        path = torch.tensor([tree.tokens[i] for i in tree.path(node)], dtype=torch.int64)
        a, b = torch.cat([recent, path.expand(len(recent), -1)], dim=1)[:, -2:].unbind(1)
        columns.append(a * TOY + b)
    return torch.stack(columns, dim=1)


def _emit(
    noise: torch.Tensor, tree: DraftTree | None, mutate: Chosen = lambda chosen, contexts, tree: chosen
) -> tuple[np.ndarray, int]:
    """Three tokens of every seed by rounds of `walk`, and the number of rounds. noise [S, positions, TOY]."""
    tree = tree or DraftTree([], [])
    output = [list(START) for _ in range(len(noise))]
    depths = torch.tensor([0] + [tree.depth(i) for i in range(len(tree))])
    rounds, running = 0, list(range(len(noise)))
    while running:
        index = torch.tensor(running)
        lengths = torch.tensor([len(output[s]) - 2 for s in running])
        contexts = _contexts(torch.tensor([output[s][-2:] for s in running]), tree)
        positions = lengths.unsqueeze(1) + depths
        chosen = (TOY_LOGP[contexts] + noise[index.unsqueeze(1), positions]).argmax(-1)
        for s, mine in zip(running, mutate(chosen, contexts, tree).tolist(), strict=True):
            output[s] += walk(tree, mine).tokens
        rounds += len(running)
        running = [s for s in running if len(output[s]) < 5]
    return np.array([tokens[2:5] for tokens in output]), rounds


def _joint_z(tokens: np.ndarray) -> float:
    p = TOY_LOGP.exp().double().numpy().reshape(TOY, TOY, TOY)
    joint = np.einsum("a,ab,abc->abc", p[START], p[START[1]], p)
    counts = np.bincount(tokens @ np.array([TOY**2, TOY, 1]), minlength=TOY**3)
    return z_score(counts, joint.ravel())


@pytest.fixture(scope="module")
def noise() -> torch.Tensor:
    """G of SEEDS requests at the positions that three tokens can need: [SEEDS, 3 + DEPTH, TOY]."""
    positions = 3 + DEPTH
    keys = streams([(seed, p, 0) for seed in range(SEEDS) for p in range(positions)])
    return gumbel_rows(keys, TOY).view(SEEDS, positions, TOY)


def test_joint_law_of_speculative_rounds(noise: torch.Tensor) -> None:
    plain, plain_rounds = _emit(noise, None)
    spec, spec_rounds = _emit(noise, ADVICE)
    assert plain_rounds == 3 * SEEDS and 200_000 < plain_rounds + spec_rounds
    assert spec_rounds < 0.7 * plain_rounds
    assert np.array_equal(spec, plain)
    assert _joint_z(spec) < Z_LIMIT


def _threshold(bar: float) -> Chosen:
    """A child with p >= bar is taken although the target chose another token (lossy acceptance)."""

    def mutate(chosen: torch.Tensor, contexts: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        chosen = chosen.clone()
        for node in reversed(range(len(tree))):
            parent = 1 + tree.parents[node]
            likely = TOY_LOGP[contexts[:, parent], tree.tokens[node]] >= math.log(bar)
            chosen[likely, parent] = tree.tokens[node]
        return chosen

    return mutate


def _parents_bonus(chosen: torch.Tensor, contexts: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """Leaves emit the token that was chosen at their parent: the bonus comes from the wrong node."""
    chosen = chosen.clone()
    for node in range(len(tree)):
        if not tree.children(node):
            chosen[:, 1 + node] = chosen[:, 1 + tree.parents[node]]
    return chosen


def _sibling_takes_the_rest(chosen: torch.Tensor, contexts: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """When no child is right, half of what is left goes to a rejected sibling."""
    chosen = chosen.clone()
    missed = ~torch.isin(chosen[:, 0], torch.tensor([tree.tokens[c] for c in tree.children(-1)]))
    chosen[missed & (chosen[:, 0] % 2 == 0), 0] = tree.tokens[1]
    return chosen


@pytest.mark.parametrize(
    "mutate",
    [
        pytest.param(_threshold(0.3), id="threshold 0.3"),
        pytest.param(_threshold(0.5), id="threshold 0.5"),
        pytest.param(_parents_bonus, id="bonus of the parent"),
        pytest.param(_sibling_takes_the_rest, id="wrong residual"),
    ],
)
def test_a_lossy_verdict_fails_the_law(noise: torch.Tensor, mutate: Chosen) -> None:
    assert _joint_z(_emit(noise[:20_000], ADVICE, mutate)[0]) > Z_LIMIT


def test_noise_used_twice_fails_the_law(noise: torch.Tensor) -> None:
    """The same noise at every position, or at every second one; z of a right law stays small at this size."""
    some = noise[:20_000]
    assert _joint_z(_emit(some, ADVICE)[0]) < Z_LIMIT
    assert _joint_z(_emit(some[:, [0] * 7], ADVICE)[0]) > Z_LIMIT
    assert _joint_z(_emit(some[:, [0, 1, 0, 1, 0, 1, 0]], ADVICE)[0]) > Z_LIMIT


@pytest.mark.parametrize(
    "other",
    [
        "swapped siblings",
        *(pytest.param(o, marks=pytest.mark.slow) for o in ("equal siblings only", "a chain")),
    ],
)
def test_other_advice_changes_no_token(noise: torch.Tensor, other: str) -> None:
    swapped = DraftTree([5, 3, 1, 4, 0, 2, 1], [-1, -1, -1, 0, 1, 2, 2])
    equal = DraftTree([1, 1, 1, 3, 3, 2], [-1, -1, -1, 0, 0, 1])
    trees = {
        "swapped siblings": swapped,
        "equal siblings only": equal,
        "a chain": DraftTree([1, 1, 4, 2], [-1, 0, 1, 2]),
    }
    some = noise[:20_000]
    assert np.array_equal(_emit(some, trees[other])[0], _emit(some, None)[0])


def test_choices_of_one_request_are_independent() -> None:
    """Two choices share seed and position; their tokens follow the product law, one choice twice does not."""
    logits = TOY_LOGP[0].expand(2, -1)
    p = TOY_LOGP[0].exp().double().numpy()

    def z(choices: tuple[int, int]) -> float:
        keys = streams([(11, position, choice) for position in range(20_000) for choice in choices])
        tokens = (logits + gumbel_rows(keys, TOY).view(-1, 2, TOY)).argmax(-1).numpy()
        counts = np.bincount(tokens @ np.array([TOY, 1]), minlength=TOY**2)
        return z_score(counts, np.outer(p, p).ravel())

    assert z((0, 1)) < Z_LIMIT
    assert z((0, 0)) > Z_LIMIT
