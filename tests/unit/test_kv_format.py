"""A KV format's bytes and shares, and what reads them: the pool, the geometry, the layout hash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.types import KvKind
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.loading.spec import EngineSpec
from tests.unit.families import write_family
from tests.unit.tiny import write_tiny_eagle3

EIGHT_B = KvFormat(layers=32, kv_heads=8, head_dim=128)


def test_bytes_are_those_of_the_pools_tensor() -> None:
    assert EIGHT_B.page_bytes(1, 2) == 32 * 2 * 8 * 128 * 2
    shape = PoolShape(KvFormat(3, 2, 8), pages=5, page_size=4)
    pool = KvPool(shape)
    assert pool.tensor.shape == (5, 3, 2, 4, 2, 8)
    assert pool.tensor.nbytes == shape.nbytes == 5 * shape.format.page_bytes(4, 4)


def test_ranks_have_heads_of_their_own() -> None:
    assert EIGHT_B.of_rank(4) == KvFormat(layers=32, kv_heads=2, head_dim=128)
    with pytest.raises(ConfigError, match="8 key and value heads cannot be divided among 3 ranks"):
        EIGHT_B.of_rank(3)


def spec(folder: Path, **changes: Any) -> EngineSpec:
    config = EngineConfig(model=str(folder), draft=None, num_pages=4, attention_backend="torch")
    return EngineSpec.of(replace(config, **changes))


def test_a_worker_announces_the_format_of_each_pool(tmp_path: Path) -> None:
    write_family(tmp_path / "model", "gemma3_linear")
    head = write_tiny_eagle3(tmp_path / "head", tmp_path / "model")
    known = spec(tmp_path / "model", draft=str(head))
    assert sum(len(group.layers) for group in known.groups) == 7, "each page has the layers of one group"
    for kind in KvKind:
        geometry = known.geometry(kind)
        assert (geometry.layers, geometry.kv_heads, geometry.head_dim) == (1, 2, 16)
        assert geometry.page_bytes == known.shape(kind).page_bytes


def test_layout_hashes_tell_apart_what_gives_other_keys(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    write_family(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=64)
    lengths = (None, 128, 100)
    whole, same, shorter = (spec(tmp_path, context_length=n).layout_hash(KvKind.TARGET) for n in lengths)
    assert whole == same != shorter, "a dynamic RoPE turns by the length of the context that is served"
    write_family(tmp_path, "llama")
    whole, shorter = (spec(tmp_path, context_length=n).layout_hash(KvKind.TARGET) for n in (None, 100))
    assert whole == shorter


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_device_refuses_by_name_what_it_would_compute_wrongly(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "eyas.engine.loading.spec.refusal", lambda config, outputs: "layer 0 has a sliding window"
    )
    write_family(tmp_path, name)
    spec(tmp_path)
    with pytest.raises(ConfigError, match="has no implementation for a GPU: layer 0 has a sliding window"):
        spec(tmp_path, attention_backend="triton")
