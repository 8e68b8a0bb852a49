"""Replicas of experts on two attention ranks of the device path, kernels interpreted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eyas.engine.loop.expert_balance import ExpertBalance
from eyas.engine.parallel.expert_plan import NONE
from tests.unit.attention_ranks_rig import alone
from tests.unit.device_ranks_rig import PLAIN, SIZES, device_ranks, logprobs, mixed, tokens
from tests.unit.tiny_deepseek import write_tiny_deepseek

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]


def test_answers_are_those_of_one_rank_while_replicas_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of experts add up as one does, but for rounding: a rank's sum comes back."""
    monkeypatch.setattr(ExpertBalance.__init__, "__defaults__", (0.02,))
    folder = tmp_path / "model"
    write_tiny_deepseek(folder, SIZES)
    config = replace(PLAIN, model=str(folder), pool_dir=str(tmp_path))
    wanted = alone(config, mixed())
    engine = device_ranks(replace(config, expert_replicas=2))
    try:
        balance = engine.cluster.workers["w"].engine._parts.balance
        assert balance is not None
        for _ in range(4):
            ours = engine.run(mixed())
            assert tokens(ours) == tokens(wanted)
            assert logprobs(ours) == pytest.approx(logprobs(wanted), abs=1e-4)
        assert any(expert != NONE for each in balance._ranks.replicas for expert in each), "none was made"
    finally:
        engine.cluster.close()
