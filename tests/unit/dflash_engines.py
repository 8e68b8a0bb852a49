"""Engines that draft with a DFlash head."""

from __future__ import annotations

from pathlib import Path

from loopback_runs import mixed_requests

from eyas.common.config import EngineConfig, SpeculationConfig
from tests.unit.tiny import write_tiny_llama
from tests.unit.tiny_dflash import write_tiny_dflash

ASKED = mixed_requests(6, seed=4)
CHAIN = SpeculationConfig(steps=5, draft_tokens=6)


def config_of(folder: Path, reads: tuple[int, ...], **sizes: int) -> EngineConfig:
    target = write_tiny_llama(folder / "target", tied=False, **sizes)
    return EngineConfig(
        model=str(target),
        draft=str(write_tiny_dflash(folder / "head", target, reads=reads)),
        num_pages=256,
        chunk_tokens=48,
        pool_dir=str(folder),
        worker="unified",
        speculation=CHAIN,
    )
