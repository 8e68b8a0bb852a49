"""The host tier of an engine whose pool is too small for its queue, one step running while the next is
composed: what ends there comes back. Kernels are interpreted.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from loopback import Loopback, wait_all

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.kv.host_tier import HostTier
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.scheduling import host_loads
from tests.unit.tiny import write_tiny_llama

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow, pytest.mark.timeout(300)]

SIZES = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 64, "vocab": 16}
PROMPTS = [tuple((i * i + k * i + k) % 16 for i in range(49)) for k in range(4)]


def came_back(config: EngineConfig) -> int:
    """The prompt tokens that come from the host while the same prompts wait once more behind themselves."""
    cluster = Loopback(config)
    engine = cluster.workers["unified"].engine
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    try:
        results = [
            cluster.submit(GenerationRequest(f"{turn} {k}", prompt, params), split=False)
            for turn in range(3)
            for k, prompt in enumerate(PROMPTS)
        ]
        wait_all(results, 200)
        count = engine._scheduler.host.counts.tokens
    finally:
        cluster.close()
    tokens = [result.tokens for result in results]
    assert tokens[:4] == tokens[4:8] == tokens[8:]
    return int(count)


def test_what_ends_on_a_crowded_pool_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_loads, "LEAST_TOKENS", 16)
    monkeypatch.setattr(HostTier, "load_s", lambda tier, pages: 0.0)
    config = EngineConfig(
        model=str(write_tiny_llama(tmp_path / "target", tied=False, **SIZES)),
        draft=None,
        num_pages=10,
        chunk_tokens=48,
        max_running=4,
        context_length=128,
        pool_dir=str(tmp_path),
        worker="unified",
        overlap_schedule=True,
        attention_backend="triton",
        prefill_attention_backend="triton",
        host_cache_gb=0.001,
    )
    found = came_back(config)
    evict = PrefixCache.evict
    with mock.patch.object(PrefixCache, "evict", lambda cache, count, spare=False: evict(cache, count)):
        unspared = came_back(config)
    assert found >= 5 * 48 > 2 * unspared, (found, unspared)
