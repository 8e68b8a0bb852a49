"""Prompt rows of a step where no option says how many: by what experts want, of models with states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.common.config import EngineConfig, resolve_engine
from eyas.engine.attention.cudnn_backend import CudnnAttention
from eyas.engine.attention.prompts import PromptAttention
from eyas.engine.attention.side_by_side import SideBySideAttention
from eyas.engine.loading.arithmetic import prompts_of
from eyas.engine.loading.spec import EngineSpec
from tests.unit.families import write_family
from tests.unit.hybrid_rig import write_hybrid
from tests.unit.tiny import edit


@pytest.mark.parametrize(
    ("experts", "per_row", "chunk"), [(256, 8, 16384), (128, 8, 8192), (64, 8, 4096), (512, 10, 16384)]
)
def test_a_hybrid_with_experts(experts: int, per_row: int, chunk: int, tmp_path: Path) -> None:
    write_hybrid(tmp_path, "qwen3_next", num_experts=experts, num_experts_per_tok=per_row)
    assert chunk_of(tmp_path) == chunk
    assert chunk_of(tmp_path, chunk_tokens=3072) == 3072, "an option says how many"


def test_latents_with_experts(tmp_path: Path) -> None:
    """256 experts of 8 choices want 16,384 rows; of several prompts a step has 8,192 at most anyway."""
    write_family(tmp_path, "deepseek_v3")
    assert chunk_of(tmp_path) == 3072
    edit(tmp_path, n_routed_experts=256, num_experts_per_tok=8)
    assert chunk_of(tmp_path) == 8192 and chunk_of(tmp_path, chunk_tokens=3072) == 3072


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


@pytest.mark.parametrize(("chunk", "kind"), [(3072, SideBySideAttention), (8192, CudnnAttention)])
def test_prompts_attend_by_what_is_fastest_for_their_chunks(chunk: int, kind: type, tmp_path: Path) -> None:
    """Without an option: cuDNN for long ones, else what heads of 128 have."""
    write_family(tmp_path, "llama", head_dim=128, vocab_size=256)
    options: dict[str, Any] = {"worker": "unified", "dtype": "bfloat16", "draft": None, "chunk_tokens": chunk}
    config = resolve_engine("cuda", model=str(tmp_path), **options)
    assert config.prefill_attention_backend in ("cudnn", "flashinfer")
    config = replace(config, device="meta", prefill_attention_backend="cudnn", num_pages=1)
    prompts = prompts_of(EngineSpec.of(config))
    assert isinstance(prompts, PromptAttention) and type(prompts._attention) is kind
