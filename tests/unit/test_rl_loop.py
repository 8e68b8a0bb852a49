"""The example of a reinforcement-learning loop: its reward and its step; slow: the whole loop."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rl_loop.py"


@pytest.fixture(scope="module")
def loop() -> Any:
    spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["rl_loop"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Table(torch.nn.Module):
    """A policy whose next token depends on the newest alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 8))

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.weight[ids])


def test_what_is_rewarded_becomes_likelier(loop: Any) -> None:
    policy = Table()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    even = torch.log(torch.tensor(1 / 8)).item()
    texts = ["The snow falls,\nthe dog barks.", *["The rain falls,\nthe dog barks."] * (loop.SAMPLES - 1)]
    samples = [loop.Sample([1, 2], [3 + (i > 0), 5], [even] * 2, text) for i, text in enumerate(texts)]
    assert [each.reward for each in samples[:2]] == [1.0, 0.0]
    assert loop.step(policy, optimizer, samples) < 1e-6, "nothing has changed since they were sampled"
    chances = policy.weight[2].softmax(-1)
    assert chances[3] > 1 / 8 > chances[4]
    assert loop.step(policy, optimizer, samples) > 0.05, "these were sampled before the step"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loop_runs_and_every_update_is_served(tmp_path: Path) -> None:
    """What is sampled after an update has the log-probabilities of the weights that were pushed."""
    command = [sys.executable, str(EXAMPLE), "--updates", "1", "--plot", str(tmp_path / "rl.svg")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    lines = [line.split() for line in ran.stdout.splitlines() if "reward" in line]
    assert len(lines) == 2
    for words in lines:
        assert float(words[words.index("trainer") + 1].rstrip(",")) < 1e-4
        assert words[words.index("differ") - 1] == "0"
    assert (tmp_path / "rl.svg").stat().st_size > 10_000
