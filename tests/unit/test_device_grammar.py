"""Grammars on the device: masks by the specification, and the plain engine's answers, kernels interpreted."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.grammars.notations import Grammar
from eyas.common.types import FinishCause, GenerationRequest
from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.batch.tree import DraftTree
from eyas.engine.device import special as special_rows
from eyas.engine.device.special import DraftNodes, SpecialRows, SpecialSampler
from eyas.engine.device.step import PlacedBatch, StepShape
from eyas.engine.grammar.state import MaskRoom
from eyas.engine.kernels.sampling.special import COLUMNS, mask_in_place
from eyas.engine.sampling.sampler import SampledRow, sample
from tests.unit.device_engines import SIZES, on_device, tokens, write_head
from tests.unit.grammar_requests import END, PIECES, bits, requests, write_tokenizer
from tests.unit.loopback import Loopback, Result, wait_all
from tests.unit.special_steps import EOS, VOCAB, Step, same
from tests.unit.tiny import write_tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")


CHAIN = SpeculationConfig(steps=2, topk=1, draft_tokens=3)
TREE = SpeculationConfig(steps=2, topk=2, draft_tokens=4)


@pytest.mark.parametrize("asked", [{}, {"logprobs": 3}, {"repetition_penalty": 1.7, "logit_bias": {3: 4.0}}])
def test_masked_rows_are_the_specifications(asked: dict) -> None:
    """The rows that have a mask, few ids left or many; those beside them are as they would be alone."""
    step = Step(3, 1, [asked] * 8)
    rows = SpecialRows(EOS)
    masks: dict[int, np.ndarray] = {}
    for place, seq in enumerate([*step.rounds, *step.ends]):
        rows.add_round(place, 1, seq) if place < len(step.rounds) else rows.add_end(place, seq)
        if place % 2:
            ids = step.rng.sample(range(VOCAB), (1, 2, 9, VOCAB - 1)[place // 2])
            masks[place] = bits(ids)
            rows.add_masks(place, [masks[place], None])
    every = torch.from_numpy(rows.array())
    assert every.shape[1] == len(COLUMNS) + 2
    sampler = SpecialSampler(step.tables, VOCAB, pdl=False)
    told = rows.report([sampler.sample(step.logits, step.positions(), step.settled, every).cpu()])
    for place, seq in enumerate([*step.rounds, *step.ends]):
        params = seq.generation.request.params
        row = SampledRow(params, seq.choice, len(seq), seq.prompt, seq.output, (), (), masks.get(place))
        found = sample(step.logits[place : place + 1].cpu(), [row])
        assert step.settled[place].item() == found.tokens[0], place
        assert same(next(iter(told.logprobs(place, (0,))), None), found.logprobs[0])
        if place in masks:
            alone = sample(step.logits[place : place + 1].cpu(), [replace(row, allowed=None)])
            masks[place] = np.array(found.tokens != alone.tokens)
    assert any(bool(changed) for changed in masks.values()), "the masks changed nothing"


def test_rows_that_have_masks_alone_are_sampled_with_all_others() -> None:
    """By logits that were masked where they stand; what has no mask is as it was, and so is what asks for
    more.
    """
    grammar = Grammar.regex("a*")
    step = Step(
        7, 1, [{"grammar": grammar}, {}, {"grammar": grammar, "logprobs": 1}, {"grammar": grammar}] * 2
    )
    works = [SequenceWork(seq, len(seq) - 1, [1], None, sample=True, round=True) for seq in step.rounds]
    ends = [SequenceWork(seq, 0, [1], None, sample=True) for seq in step.ends]
    rows = SpecialRows.of(StepShape(4, 1, 4, 4, 4), PlacedBatch(works, (), ends), EOS)
    masks = {place: bits(step.rng.sample(range(VOCAB), 5)) for place in range(8)}
    room = MaskRoom(np.empty((1 + rows.most_masked, len(masks[0])), np.int32))
    for mask in (masks[1], masks[3]):  # of an output that failed, say, and of one that is there
        room.take()[:] = mask
    for place in rows._works:
        rows.add_masks(place, [room._taken[1] if place == 3 else masks[place]])
    masked = rows.masked(room)
    assert sorted(masked.places.tolist()) == [-1, 0, 3, 4, 7] and len(rows.array()) == 2
    before = step.logits.clone()
    mask_in_place(step.logits, *(torch.from_numpy(each).to(step.logits.device) for each in masked))
    for place, seq in enumerate([*step.rounds, *step.ends]):
        params = seq.generation.request.params
        allowed = masks[place] if place in (0, 3, 4, 7) else None
        found, alone = (
            sample(logits[place : place + 1].cpu(), [SampledRow(params, 0, 9, (), (), (), (), mask)]).tokens[
                0
            ]
            for logits, mask in ((step.logits, None), (before, allowed))
        )
        assert found == alone, place
        assert torch.equal(step.logits[place], before[place]) == (allowed is None)


def test_each_node_of_a_tree_has_a_mask_of_its_own() -> None:
    """What the tables say of a tree says where each mask stands."""
    step, width = Step(5, 6, [{}] * 8), 6
    rows, expected = SpecialRows(EOS), dict[int, SampledRow]()
    for i, seq in enumerate(step.rounds):
        nodes = DraftNodes.of(
            torch.stack((step.tables.drafts[seq.slot], step.tables.parents[seq.slot])).tolist(), width
        )
        assert (nodes.tree.tokens, nodes.tree.parents) == (
            step.trees[seq.slot].tokens,
            step.trees[seq.slot].parents,
        )
        masks = [bits(step.rng.sample(range(VOCAB), 3)) for _ in range(1 + len(nodes.tree))]
        rows.add_round(i * width, width, seq)
        rows.add_masks(i * width, masks)
        for node, mask in enumerate(masks):
            above = [nodes.tree.tokens[n] for n in nodes.tree.path(node - 1)] if node else []
            params, position = seq.generation.request.params, len(seq) + len(above)
            row = SampledRow(params, seq.choice, position, seq.prompt, seq.output, above, (), mask)
            expected[i * width + node] = row
    every = torch.from_numpy(rows.array())
    sampler = SpecialSampler(step.tables, VOCAB, pdl=False)
    sampler.sample(step.logits, step.positions(), step.settled, every)
    assert len(expected) > 2 * len(step.rounds)
    for place, row in expected.items():
        found = sample(step.logits[place : place + 1].cpu(), [row])
        assert step.settled[place].item() == found.tokens[0], place


def test_places_without_a_draft_are_left_out() -> None:
    """A request's own limits leave holes in a tree."""
    drafts = np.array([[3, -1, 4, 5, 6, -1], [-1, -1, 0, 2, -1, 4]], np.int32)
    assert DraftNodes.of(drafts.tolist(), 7) == DraftNodes(
        DraftTree([3, 4, 5, 6], [-1, 0, 1, -1]), (1, 3, 4, 5)
    )
    assert DraftNodes.of(drafts.tolist(), 4) == DraftNodes(DraftTree([3, 4], [-1, 0]), (1, 3))
    assert DraftNodes.of((drafts * 0 - 1).tolist(), 7) == DraftNodes(DraftTree([], []), ())


