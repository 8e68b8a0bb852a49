"""Paths of drafts that a round accepts."""

from __future__ import annotations

import random

import torch

from eyas.engine.kernels.drafts.rounds import RoundVerdicts
from tests.unit.rounds_rig import DEVICE, Case

WIDTH, DEEPEST = 40, 6


def accepted(case: Case, seed: int) -> tuple[RoundVerdicts, list[list[int]], list[list[int]]]:
    """A verdict already committed: random ascending paths, some of them chains, some the root alone."""
    rng = random.Random(seed)
    paths, emitted = [], []
    for slot in case.slots:
        depth = rng.randrange(DEEPEST)
        nodes = range(1, depth + 1) if rng.random() < 0.2 else sorted(rng.sample(range(1, WIDTH), depth))
        paths.append([0, *nodes])
        emitted.append([rng.randrange(100) for _ in paths[-1]])
        if slot != case.tables.padding_slot:
            case.tables.length[slot] += len(paths[-1])
    result = [[len(tokens), 9, WIDTH - 1, *tokens, *[-1] * (WIDTH - len(tokens))] for tokens in emitted]
    path = [[*nodes, *[-1] * (DEEPEST - len(nodes))] for nodes in paths]
    verdicts = RoundVerdicts(
        *(torch.tensor(table, dtype=torch.int32, device=DEVICE) for table in (result, path))
    )
    return verdicts, paths, emitted
