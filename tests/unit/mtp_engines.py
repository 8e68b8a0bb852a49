"""Engines that draft with an MTP layer."""

from __future__ import annotations

from pathlib import Path

from eyas.common.config import EngineConfig, SpeculationConfig

CHAIN, TREE = SpeculationConfig(steps=3, draft_tokens=4), SpeculationConfig(steps=3, topk=4, draft_tokens=12)


def config_of(model: Path, pool_dir: Path) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        draft=str(model),
        num_pages=256,
        chunk_tokens=48,
        pool_dir=str(pool_dir),
        worker="unified",
    )
