"""Prompt rows of a step where no option says how many: by what experts want, of models with states."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.common.config import EngineConfig, resolve_engine
from eyas.engine.loading.spec import EngineSpec
from tests.unit.families import write_family
from tests.unit.hybrid_rig import write_hybrid


@pytest.mark.parametrize(
    ("experts", "per_row", "chunk"), [(256, 8, 8192), (128, 8, 4096), (64, 8, 3072), (512, 10, 8192)]
)
def test_a_hybrid_with_experts(experts: int, per_row: int, chunk: int, tmp_path: Path) -> None:
    write_hybrid(tmp_path, "qwen3_next", num_experts=experts, num_experts_per_tok=per_row)
    assert chunk_of(tmp_path) == chunk
    assert chunk_of(tmp_path, chunk_tokens=3072) == 3072, "an option says how many"


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_others_keep_the_usual(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    assert chunk_of(tmp_path) == 3072


def chunk_of(folder: Path, **options: int) -> int:
    config = resolve_engine(
        "cuda", model=str(folder), draft=None, attention_backend="torch", worker="unified", **options
    )
    config = EngineSpec.of(config).config
    assert isinstance(config, EngineConfig) and not config.open_chunk
    return config.chunk_tokens
