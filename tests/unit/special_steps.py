"""A step of special rows on the device and by the specification."""

from __future__ import annotations

import random

import pytest
import torch
from rounds_rig import put_tree, random_tree

from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, TokenLogprob
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence
from eyas.engine.batch.stopping import banned_ids
from eyas.engine.batch.tables import SlotTables, TableSizes, TableWrites
from eyas.engine.batch.tree import DraftTree
from eyas.engine.device.special import SpecialReport, SpecialRows, SpecialSampler, occupy_special
from eyas.engine.sampling.sampler import SampledRow, sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, CONTEXT, EOS = 40, 64, (39,)
IDS = 7  # few: texts repeat themselves


class Step:
    """Rounds of `width` rows, then ends; the tables as they stand when the forward has run."""

    def __init__(self, seed: int, width: int, asked: list[dict]) -> None:
        self.rng = random.Random(seed)
        self.width = width
        sizes = TableSizes(len(asked) + 1, 1, width, CONTEXT)
        self.tables = SlotTables(sizes, DEVICE)
        self.sequences = [self._sequence(slot, params) for slot, params in enumerate(asked)]
        self.trees = {seq.slot: self._tree(seq) for seq in self.sequences}
        self.ends = self.sequences[len(asked) // 2 :]
        self.rounds = self.sequences[: len(asked) // 2]
        for seq in self.ends:
            self.trees[seq.slot] = DraftTree((), ())
        count = len(self.rounds) * width + len(self.ends)
        self.logits = 3 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        self.settled = torch.full((count,), -1, dtype=torch.int32, device=DEVICE)

    def _sequence(self, slot: int, params: dict) -> Sequence:
        pick = self.rng
        temperature, seed = pick.choice((0.0, 0.9)), pick.getrandbits(64)
        wanted = SamplingParams(temperature=temperature, top_k=pick.choice((0, 9)), seed=seed, **params)
        request = GenerationRequest("a", tuple(pick.choices(range(IDS), k=9)), wanted)
        generation = Generation(request, 1, GenerationKind.LOCAL, 0.0, 1.0)
        output = pick.choices(range(IDS), k=pick.randrange(8))
        seq = Sequence(slot, generation, pick.randrange(3), request.prompt_ids, output, slot=slot)
        writes = TableWrites(self.tables)
        writes.occupy(slot, wanted, seq.choice, speculative=32)
        occupy_special(writes, seq, EOS)
        writes.put("length", slot, (len(seq) - 1,))
        self.tables.apply(torch.from_numpy(writes.array()).to(DEVICE))
        return seq

    def _tree(self, seq: Sequence) -> DraftTree:
        tree = random_tree(self.rng, self.rng.randrange(self.width))
        tree = DraftTree([token % IDS for token in tree.tokens], tree.parents)
        put_tree(self.tables, seq.slot, tree)
        return tree

    def positions(self) -> torch.Tensor:
        """As `rounds.prepare` leaves them: a node that holds nothing stands at 0."""
        found = []
        for seq in self.rounds:
            tree = self.trees[seq.slot]
            below = [len(seq) - 1 + tree.depth(node) for node in range(len(tree))]
            found += [len(seq) - 1, *below, *[0] * (self.width - 1 - len(tree))]
        return torch.tensor(found, dtype=torch.int32, device=DEVICE)

    def run(self) -> SpecialReport:
        rows = SpecialRows(EOS)
        for i, seq in enumerate(self.rounds):
            rows.add_round(i * self.width, self.width, seq)
        for i, seq in enumerate(self.ends):
            rows.add_end(len(self.rounds) * self.width + i, seq)
        sampler = SpecialSampler(self.tables, VOCAB, pdl=False)
        every = torch.from_numpy(rows.array())
        return rows.report([sampler.sample(self.logits, self.positions(), self.settled, every).cpu()])

    def expected(self, seq: Sequence, node: int, choice: int, place: int) -> tuple[int, TokenLogprob | None]:
        """`node` 0: the root."""
        params, tree = seq.generation.request.params, self.trees[seq.slot]
        above = [tree.tokens[i] for i in tree.path(node - 1)] if node else []
        banned = banned_ids(params, EOS, len(seq.output) + len(above))
        row = SampledRow(params, choice, len(seq) + len(above), seq.prompt, seq.output, above, banned)
        found = sample(self.logits[place : place + 1].cpu(), [row])
        return found.tokens[0], found.logprobs[0]


def same(ours: TokenLogprob | None, theirs: TokenLogprob | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return (
        ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        and [id for id, _ in ours.top] == [id for id, _ in theirs.top]
        and [value for _, value in ours.top] == pytest.approx([v for _, v in theirs.top], abs=1e-5)
    )
