"""KV in FP8: what a pool keeps, what reads it, and that an answer still follows its request alone."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from loopback import Loopback, split_configs, wait_all

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, KvKind
from eyas.common.wire.pool import PoolInfo, RankPool
from eyas.engine.attention.torch_backend import KeyVisibility, TorchAttention, _KeyPart
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import AttentionSpec
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.checkpoint.sizes import page_bytes
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.latent.latent_attend import attend_latent_chunks
from eyas.engine.kernels.latent.latent_rows import InnerNorms, write_latents
from eyas.engine.kernels.products.skinny import KvRows, RotaryInput
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.kv.scaled import quantised
from eyas.engine.loading.spec import EngineSpec, _check_kv_dtype
from kv_transfer.layout import check_compatible
from tests.unit.attention_scene import DEVICE
from tests.unit.latent_scene import LATENT, ROTATED, LatentScene

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    pools = str(tmp_path_factory.mktemp("pools"))
    return EngineConfig(kv_cache_dtype="fp8_e4m3", num_pages=64, max_running=4, pool_dir=pools)


def heads_pool(dim: int = 16) -> KvPool:
    return KvPool(PoolShape(KvFormat(layers=2, kv_heads=2, head_dim=dim), pages=3, page_size=4, dtype=FP8))


def read(pool: KvPool, layer: int, row: int, tail: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """The key and the value of a physical row as attention gathers them, float32 [heads, dim] each."""
    backend = TorchAttention(2, pool.shape)
    span = QuerySpan((row // 4,), row % 4, 1)
    part = backend.plan([span]).views[KeyVisibility(0, 0)].parts[0]
    assert isinstance(part, _KeyPart)
    seen = backend._gathered(backend._as_rows(pool.layer(layer)), part.keys)
    return [field[:, row % 4] for field in seen]


@pytest.mark.parametrize("dim", [4, 12, 16, 128])
def test_a_row_comes_back_to_within_one_part_in_sixteen(dim: int) -> None:
    """Whatever its size, with its own scale, and after its page, or it alone, has moved."""
    pool, random = heads_pool(dim), torch.Generator().manual_seed(3)
    sizes = torch.tensor([1e-6, 1.0, 3e4]).view(3, 1, 1)
    keys, values = (torch.randn(3, 2, dim, generator=random) * sizes * each for each in (1.0, 1e3))
    rows = torch.tensor([1, 4, 11])
    pool.write(1, pool.slots(rows), keys, values.flatten(1))

    def check(row: int, i: int) -> None:
        for found, written in zip(read(pool, 1, row), (keys[i], values[i]), strict=True):
            least = written.abs().amax(-1, keepdim=True) / 448 / 512  # e4m3's least step
            assert ((found - written).abs() <= (written.abs() / 16).clamp(min=least)).all()
            largest = written.abs().amax(-1)  # it is 448 scales
            assert ((found.abs().amax(-1) - largest).abs() <= largest * 2**-22).all()

    for i, row in enumerate(rows.tolist()):
        check(row, i)
    pool.move(torch.tensor([4, 1]), torch.tensor([6, 4]))
    check(6, 1)
    check(4, 0)
    pool.copy_page(1, 0)
    check(2, 1)
    assert not pool.layer(0).float().any() and not read(pool, 0, 4)[0].any()


def test_what_is_stored_follows_from_the_row_alone() -> None:
    alone, after = heads_pool(), heads_pool()
    row = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(4))
    after.write(0, after.slots(torch.tensor([5, 6, 7])), *[torch.full((3, 2, 16), 9.0)] * 2)
    for pool in (alone, after):
        pool.write(0, pool.slots(torch.tensor([6])), row, 2 * row)
    for found, expected in zip(read(after, 0, 6), read(alone, 0, 6), strict=True):
        assert torch.equal(found, expected)


def test_zeros_and_poison_of_a_row_stay_its_own() -> None:
    pool = heads_pool()
    keys = torch.ones(3, 2, 16)
    keys[0], keys[1, 0, 3], keys[2, 1, 0] = 0.0, float("nan"), float("inf")
    pool.write(0, pool.slots(torch.tensor([0, 1, 2])), keys, torch.ones(3, 2, 16))
    assert not read(pool, 0, 0)[0].any()
    assert read(pool, 0, 1)[0][0].isnan().any() and read(pool, 0, 2)[0][1].isnan().any()
    pool.cleanse(torch.tensor([0]))
    assert all(field.isfinite().all() for row in range(4) for field in read(pool, 0, row))
    assert torch.equal(read(pool, 0, 1)[0][1], torch.ones(16)), "numbers stay"


def test_pages_have_half_the_bytes_and_their_scales() -> None:
    """1 of 32 more than half: 2.06 GB of KV in bf16 are 1.06 GB."""
    eight_b = KvFormat(layers=32, kv_heads=8, head_dim=128)
    assert eight_b.page_bytes(16, 1) * 64 == eight_b.page_bytes(16, 2) * 33
    for fields in (eight_b, KvFormat(3, 2, 12), KvFormat(61, 1, 576, latent=512)):
        shape = PoolShape(fields, pages=2, page_size=4, dtype=FP8)
        pool = KvPool(shape)
        assert pool.pages.nbytes == 3 * shape.page_bytes and shape.page_bytes == shape.geometry.page_bytes
        assert shape.geometry.page_rows * fields.kv_heads * fields.head_dim == shape.page_bytes


def test_a_share_of_the_heads_brings_their_scales() -> None:
    """Ranks that divide heads copy some heads of each row of a page, whatever the row has."""
    whole, half = heads_pool(), KvPool(PoolShape(KvFormat(2, 1, 16), pages=3, page_size=4, dtype=FP8))
    rows = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(5))
    whole.write(1, whole.slots(torch.tensor([4, 5, 6])), rows, 3 * rows)
    source = whole.pages.view(torch.uint8).view(4, -1, 2, 16)
    half.pages.view(torch.uint8).view(4, -1, 1, 16).copy_(source[:, :, 1:])
    one = TorchAttention(1, half.shape)
    part = one.plan([QuerySpan((1,), 2, 1)]).views[KeyVisibility(0, 0)].parts[0]
    assert isinstance(part, _KeyPart)
    for found, expected in zip(
        one._gathered(one._as_rows(half.layer(1)), part.keys), read(whole, 1, 6), strict=True
    ):
        assert torch.equal(found[0, 2], expected[1]) and expected[1].any()


def test_attention_over_it_is_that_of_the_numbers_it_stands_for() -> None:
    """And a neighbour's scales would give something else."""
    random = torch.Generator().manual_seed(6)
    pool, wide = heads_pool(), KvPool(PoolShape(KvFormat(2, 2, 16), pages=3, page_size=4))
    rows, q = torch.arange(4, 12), torch.randn(2, 4, 16, generator=random)
    keys, values = (
        torch.randn(8, 2, 16, generator=random) * torch.rand(8, 2, 1, generator=random) for _ in "kv"
    )
    spec = AttentionSpec(4, 2, 16, RopeConfig(), 0.25)

    def attended(pool: KvPool) -> torch.Tensor:
        backend = TorchAttention(4, pool.shape)
        return backend.run(q, pool.layer(1), backend.plan([QuerySpan((1, 2), 6, 2)]), spec)

    pool.write(1, pool.slots(rows), keys, values)
    sound = [(x.float() * scales[..., None]) for x, scales in (quantised(keys), quantised(values))]
    wide.write(1, wide.slots(rows), *sound)
    expected = attended(wide)
    assert torch.equal(attended(pool), expected)
    wide.write(1, wide.slots(rows), keys, values)
    assert (expected - attended(wide)).abs().max() < 0.1
    for field, x in enumerate((keys, values)):
        _, scales = quantised(x)
        pool._scales.write(1, field, rows // 4, rows % 4, scales.roll(1, 0))  # type: ignore[union-attr]
        assert (expected - attended(pool)).abs().max() > 0.1
        pool._scales.write(1, field, rows // 4, rows % 4, scales)  # type: ignore[union-attr]
    assert torch.equal(attended(pool), expected)


def asked() -> list[GenerationRequest]:
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    prompts = [tuple(range(100 + i, 140 + 7 * i)) for i in range(3)]
    return [GenerationRequest(f"r{i}", p, (greedy, seeded)[i % 2]) for i, p in enumerate(prompts)]


def answers(*configs: EngineConfig, one_by_one: bool = False, times: int = 1) -> list[list[int]]:
    """Of the last of several `times`, when pages of the first are in the prefix cache."""
    cluster, results = Loopback(*configs), []
    for number in range(times):
        results = []
        for request in asked():
            request = msgspec.structs.replace(request, id=f"{request.id}-{number}")
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


def test_an_answer_follows_its_request_alone(
    config: EngineConfig, alone: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """In company, in chunks, with drafts in trees; and over pages that an earlier request left."""
    assert all(len(tokens) == 8 for tokens in alone)
    caplog.set_level("INFO", "eyas.engine")
    assert answers(replace(config, speculation=TREE, chunk_tokens=16), times=2) == alone
    each = EngineSpec.of(config).shape(KvKind.TARGET).page_bytes // config.page_size
    assert f"KV: fp8_e4m3, {each} bytes a token" in caplog.messages


@pytest.mark.slow
def test_an_answer_is_the_same_by_chains_and_with_pages_from_elsewhere(
    config: EngineConfig, alone: list[list[int]]
) -> None:
    for other in (config, replace(config, chunk_tokens=16)):
        assert answers(other) == alone
    assert answers(*split_configs(config)) == alone


def test_its_pages_mean_something_else(config: EngineConfig) -> None:
    spec, usual = EngineSpec.of(config), EngineSpec.of(replace(config, kv_cache_dtype="auto"))
    small, large = (each.shape(KvKind.TARGET).page_bytes for each in (spec, usual))
    assert small == page_bytes(spec.target, 16, "fp8_e4m3") < large / 3
    assert spec.shape(KvKind.DRAFT) == usual.shape(KvKind.DRAFT)
    assert spec.layout_hash(KvKind.TARGET) != usual.layout_hash(KvKind.TARGET)


def test_workers_with_kv_of_other_types_refuse_each_other(config: EngineConfig) -> None:
    mine, theirs = (
        PoolInfo(1, spec.layout_hash(KvKind.TARGET), spec.geometry(KvKind.TARGET), (RankPool(0, 0, {}),))
        for spec in (EngineSpec.of(config), EngineSpec.of(replace(config, kv_cache_dtype="auto")))
    )
    check_compatible(mine, mine)
    text = "KV pages cannot be exchanged: dtype is float8_e4m3fn here and float32 at the peer."
    with pytest.raises(ConfigError, match=text):
        check_compatible(mine, theirs)


def test_heads_without_room_for_scales_are_refused(config: EngineConfig) -> None:
    target = EngineSpec.of(config).target
    odd = replace(target.layers[0], attention=replace(target.layers[0].attention, head_dim=30))
    text = "--kv-cache-dtype fp8_e4m3: heads of 30 elements have no room"
    with pytest.raises(ConfigError, match=text) as refused:
        _check_kv_dtype(replace(target, layers=(odd,)), config)
    assert refused.value.param == "kv-cache-dtype"


# --- kernels -----------------------------------------------------------------------------------------------


def test_kernels_read_the_numbers_that_are_stored() -> None:
    """To the bit: numbers of eight bits are numbers of sixteen."""
    scene = LatentScene(4, [40, 7])
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
