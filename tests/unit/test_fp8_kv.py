"""KV in FP8: what a pool keeps, what reads it, and that an answer still follows its request alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loopback import Loopback, split_configs, wait_all

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, KvKind
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.latent.latent_attend import attend_latent_chunks
from eyas.engine.kernels.latent.latent_rows import InnerNorms, write_latents
from eyas.engine.kernels.products.skinny import KvRows, RotaryInput
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape, rows_at
from eyas.engine.loading.spec import EngineSpec
from tests.unit.test_kernels_latent import DEVICE, LATENT, ROTATED, Scene

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    pools = str(tmp_path_factory.mktemp("pools"))
    return EngineConfig(kv_cache_dtype="fp8_e4m3", num_pages=64, max_running=4, pool_dir=pools)


def test_a_pool_keeps_the_nearest_numbers_and_moves_them() -> None:
    pool = KvPool(PoolShape(KvFormat(layers=2, kv_heads=1, head_dim=16), pages=3, page_size=4, dtype=FP8))
    assert pool.shape.page_bytes == 2 * 2 * 4 * 16
    keys = torch.linspace(-600.0, 600.0, 3 * 16).view(3, 1, 16)
    rows = torch.tensor([1, 4, 11])
    pool.write(1, pool.slots(rows), keys, keys / 7)
    expected = keys.clamp(-448.0, 448.0).to(FP8).float()
    kept = pool.layer(1)[rows // 4, 0, rows % 4].float()
    assert torch.equal(kept, expected) and (kept != keys).any()
    pool.move(torch.tensor([4]), torch.tensor([5]))
    pool.copy_page(1, 0)
    assert torch.equal(pool.layer(1)[0, 0, :2].float(), expected[1].expand(2, 1, 16))
    assert not pool.layer(0).float().any()
    assert torch.equal(rows_at(pool.layer(1)[:, 0, 0, 0], torch.tensor([1]), torch.float32), expected[1])


def asked() -> list[GenerationRequest]:
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    prompts = [tuple(range(100 + i, 140 + 7 * i)) for i in range(3)]
    return [GenerationRequest(f"r{i}", p, (greedy, seeded)[i % 2]) for i, p in enumerate(prompts)]


def answers(*configs: EngineConfig, one_by_one: bool = False) -> list[list[int]]:
    cluster, results = Loopback(*configs), []
    for request in asked():
        results.append(cluster.submit(request, split=len(configs) > 1))
        if one_by_one:
            wait_all(results, 60)
    wait_all(results, 60)
    cluster.close()
    return [result.tokens[0] for result in results]


TREE = SpeculationConfig(steps=3, topk=2, draft_tokens=8)


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> list[list[int]]:
    return answers(replace(config, draft=None), one_by_one=True)


def test_an_answer_follows_its_request_alone(config: EngineConfig, alone: list[list[int]]) -> None:
    """In company, in chunks, with drafts in trees."""
    assert all(len(tokens) == 8 for tokens in alone)
    assert answers(replace(config, speculation=TREE, chunk_tokens=16)) == alone


@pytest.mark.slow
def test_an_answer_is_the_same_by_chains_and_with_pages_from_elsewhere(
    config: EngineConfig, alone: list[list[int]]
) -> None:
    for other in (config, replace(config, chunk_tokens=16)):
        assert answers(other) == alone
    assert answers(*split_configs(config)) == alone


def test_its_pages_mean_something_else(config: EngineConfig) -> None:
    spec, usual = EngineSpec.of(config), EngineSpec.of(replace(config, kv_cache_dtype="auto"))
    assert spec.shape(KvKind.TARGET).page_bytes * 4 == usual.shape(KvKind.TARGET).page_bytes
    assert spec.shape(KvKind.DRAFT) == usual.shape(KvKind.DRAFT)
    assert spec.layout_hash(KvKind.TARGET) != usual.layout_hash(KvKind.TARGET)


def test_a_gpu_takes_it_for_latents_alone(config: EngineConfig) -> None:
    device = replace(config, draft=None, attention_backend="triton")
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8_e4m3: on a GPU it is for latent") as found:
        EngineSpec.of(device)
    assert found.value.param == "kv-cache-dtype"


# --- kernels -----------------------------------------------------------------------------------------------


def test_kernels_read_the_numbers_that_are_stored() -> None:
    """To the bit: numbers of eight bits are numbers of sixteen."""
    scene = Scene(4, [40, 7])
    pool = scene.kv.pool.nan_to_num().clamp(-2.0, 2.0)
    q = scene.queries(7).half()
    tiles = torch.tensor([(0, 0, 35, 5), (1, 5, 5, 2)], dtype=torch.int32, device=DEVICE)
    found = [
        attend_latent_chunks(q, PagedKv(each, scene.kv.tables, scene.kv.rule), tiles, LATENT)
        for each in (pool.to(FP8), pool.to(FP8).half(), pool.half())
    ]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_rows_are_rounded_as_they_are_kept() -> None:
    """Also those beyond the largest number; a row at -1 writes nothing."""
    m, queries = 4, 48
    random = torch.Generator().manual_seed(2)
    x = torch.randn(m, queries + LATENT + ROTATED, generator=random)
    x[2, queries + LATENT :] = 3000.0
    gain = torch.rand(LATENT, generator=random).add(0.5)
    angles = torch.rand(16, ROTATED // 2, generator=random)
    positions = torch.tensor([3, 0, 9, 1], dtype=torch.int32, device=DEVICE)
    rotation = RotaryInput(angles.cos().to(DEVICE), angles.sin().to(DEVICE), positions)
    kept = []
    for dtype in (FP8, torch.float32):
        layer = torch.zeros(2, 1, 4, 1, LATENT + ROTATED, device=DEVICE).to(dtype)
        kv = KvRows(layer, torch.tensor([5, -1, 2, 0], dtype=torch.int32, device=DEVICE))
        write_latents(x.to(DEVICE), InnerNorms(gain.to(DEVICE), None, 1e-6), rotation, kv)
        kept.append(layer.float())
    found, wide = kept
    assert torch.equal(found, wide.clamp(-448.0, 448.0).to(FP8).float()) and found.abs().max() == 448.0
    assert wide.abs().max() > 1000.0 and (found != 0).any(-1).sum() == 3
