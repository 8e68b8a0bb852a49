"""Turns a commit into the input of a draft runner: its features, and the proposal that it asks for.

Whether it makes sense for its sequence is checked before
(`eyas.engine.speculation.draft_worker.draft_sequences`).
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch

from eyas.common.config import SpeculationConfig
from eyas.engine.ipc.messages import DraftCommit
from eyas.engine.ipc.row_memory import RowMemory
from eyas.engine.speculation.draft_worker.draft_runner import RingRow

NO_FEATURES = torch.empty(0, 0)


class DraftRefused(Exception):
    """A sequence cannot be drafted for; the text says why."""


def features_of(commit: DraftCommit) -> torch.Tensor:
    """float32 [rows, head width]."""
    return torch.from_numpy(np.frombuffer(commit.features, np.float32).copy()).view(len(commit.tokens), -1)


def ring_rows(commit: DraftCommit, rows: RowMemory | None) -> list[RingRow]:
    """Where its features are to be found. Raises DraftRefused if there is no such place."""
    if rows is None or not 0 <= commit.place < rows.ring.places:
        raise DraftRefused("its features are in no ring that is known here")
    positions = range(commit.base_len, commit.base_len + len(commit.tokens))
    return list(itertools.starmap(RingRow, rows.located(commit.place, commit.generation, positions)))


def wanted_by(commit: DraftCommit) -> SpeculationConfig | None:
    """The proposal that it asks for; None: none."""
    return _spec(commit.steps, commit.topk, commit.draft_tokens) if commit.steps else None


@functools.lru_cache(64)
def _spec(steps: int, topk: int, draft_tokens: int) -> SpeculationConfig:
    """Most commits ask for the same."""
    return SpeculationConfig(steps, topk, draft_tokens)
