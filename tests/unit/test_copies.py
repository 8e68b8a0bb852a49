"""Which packed matrices get a widened copy: those of steps of many rows, of a target and of a draft head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.bench import shapes
from eyas.common.config import SpeculationConfig, resolve_engine
from eyas.common.types import KvKind, Role
from eyas.engine.loading import copies
from eyas.engine.loading.memory import DeviceMemory
from eyas.engine.loading.spec import EngineSpec
from tests.gpu.exact_rig import GPTQ

GIB = 2**30


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    """An 8B in 16 bits on a GPU of 140 GiB, with a block head of five layers in four bits."""
    shape = shapes.ModelShape(4096, 14336, layers=32, heads=32, kv_heads=8, vocab=2048)
    shapes.write_model(shape, tmp_path / "model")
    shapes.write_block_head(shape, tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | GPTQ))
    memory = DeviceMemory(total=140 * GIB, free=100 * GIB, allocated=0)
    monkeypatch.setattr(copies.DeviceMemory, "measure", lambda device: memory)
    config = resolve_engine(
        "cpu", load_format="dummy", worker="unified", transfer="none", max_running=32, context_length=8192,
        model=str(tmp_path / "model"), draft=str(tmp_path / "head"), speculation=SpeculationConfig(4, 1, 5),
    )  # fmt: skip
    return replace(EngineSpec.of(config, epoch=1), config=replace(config, device="cuda"))


def with_config(loaded: EngineSpec, **options: object) -> EngineSpec:
    return replace(loaded, config=replace(loaded.config, **options))  # type: ignore[arg-type]


def test_a_head_in_four_bits_has_a_copy_where_rounds_have_many_rows(loaded: EngineSpec) -> None:
    assert copies.has_copies(loaded, KvKind.DRAFT), "32 rounds of five rows"
    decodes = with_config(loaded, roles=(Role.DECODE,))
    assert copies.has_copies(decodes, KvKind.DRAFT), "160 rows, whoever computes prompts"
    few = with_config(decodes, max_running=25)
    assert not copies.has_copies(few, KvKind.DRAFT), "125 rows are few"
    assert copies.has_copies(with_config(few, roles=(Role.PREFILL,)), KvKind.DRAFT), "prompts have many rows"


def test_nothing_is_copied_that_is_not_packed_or_does_not_fit(
    loaded: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not copies.has_copies(loaded, KvKind.TARGET), "the target is in 16 bits"
    assert not copies.has_copies(with_config(loaded, device="cpu"), KvKind.DRAFT)
    memory = DeviceMemory(total=14 * GIB, free=14 * GIB, allocated=0)
    monkeypatch.setattr(copies.DeviceMemory, "measure", lambda device: memory)
    assert not copies.has_copies(loaded, KvKind.DRAFT), "2 GiB are more than an eighth of 14"