def test_rows_without_a_grammar_are_what_they_were() -> None:
    """No column more, no launch more."""
    step = Step(1, 1, [{"logprobs": 1}] * 2)
    rows = SpecialRows(EOS)
    rows.add_end(0, step.sequences[0])
    rows.add_masks(0, [])
    assert rows.array().shape == (1, len(COLUMNS))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """The plain engine's, of a tiny model with a vocabulary of 16."""
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(folder / "target", tied=False, **SIZES)
    write_tokenizer(target)
    return EngineConfig(
        model=str(target),
        draft=str(write_head(folder / "head", target)),
        speculation=CHAIN,
        num_pages=32,
        chunk_tokens=16,
        max_running=4,
        context_length=128,
        pool_dir=str(tmp_path_factory.mktemp("pools")),
        worker="unified",
    )


def answers(config: EngineConfig, requests: list[GenerationRequest]) -> list[Result]:
    cluster = Loopback(config)
    try:
        results = [cluster.submit(request, split=False) for request in requests]
        wait_all(results, 300)
    finally:
        cluster.close()
    return results


def text(ids: list[int]) -> str:
    return "".join(PIECES[id] for id in ids if id not in (2, END))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("drafts", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_answers_are_the_plain_engines(config: EngineConfig, drafts: SpeculationConfig | None) -> None:
    """And valid; all of them are drafted for."""
    plain = replace(config, draft=None) if drafts is None else replace(config, speculation=drafts)
    asked = requests()
    expected, found = answers(plain, asked), answers(on_device(plain), asked)
    assert tokens(found) == tokens(expected)
    patterns = {"bits": "(01|10){1,3}", "words": "ab|ba|abba", "pairs": r'\{ *"a" *: *[01] *\}'}
    for result, request in zip(found, asked, strict=True):
        for choice, ids in result.tokens.items():
            if request.id in patterns and result.finishes[choice] is FinishCause.STOP:
                assert re.fullmatch(patterns[request.id], text(ids)), text(ids)
    offered = [any(entry.offered for entry in result.entries) for result in found]
    assert offered == [drafts is not None] * len(found)
    accepted = sum(entry.accepted for result in found[:-1] for entry in result.entries)
    assert bool(accepted) == (drafts is not None), "no draft beside a mask was right"


def test_power_a_mask_that_is_shifted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = special_rows.special.mask

    def shifted(work, count: int) -> None:
        work.masks.bitwise_left_shift_(1)
        mask(work, count)

    monkeypatch.setattr(special_rows.special, "mask", shifted)
    with pytest.raises(AssertionError):
        test_masked_rows_are_the_specifications({})
