"""Drafts looked up on the device against the plain rule, and beside a head against the plain drafter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import pytest
import torch

from eyas.common.config import SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.engine.batch.sequence import Continuation, Sequence
from eyas.engine.batch.tables import SlotTables, TableSizes, TableWrites
from eyas.engine.batch.tree import DraftTree
from eyas.engine.kernels.drafts import lookup as kernels
from eyas.engine.speculation.drafters.base import SequenceProposal
from eyas.engine.speculation.drafters.device_lookup import DeviceLookup, words_predicted
from eyas.engine.speculation.drafters.lookup import LookupDrafter
from tests.unit.crossed import crossed
from tests.unit.lookup_rig import ScriptedHead, sequence
from tests.unit.lookup_rig import sequences as some
from tests.unit.rounds_rig import DEVICE, put_tree, random_tree, visible, words_of

CONTEXT = 96
SLOTS = 12  # and one for padding
PAGE = 4


@dataclass
class World:
    """The same sequences on a device and before a plain drafter."""

    spec: SpeculationConfig
    headed: bool
    tables: SlotTables
    device: DeviceLookup
    head: ScriptedHead
    plain: LookupDrafter

    @classmethod
    def of(cls, spec: SpeculationConfig, *, headed: bool) -> World:
        sizes = TableSizes(SLOTS + 1, 1, spec.width, context=CONTEXT, predicted=words_predicted(CONTEXT))
        tables, head = SlotTables(sizes, DEVICE), ScriptedHead()
        device = DeviceLookup(tables, spec, headed=headed, trees=headed and spec.topk > 1)
        return cls(spec, headed, tables, device, head, LookupDrafter(spec, head if headed else None))

    def occupy(self, sequences: list[Sequence]) -> None:
        writes = TableWrites(self.tables)
        for seq in sequences:
            writes.occupy(seq.slot, SamplingParams(), 0, speculative=32)
            self.device.occupy(writes, seq)
            writes.put("text", seq.slot, seq.all_tokens())
            writes.put("length", seq.slot, (len(seq) - 1,))
        self.tables.apply(torch.from_numpy(writes.array()).to(DEVICE))

    def grow(self, seq: Sequence, tokens: list[int]) -> None:
        """As a verdict does: the drafts are used up."""
        for token in tokens:
            self.tables.text[seq.slot, len(seq)] = token
            seq.output.append(token)
        self.tables.length[seq.slot] = len(seq) - 1
        self.tables.drafts[seq.slot] = -1

    def round(self, sequences: list[Sequence], trees: dict[int, DraftTree]) -> dict[int, DraftTree]:
        """Both look up after the head has proposed `trees`, by slot; what the plain one gives, by slot."""
        for slot, tree in trees.items():
            put_tree(self.tables, slot, tree)
        self.head.drafts = [
            SequenceProposal(s, len(s) - 1, trees[s.slot]) for s in sequences if s.slot in trees
        ]
        for seq in sequences:
            self.plain.grew(seq)
        self.device.look_up(self.slots(sequences), PAGE, pdl=False)
        return {draft.seq.slot: draft.tree for draft in self.plain.take()}

    def slots(self, sequences: list[Sequence]) -> torch.Tensor:
        slots = [*(seq.slot for seq in sequences), self.tables.padding_slot]
        return torch.tensor(slots, dtype=torch.int32, device=DEVICE)

    def check(self, sequences: list[Sequence], expected: dict[int, DraftTree]) -> None:
        for slot in (seq.slot for seq in sequences):
            tree = expected.get(slot, DraftTree([], []))
            tokens, tables = list(tree.tokens), self.tables
            room = tables.drafts.shape[1]
            assert tables.drafts[slot].tolist() == tokens + [-1] * (room - len(tokens)), slot
            for node in range(len(tokens)):
                assert int(tables.parents[slot, node]) == tree.parents[node]
                seen = words_of(visible(tree, node + 1), len(tables.mask))
                assert torch.equal(tables.mask[:, slot, node + 1], seen)
                assert int(tables.depth[slot, node + 1]) == tree.depth(node)


# --- alone ----------------------------------------------------------------------------------------------


def compared(alphabets: SequenceOf[int], seeds: range, *, history: bool = True) -> tuple[int, int]:
    """How many texts were compared, and for how many of them something was found."""
    spec, proposed = SpeculationConfig(5, 1, 6, ngram=history), 0
    for seed in seeds:
        for alphabet in alphabets:
            world, sequences = World.of(spec, headed=False), some(seed * 100 + alphabet, alphabet, SLOTS)
            world.occupy(sequences)
            expected = world.round(sequences, {})
            world.check(sequences, expected)
            proposed += len(expected)
    return len(seeds) * len(alphabets) * SLOTS, proposed


@pytest.mark.parametrize("history", [True, False])
def test_what_is_found_is_the_rules(history: bool) -> None:
    texts, proposed = compared((1, 2, 3, 5), range(1), history=history)
    assert texts / 5 < proposed < texts


@pytest.mark.slow
@pytest.mark.parametrize("history", [True, False])
def test_thousands_of_texts(history: bool) -> None:
    texts, proposed = compared(range(1, 7), range(30), history=history)
    assert texts > 2000 and texts / 5 < proposed < texts


def test_a_text_longer_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_TILE", 8)
    assert compared((2,), range(1))[1] > 0


def test_a_prediction_is_kept_as_far_as_there_is_room() -> None:
    """The rest of one that is longer proposes nothing, and nothing else is written."""
    world = World.of(SpeculationConfig(5, 1, 6), headed=False)
    ids = tuple(range(CONTEXT + 90))
    seq = sequence((1, 2, 3), [], ids)
    world.occupy([seq])
    assert world.tables.predicted[0].tolist() == [-1] * 5 + [1, 2, 3, *ids[:CONTEXT]]
    assert not world.tables.predicted[1:].any()
    world.round([seq], {})
    assert world.tables.drafts[0].tolist() == list(ids[:5])


@pytest.mark.parametrize("headed", [False, True])
def test_what_recent_answers_say_is_read_from_where_it_begins(headed: bool) -> None:
    """It comes while the sequences run, follows as many ids as it is said to, and goes again."""
    rng, spec = random.Random(3), SpeculationConfig(5, 1, 6, ngram=True, suffix=True)
    world, seqs = World.of(spec, headed=headed), some(3, 2, SLOTS)
    world.occupy(seqs)
    lengths = []
    for _ in range(6):
        writes = TableWrites(world.tables)
        for seq in seqs:
            if seq.generation.request.predicted or rng.random() < 0.4:
                continue
            said = tuple(rng.randrange(2) for _ in range(rng.randrange(12)))
            base = len(seq) - rng.randrange(3) if seq.output[3:] else len(seq)
            seq.continuation = Continuation(base, rng.randrange(1, 20), said) if said else None
            world.device.expect(writes, seq)
        world.tables.apply(torch.from_numpy(writes.array()).to(DEVICE))
        expected = world.round(seqs, {})
        world.check(seqs, expected)
        lengths.append(sum(seq.continuation is not None and seq.slot in expected for seq in seqs))
        for seq in seqs:
            world.grow(seq, [rng.randrange(2) for _ in range(rng.randrange(1, 3))])
    assert sum(lengths) > 10


def test_a_request_may_want_fewer_drafts() -> None:
    world, seqs = World.of(SpeculationConfig(5, 1, 6, ngram=True), headed=False), some(1, 2, SLOTS)
    world.occupy(seqs)
    world.tables.speculative.fill_(2)
    expected = world.round(seqs, {})
    assert any(len(tree) > 2 for tree in expected.values())
    world.check(seqs, {slot: tree.narrow(2) for slot, tree in expected.items()})


def test_who_is_not_drafted_for_is_left_alone() -> None:
    world, sequences = World.of(SpeculationConfig(5, 1, 6, ngram=True), headed=False), some(1, 2, SLOTS)
    world.occupy(sequences)
    world.tables.speculative.zero_()
    before = world.tables.memory.clone()
    assert world.round(sequences, {})
    assert torch.equal(world.tables.memory, before)


# --- beside a head --------------------------------------------------------------------------------------


def rounds(spec: SpeculationConfig, seed: int, count: int = 4) -> Iterator[tuple[int, int]]:
    """Plays rounds on both; per round, how many drafts were looked up and how many were the head's."""
    rng, world = random.Random(seed), World.of(spec, headed=True)
    sequences = some(seed, 3, SLOTS)
    world.occupy(sequences)
    for _ in range(count):
        trees = {seq.slot: a_tree(rng, spec) for seq in sequences if rng.random() < 0.8}
        expected = world.round(sequences, trees)
        world.check(sequences, expected)
        heads = sum(expected.get(slot) is tree for slot, tree in trees.items())
        yield len(expected) - heads, heads
        for seq in sequences:
            accepted = [*expected[seq.slot].tokens][: rng.randrange(3)] if seq.slot in expected else []
            world.grow(seq, [*accepted, rng.randrange(3)])


