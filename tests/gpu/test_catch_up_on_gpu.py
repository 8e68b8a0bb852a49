"""A recorded graph by which the draft head catches up: what it drafts is what single launches draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from eyas.common.config import SpeculationConfig
from eyas.engine.speculation.feature_rows import FeatureRing
from tests.gpu.engine_runs import chats, on_gpu, run_all
from tests.unit.wandering import wander

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]

PATH = [5, 0, 0, 0, 3, 0, 1, 5, *[0] * 20]
"""Depths: drafts after few plain rounds, and more plain rounds than the ring holds."""


def rounds(**changes: Any) -> list[list[tuple[tuple[int, ...], int, int]]]:
    """Of 24 chats, one after the other: what each round gave, verified and accepted."""
    spec = replace(SpeculationConfig(), adaptive=True)
    config = on_gpu("triton", deterministic=True, speculation=spec, max_running=1, **changes)
    return [
        [(entry.tokens, entry.offered, entry.accepted) for entry in result.entries]
        for result in run_all(config, chats(24))
    ]


def test_a_recorded_graph_drafts_as_single_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    wander(monkeypatch, PATH)
    expected = rounds(cuda_graph_max_bs=0)
    assert rounds() == expected
    assert sum(accepted for chat in expected for _, _, accepted in chat) > 200
    monkeypatch.setattr(FeatureRing, "keep", lambda *_: None)
    assert rounds() != expected
