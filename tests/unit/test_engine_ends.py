"""What becomes of an engine's memory at its end, which a device that may hang must not hold up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from loopback import Loopback
from tiny import write_tiny_llama

from eyas.common.config import EngineConfig
from eyas.engine.device.rank0_executor import Rank0Executor
from eyas.engine.loop.plain_runner import PlainRunner
from kv_transfer.host_files import LOCK


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    model = write_tiny_llama(tmp_path / "model")
    (tmp_path / "pools").mkdir()
    small = EngineConfig(num_pages=32, chunk_tokens=16, worker="unified")
    return replace(small, model=str(model), draft=None, pool_dir=str(tmp_path / "pools"))


@pytest.mark.parametrize("idle", [True, False])
def test_pools_are_closed_unless_the_device_may_hang(
    config: EngineConfig, idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(A pool waits for its GPU before it gives the memory back: the end of the process does without.)"""
    monkeypatch.setattr(PlainRunner, "close", lambda self: idle)
    Loopback(config).close()
    left = [path for path in Path(config.pool_dir).iterdir() if path.suffix != LOCK]
    assert (left == []) == idle


@pytest.mark.parametrize("whole", [True, False])
def test_a_group_that_has_lost_a_rank_may_hang(whole: bool) -> None:
    leader = SimpleNamespace(whole=whole, close=lambda: None)
    executor = Rank0Executor(SimpleNamespace(device="cpu"), leader)  # type: ignore[arg-type]
    assert executor.close() == whole