def a_tree(rng: random.Random, spec: SpeculationConfig) -> DraftTree:
    if spec.topk > 1:
        return random_tree(rng, spec.width - 1)
    return DraftTree([rng.randrange(3) for _ in range(spec.steps)], range(-1, spec.steps - 1))


@pytest.mark.parametrize(
    ("shape", "history"),
    crossed(
        [(3, 1, 4), (3, 2, 8), (5, 16, 70)],
        [True, False],
        quick=lambda shape, history: history == (shape[1] != 2) and shape[1] != 1,
    ),
)
def test_one_of_two_proposals(shape: tuple[int, int, int], history: bool) -> None:
    spec = SpeculationConfig(*shape, ngram=history)
    looked_up, heads = map(sum, zip(*rounds(spec, seed=7), strict=True))
    assert looked_up > 5 and heads > 5


# --- power: each of these mistakes is noticed -----------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"shortest": 3},
        {"lag": 2},
        {"depth": 2},
        {"history": False},
        pytest.param({"longest": 7}, marks=pytest.mark.slow),
        pytest.param({"certain": 512}, marks=pytest.mark.slow),
    ],
)
def test_another_rule_is_noticed(wrong: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LookupRule", lambda **numbers: replace(RULE(**numbers), **wrong))
    with pytest.raises(AssertionError):
        for seed in range(4):
            list(rounds(SpeculationConfig(3, 1, 4, ngram=True), seed=7 + seed))


RULE = kernels.LookupRule
