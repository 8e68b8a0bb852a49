"""Looking drafts up inside the step, after its verdict and the proposals of a head, if there is one.

The plain twin is `eyas.engine.speculation.drafters.lookup`. What the host has to tell of a sequence
once, as it takes its slot, stands here too; from then on the device alone knows how its text goes on.
"""

from __future__ import annotations

import torch

from eyas.common.config import SpeculationConfig
from eyas.engine.batch.sequence import Sequence
from eyas.engine.batch.tables import SlotTables, TableWrites
from eyas.engine.kernels.drafts import lookup as kernels
from eyas.engine.kernels.drafts.rounds import RoundBatch
from eyas.engine.speculation.drafters import lookup

MOST_PREDICTED = 16384
"""Ids of a prediction that a device looks up: with the LONGEST ids before it 64 KiB per slot, reserved."""
_READ = 2
"""Of the words that are `LOOKING`, these first ones are only read on the device."""


class DeviceLookup:
    """`headed`: a head proposes before it; `trees`: and its drafts may branch."""

    def __init__(self, tables: SlotTables, spec: SpeculationConfig, *, headed: bool, trees: bool) -> None:
        self._tables = tables
        self._rule = kernels.LookupRule(
            longest=lookup.LONGEST,
            shortest=lookup.SHORTEST,
            certain=lookup.CERTAIN,
            lag=lookup.LAG,
            depth=spec.deepest,
            history=spec.ngram,
            headed=headed,
            trees=trees,
        )

    @property
    def path_rows(self) -> int:
        """Rows of the longest path that a round can accept, its root included."""
        return self._rule.depth + 1

    def look_up(self, slots: torch.Tensor, page_size: int, *, pdl: bool) -> None:
        """Drafts for each of `slots` int32 [B] for which some are found."""
        kernels.look_up(RoundBatch(self._tables, slots, page_size, pdl), self._rule)

    def reads(self, seq: Sequence) -> bool:
        """Does it look up drafts for this sequence?"""
        return self._rule.history or bool(seq.generation.request.predicted)

    def occupy(self, writes: TableWrites, seq: Sequence) -> None:
        """What the tables must know of a sequence, beside its text, as it takes its slot."""
        writes.put("looking", seq.slot, (0, -1, 0, *lookup.AT_FIRST), start=_READ)
        self.expect(writes, seq)

    def expect(self, writes: TableWrites, seq: Sequence) -> None:
        """What is expected of its text, by its caller or by what recent answers say, has changed."""
        text, prediction = lookup.SequenceText.of(seq), []
        if text.predicted:
            prediction = text.searched[: self._tables.predicted.shape[1]]
            writes.put("predicted", seq.slot, prediction)
        writes.put("looking", seq.slot, (text.prompt, len(prediction)))


def words_predicted(context: int) -> int:
    """Entries of a slot's row in the table of predictions, where a text has at most `context` ids."""
    return lookup.LONGEST + min(context, MOST_PREDICTED)
