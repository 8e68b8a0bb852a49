"""Hybrids in plain torch: transformers' logits, and bits that no cut, neighbour or draft can change."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.engine.models.ops import torch_ops
from eyas.engine.states import plain
from eyas.engine.states.delta import DeltaRule
from eyas.engine.states.store import StateStore
from tests.unit import hybrid_rig
from tests.unit.family_sample import VOCAB
from tests.unit.hybrid_rig import HYBRIDS, HybridRig, Text, described, write_hybrid

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
    model, tokens = write_hybrid(tmp_path, name), _tokens(130)
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", HYBRIDS)
def test_every_cut_gives_the_same_bits_together_and_some_alone(name: str, tmp_path: Path) -> None:
    model, tokens = write_hybrid(tmp_path, name), _tokens(LENGTH)
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    rig = HybridRig(tmp_path, described(tmp_path, name), slots=LENGTH, pages=LENGTH * 13)
    [whole] = rig.step([(rig.text(LENGTH), tokens, None)])
    assert (whole - theirs).abs().max() <= 5e-5 * theirs.abs().max()
    texts = {cut: rig.text(LENGTH) for cut in range(1, LENGTH)}
    for part in (lambda cut: tokens[:cut], lambda cut: tokens[cut:]):
        firsts = [text.rows for text in texts.values()]
        steps = [(text, part(cut), None) for cut, text in texts.items()]
        for first, logits in zip(firsts, rig.step(steps), strict=True):
            assert torch.equal(logits, whole[first : first + len(logits)])
    for text in texts.values():
        rig.free(text)
    for cut in range(1 + list(HYBRIDS).index(name), LENGTH, 2 * len(HYBRIDS)):
        text = rig.text(LENGTH)
        parts = [rig.step([(text, part, None)])[0] for part in (tokens[:cut], tokens[cut:])]
        assert torch.equal(torch.cat(parts), whole)
        rig.free(text)


def _differs(rig: HybridRig, whole: torch.Tensor, *, swapped: bool = False) -> bool:
    """Serves two texts, one of which is the whole's first rows: by chunks, a tree and more rows."""
    tokens, others = _tokens(LENGTH), _tokens(LENGTH, 4)
    text, other = rig.text(LENGTH), rig.text(LENGTH)
    [logits, _] = rig.step([(text, tokens[:70], None), (other, others[:70], None)])
    same = torch.equal(logits, whole[:70])
    if swapped:
        text.slot, other.slot = other.slot, text.slot
    [logits] = rig.step([(text, tokens[70:130], None)])  # over a boundary, from a state
    same = same and torch.equal(logits, whole[70:130])
    tree = [tokens[130], others[131], tokens[131], others[132], tokens[132]]
    [logits] = rig.step([(text, tree, [-1, 0, 0, 1, 2])])
    same = same and torch.equal(logits[[0, 2, 4]], whole[130:133])
    rig.accept(text, [2, 4])
    while text.rows < LENGTH:  # over a boundary by rounds
        first, part = text.rows, tokens[text.rows :][:15]
        [logits] = rig.step([(text, part, range(-1, len(part) - 1))])
        same = same and torch.equal(logits, whole[first : first + 15])
        rig.accept(text, range(1, len(part)))
    for each in (text, other):
        rig.free(each)
    return not same


def _with_rows(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Any:
    def changed(rows: Any, stored: Any, rule: Any, inputs: torch.Tensor, gates: torch.Tensor) -> Any:
        return plain.recur(rows, stored, rule, *change(inputs, gates))

    return changed


def _first_fold_alone(text: Text, *step: Any) -> int:
    """The first fold is known, so that a later one's rows are folded again, into a state that has them."""
    return text.bound or int(BOUND_BEHIND(text, *step))


def _window_off_by_one(rule: DeltaRule, *rest: Any) -> torch.Tensor:
    return CONVOLVED(replace(rule, filters=rule.filters.roll(1, 0)), *rest)


CONVOLVED = DeltaRule._convolved
BOUND_BEHIND = hybrid_rig.bound_behind
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "the gate of a neighbour's head": (torch_ops, "recur", _with_rows(lambda x, g: (x, g.roll(1, 1)))),
    "the gate of a neighbour's row": (torch_ops, "recur", _with_rows(lambda x, g: (x, g.roll(1, 0)))),
    "the window off by one": (DeltaRule, "_convolved", _window_off_by_one),
    "rows of a rejected draft stay": (StateStore, "move", lambda *_: None),
    "rows are folded twice": (hybrid_rig, "bound_behind", _first_fold_alone),
}


@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_fault_is_seen(
    rig: HybridRig, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A convolution alone has neither gates nor a state, and reads rows that a fold leaves as they are."""
    monkeypatch.setattr(*MUTATIONS[fault])
    shape = rig.config.delta
    assert shape is not None
    needed = {"the gate": shape.gates, "rows are folded": shape.key_size}
    there = all(size for start, size in needed.items() if fault.startswith(start))
    assert _differs(rig, whole) == there


def test_a_state_of_another_prefix_of_the_same_length_is_seen(rig: HybridRig, whole: torch.Tensor) -> None:
    assert not _differs(rig, whole)
    assert _differs(rig, whole, swapped=True)


@pytest.mark.parametrize("own_stay", [True, False])
def test_what_ran_in_a_slot_before_is_not_gone_on_from(
    rig: HybridRig, whole: torch.Tensor, own_stay: bool
) -> None:
    """A state comes to a slot from elsewhere, as pulls bring it; its stay alone says that it is another's.

    A convolution alone goes on from nothing but the rows in its slot.
    """
    shape = rig.config.delta
    assert shape is not None
    tokens, others = _tokens(LENGTH), _tokens(LENGTH, 4)
    text, other = rig.text(LENGTH), rig.text(LENGTH)
    for each, ids in ((text, tokens), (other, others)):
        for part in (ids[:90], ids[90:91]):
            rig.step([(each, part, None)])
    rig.store._memory[other.slot] = rig.store._memory[text.slot]
    text.slot, other.slot = other.slot, text.slot
    if not own_stay:
        text.stay, other.stay = other.stay, text.stay
    [logits] = rig.step([(text, tokens[91:99], None)])
    assert torch.equal(logits, whole[91:99]) is (own_stay or not shape.key_size)
    for each in (text, other):
        rig.free(each)
