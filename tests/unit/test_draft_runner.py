"""Proposals against EAGLE's own description: a chain of argmaxes, a tree grown and reranked by score.

At a temperature the same, of logits to which the request's noise is added.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from eyas.common.config import SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.engine.batch.tree import DraftTree
from eyas.engine.sampling.noise import gumbel_at, streams
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftRequest, DraftRunner
from tests.unit.head_equations import Eagle, Eagle3
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny import write_tiny_eagle, write_tiny_eagle3, write_tiny_llama

N = 70  # certain rows
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, seed=23)


@pytest.fixture(params=[None, 100, 0], ids=["shared_head", "own_head_d2t", "eagle_1"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    target = write_tiny_llama(tmp_path / "target")
    if request.param == 0:
        return target, write_tiny_eagle(tmp_path / "head", target)
    return target, write_tiny_eagle3(tmp_path / "head", target, draft_vocab=request.param)


class Paper:
    """Section 2 of EAGLE-2 on top of the head's equations; every path is computed by itself."""

    def __init__(self, equations: Eagle | Eagle3, ids: torch.Tensor, g: torch.Tensor, start: int) -> None:
        self._equations = equations
        self._ids = ids  # target id of each draft id
        self._g = g  # output at the last certain row
        self._start = start  # position of the first draft
        self.params = GREEDY

    def next(self, path: list[int]) -> torch.Tensor:
        """Draft probabilities after the certain rows and the tokens of `path`."""
        certain = self._equations.count
        g = self._g
        for token in path:
            g = self._equations.row(g, token)
        self._equations.forget(certain)
        noise = gumbel_at(streams([(self.params.seed, self._start + len(path), 0)]), self._ids.unsqueeze(0))
        return (self._equations.logits(g) + self.params.temperature * noise[0]).softmax(-1)

    def best(self, path: list[int], k: int) -> list[tuple[int, float]]:
        scores, ids = self.next(path).topk(k)
        return [(int(self._ids[i]), float(s)) for i, s in zip(ids, scores, strict=True)]

    def chain(self, steps: int) -> list[int]:
        path: list[int] = []
        for _ in range(steps):
            path.append(self.best(path, 1)[0][0])
        return path

    def tree(self, spec: SpeculationConfig) -> list[tuple[int, ...]]:
        """The kept paths: the best draft_tokens - 1 of all candidates, in order of their flat index."""
        pool: list[tuple[float, tuple[int, ...]]] = []
        frontier: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
        for _ in range(spec.steps):
            level = [
                (score * p, (*path, token))
                for score, path in frontier
                for token, p in self.best(list(path), spec.topk)
            ]
            pool += level
            frontier = sorted(level, key=lambda candidate: -candidate[0])[: spec.topk]
        order = sorted(range(len(pool)), key=lambda i: -pool[i][0])[: spec.draft_tokens - 1]
        return [pool[i][1] for i in sorted(order)]


def _prepared(folders: tuple[Path, Path], offset: int = 0) -> tuple[DraftRunner, DraftRequest, Paper]:
    """N certain rows in two uneven extensions, beside another sequence."""
    target, folder = folders
    rig = HeadRig(folder, target_rig := Rig(target))
    runner = DraftRunner(rig.head, rig.pool, rig.backend)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(N, 64, generator=generator)
    tokens = torch.randint(256, (N,), generator=generator).tolist()
    pages, others = target_rig.table(N + 64), target_rig.table(N + 64)
    runner.extend([DraftExtension(pages, 0, tokens[:41], features[:41], offset)])
    hidden = runner.extend(
        [
            DraftExtension(others, 0, tokens[:9], features[:9]),
            DraftExtension(pages, 41, tokens[41:], features[41:], offset),
        ]
    )[1]
    equations = {"eagle": Eagle, "eagle3": Eagle3}[rig.config.algorithm](folder, target)
    g = [equations.row(f, t) for f, t in zip(features, tokens, strict=True)][-1]
    ids = torch.arange(256) if rig.head.token_map is None else rig.head.token_map
    request = DraftRequest(pages, N, hidden, GREEDY, choice=0, root=tokens[-1], offset=offset)
    return runner, request, Paper(equations, ids, g, offset + N + 1)


def test_a_chain_is_the_argmax_of_the_argmax(folders: tuple[Path, Path]) -> None:
    runner, request, paper = _prepared(folders)
    [tree] = runner.propose([request], SpeculationConfig(steps=5))
    assert tree.is_chain
    assert list(tree.tokens) == paper.chain(5)


@pytest.mark.parametrize(("steps", "topk", "nodes"), [(3, 2, 6), (4, 3, 14), (2, 4, 30)])
def test_a_tree_keeps_the_best_of_all_candidates(
    folders: tuple[Path, Path], steps: int, topk: int, nodes: int
) -> None:
    spec = SpeculationConfig(steps, topk, nodes)
    runner, request, paper = _prepared(folders)
    [tree] = runner.propose([request], spec)
    assert _paths(tree) == paper.tree(spec)


@pytest.mark.parametrize("offset", [0, 40])
def test_a_known_seed_is_in_every_draft(folders: tuple[Path, Path], offset: int) -> None:
    """The noise is that of each draft's absolute position; another seed makes other drafts."""
    runner, request, paper = _prepared(folders, offset)
    paper.params = WARM
    warm = dataclasses.replace(request, params=WARM)
    [chain], [tree] = (
        runner.propose([warm], spec) for spec in (SpeculationConfig(5), SpeculationConfig(4, 3, 14))
    )
    assert list(chain.tokens) == paper.chain(5)
    assert _paths(tree) == paper.tree(SpeculationConfig(4, 3, 14))
    other = dataclasses.replace(request, params=SamplingParams(temperature=0.8, seed=24))
    assert runner.propose([request, warm, other], SpeculationConfig(4, 3, 14))[1] == tree
    assert runner.propose([other], SpeculationConfig(4, 3, 14)) != [tree]


def test_a_window_stands_at_absolute_positions(folders: tuple[Path, Path]) -> None:
    """The same rows 40 positions later: attention sees relative positions only, so the chain is the same."""
    runner, request, paper = _prepared(folders, offset=40)
    [tree] = runner.propose([request], SpeculationConfig(steps=5))
    assert list(tree.tokens) == paper.chain(5)


def test_proposals_leave_the_certain_rows_alone(folders: tuple[Path, Path]) -> None:
    runner, request, paper = _prepared(folders)
    first = runner.propose([request], SpeculationConfig(3, 4, 12))
    assert runner.propose([request], SpeculationConfig(3, 4, 12)) == first
    assert list(runner.propose([request], SpeculationConfig(steps=5))[0].tokens) == paper.chain(5)


def _paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]
