"""Hybrids in plain torch: transformers' logits, and bits that no cut, neighbour or draft can change."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.unit.family_sample import VOCAB
from tests.unit.hybrid_rig import HYBRIDS, HybridRig, described, write_hybrid

LENGTH = 200


def _tokens(count: int, seed: int = 3) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS if name != "qwen3_next"]


@pytest.fixture(scope="module", params=["qwen3_next", *OTHERS])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HybridRig:
    folder = tmp_path_factory.mktemp(request.param)
    write_hybrid(folder, request.param)
    return HybridRig(folder, described(folder, request.param))


@pytest.fixture(scope="module")
def whole(rig: HybridRig) -> torch.Tensor:
    """The logits of a prompt in one piece."""
    return rig.step([(rig.text(), _tokens(LENGTH), None)])[0]


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, tokens = write_hybrid(tmp_path, name), _tokens(LENGTH)
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    rig = HybridRig(tmp_path, described(tmp_path, name))
    [ours] = rig.step([(rig.text(), tokens, None)])
    assert (ours - theirs).abs().max() <= 5e-5 * theirs.abs().max()


def test_chunks_alone_and_together_change_no_bit(rig: HybridRig, whole: torch.Tensor) -> None:
    tokens, rest = _tokens(LENGTH), random.Random(1)
    texts = [rig.text(LENGTH) for _ in range(6)]
    while left := [text for text in texts if text.rows < LENGTH]:
        some = [text for text in left if rest.random() < 0.8] or left
        cuts = [rest.choice((1, 2, 3, 5, 17, 63, 64, 65, 130)) for _ in some]
        steps = [(text, tokens[text.rows :][:cut], None) for text, cut in zip(some, cuts, strict=True)]
        firsts = [text.rows for text in some]
        for first, logits in zip(firsts, rig.step(steps), strict=True):
            assert torch.equal(logits, whole[first : first + len(logits)])
    for text in texts:
        rig.free(text)


def test_rejected_drafts_leave_no_trace(rig: HybridRig, whole: torch.Tensor) -> None:
    tokens, rest = _tokens(LENGTH), random.Random(2)
    text = rig.text()
    rig.step([(text, tokens[:50], None)])
    while text.rows < 140:
        first = text.rows
        parents, drafts, good = [-1], [tokens[first]], [0]
        for _ in range(rest.randrange(8)):  # drafts, some of which are right
            parents.append(rest.randrange(len(parents)))
            depth = _depth(parents, len(parents) - 1)
            right = parents[-1] == good[-1] and rest.random() < 0.7
            drafts.append(tokens[first + depth] if right else rest.randrange(VOCAB))
            if right:
                good.append(len(parents) - 1)
        [logits] = rig.step([(text, drafts, parents)])
        assert torch.equal(logits[good], whole[first : first + len(good)])
        rig.accept(text, good[1:])
    rig.free(text)


def _depth(parents: list[int], node: int) -> int:
    return 0 if node == 0 else 1 + _depth(parents, parents[node])
