"""Engines that draft with EAGLE heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.common.config import EngineConfig, SpeculationConfig
from tests.unit.tiny import write_tiny_eagle, write_tiny_llama

CHAIN, TREE = SpeculationConfig(steps=3, draft_tokens=4), SpeculationConfig(steps=3, topk=4, draft_tokens=12)


def config_of(folder: Path, **sizes: int) -> EngineConfig:
    target = write_tiny_llama(folder / "target", tied=False, **sizes)
    return EngineConfig(
        model=str(target),
        draft=str(write_tiny_eagle(folder / "head", target)),
        num_pages=256,
        chunk_tokens=48,
        pool_dir=str(folder),
        worker="unified",
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return config_of(tmp_path_factory.mktemp("models"), layers=4)
