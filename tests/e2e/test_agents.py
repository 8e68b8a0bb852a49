"""A part of `python -m tests.e2e.agents`: schemas and tools are the same and valid, whatever the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from eyas.engine.grammar.state import GrammarState
from tests.e2e.agent_requests import FORMATS, Asked, dialogues
from tests.e2e.agent_results import Part, Results, Tally
from tests.e2e.agents import VARIANTS, Questions
from tests.e2e.lossless import Variant

pytestmark = pytest.mark.usefixtures("one_thread")

CHAIN, TREE = (next(v for v in VARIANTS if v.name == name) for name in ("unified, chain", "split, tree"))


@pytest.fixture(scope="module")
def questions() -> Questions:
    made = Questions(2)
    assert not made.refer().problem
    return made


@pytest.mark.slow
def test_every_answer_is_valid_or_cut(questions: Questions) -> None:
    verdicts = questions.verdicts(questions.expected)
    assert set(verdicts.values()) <= {"", "cut"}, verdicts
    turns = [name.rpartition("/")[2] for name, said in verdicts.items() if not said]
    assert len(turns) > len(verdicts) // 2 and {"first", "second"} <= set(turns)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [TREE, CHAIN], ids=lambda v: v.name)
def test_no_token_differs(questions: Questions, variant: Variant) -> None:
    assert questions.run(variant).problem == ""


@pytest.mark.slow
def test_masks_of_the_root_alone_are_noticed(questions: Questions) -> None:
    masks = GrammarState.masks

    def roots(self: GrammarState, *given: Any) -> list[np.ndarray | None]:
        found = masks(self, *given)
        return found[:1] * len(found)

    with mock.patch.object(GrammarState, "masks", roots):
        assert questions.run(CHAIN).problem


def test_parts_are_kept_and_summed(tmp_path: Path) -> None:
    way = CHAIN.name
    for seed, wrong in ((1, []), (2, ["tools/0/first from token 3"])):
        kept = Results(tmp_path / "parts")  # another process each time
        done = Tally(answers=3, valid=2, cut=1, differing=wrong, verify_steps=4, accepted=seed)
        kept.add(Part(seed, 2, {way: done}, {"schema": {"valid": 2, "cut": 1}}))
        assert not kept.of(way).problem(CHAIN) if not wrong else "differs" in kept.of(way).problem(CHAIN)
    sums = Results(tmp_path / "parts")
    assert sums.has(1, 2) and sums.has(2, 2) and not sums.has(2, 3) and not sums.has(3, 2)
    assert sums.of(way) == Tally(6, 0, 4, 2, differing=wrong, verify_steps=8, accepted=3)
    assert sums.of("no such way").problem(CHAIN) == "no draft was ever accepted"
    sums.add(Part(3, 2, {way: Tally(failures=["a request did not end"])}, {}))
    assert sums.of(way).problem(CHAIN) == "a request did not end"
    assert len(Results(tmp_path / "parts").parts) == 2  # it is to be asked again


def test_a_judge_refuses_what_was_not_asked_for() -> None:
    """Arguments that no schema describes, half a call, and words where calls are required."""
    call = '<tool_call>\n{"name": "tool_0", "arguments": {"nothing": 1}}\n</tool_call>'
    asked = dialogues(4 * len(FORMATS), 3)[:: len(FORMATS)]
    assert all(refused(one, call) and refused(one, call[:-12]) for one in asked)
    assert any(refused(one, "words") for one in asked) and not all(refused(one, "words") for one in asked)


def refused(asked: Asked, text: str) -> bool:
    try:
        asked.judge(text)
    except Exception:
        return True
    return False
