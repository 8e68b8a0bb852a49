"""Drafts that are forced behind one of several verdicts, on the device: the plain rule, slot by slot."""

from __future__ import annotations

import random

import pytest
import torch

from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.kernels.drafts.forced import HEAD, draft_forced
from tests.unit.rounds_rig import DEVICE

SLOTS = 7


@pytest.mark.parametrize("width", [2, 4, 9])
def test_a_slot_takes_what_is_forced_behind_the_verdict_that_came(width: int) -> None:
    """And no other: neither of another length, nor of another root, nor of another slot."""
    dice, tables = random.Random(width), SlotTables(TableSizes(SLOTS, 1, width, context=8), DEVICE)
    tables.length.copy_(torch.tensor([dice.randrange(3) for _ in range(SLOTS)]))
    tables.root.copy_(torch.tensor([dice.randrange(3) for _ in range(SLOTS)]))
    tables.drafts.copy_(torch.randint(5, 9, tables.drafts.shape))
    expected = tables.drafts.tolist()
    ends = [(slot, length, root) for slot in range(SLOTS - 1) for length in range(3) for root in range(3)]
    dice.shuffle(ends)
    rows = [[*end, *(dice.randrange(-1, 90) for _ in range(width - 1))] for end in ends[::2]]
    for slot, length, root, *drafts in rows:
        if (length, root) == (int(tables.length[slot]), int(tables.root[slot])):
            expected[slot] = drafts
    assert 0 < sum(a != b for a, b in zip(expected, tables.drafts.tolist(), strict=True)) < SLOTS - 1
    words = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    assert words.shape[1] == HEAD + tables.drafts.shape[1]
    draft_forced(tables, words)
    assert tables.drafts.tolist() == expected
