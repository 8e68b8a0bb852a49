"""A block's context begins before the verdict of its rounds: it is what follows the verdict elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.device.executor import WORDS
from eyas.engine.device.program import DeviceState, StepProgram
from eyas.engine.device.step import StepShape
from eyas.engine.speculation.device import DeviceDrafter
from tests.gpu import time_block

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]

STEPS, BATCH, ROUNDS, CHANCE = 2, 1, 3, 0.5


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> DeviceState:
    head = replace(time_block.HEADS["ids32k"], steps=STEPS, length=2.0)
    return time_block.state_of("cpu", "tiny", head, tmp_path_factory.mktemp("models"), BATCH)


@torch.inference_mode()
def drafted(state: DeviceState) -> tuple[torch.Tensor, torch.Tensor]:
    """The drafts of some rounds, of which half is refused, and the lengths after each."""
    assert state.drafter is not None and state.synthetic is not None
    state.synthetic.fill_(CHANCE)
    for pool in state.pools:
        pool.tensor.zero_()
    time_block.settle(state, STEPS, BATCH)
    inputs, results = (torch.zeros(WORDS, dtype=torch.int32) for _ in range(2))
    program = StepProgram(replace(state, lookup=None), StepShape(BATCH, STEPS + 1), inputs, results)
    program.blank()
    slots = torch.arange(BATCH, dtype=torch.int32)
    program._part["slots"].copy_(slots)
    program._part["sampled_slots"].copy_(slots.repeat_interleave(STEPS + 1))
    found = []
    for _ in range(ROUNDS):
        program.forward()
        assert not state.drafter._side.begun, "a graph would end before what was begun in it"
        program.rest(program.choose())
        found.append((state.tables.drafts[:BATCH, :STEPS].clone(), state.tables.length[:BATCH].clone()))
    drafts, lengths = zip(*found, strict=True)
    return torch.stack(drafts), torch.stack(lengths)


def test_drafts_are_those_of_a_context_behind_the_verdict(
    state: DeviceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts, lengths = drafted(state)
    grew = lengths.diff(dim=0)
    assert grew.min() < STEPS + 1, "no draft was refused"
    with monkeypatch.context() as patched:
        patched.setattr(DeviceDrafter, "ahead", lambda *_: None)
        behind, same = drafted(state)
    assert torch.equal(lengths, same) and torch.equal(drafts, behind)
    monkeypatch.setattr(DeviceDrafter, "ahead", lambda self, tapped, *_: tapped)  # nothing is kept
    assert not torch.equal(drafted(state)[0], drafts)
