"""The kernels over keys and values in FP8, against the same ones over the numbers that these stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from eyas.engine.kernels.attention.attend import AttentionLaunch, QueryRows, attend
from eyas.engine.kernels.attention.attend_tiles import AttentionTiling, tiling_of
from eyas.engine.kernels.attention.exact_attend import AttentionCut, ExactLaunch
from eyas.engine.kernels.attention.exact_paths import attend_exactly
from eyas.engine.kernels.attention.exact_prefill import attend_chunks_exactly
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.prefill import ChunkTiling, attend_chunks
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.drafts.accepted_path import compact
from eyas.engine.kernels.products import exact_wide, rows, skinny
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.kv.scaled import FP8, quantised
from tests.unit.accepted_paths import WIDTH, accepted
from tests.unit.attention_scene import DEVICE, LAYER, PAGE, Scene, int32, parents_mask, positions
from tests.unit.rounds_rig import PAGE as SMALL_PAGE
from tests.unit.rounds_rig import random_case

pytestmark = pytest.mark.usefixtures("one_thread")

ENDS = [8, 100, 24, 130]
Attend = Callable[[PagedKv], torch.Tensor]


def stored(scene: Scene, dtype: torch.dtype) -> tuple[KvPool, PagedKv, PagedKv]:
    """The scene's rows in a pool of FP8, as kernels read it, and the numbers that they stand for."""
    pages, _, _, heads, dim = scene.kv.pool.shape
    pool = KvPool(PoolShape(KvFormat(3, heads, dim), pages, PAGE, FP8, DEVICE))
    fields = [scene.kv.pool[:, i].reshape(-1, heads, dim) for i in (0, 1)]
    for field in fields:
        field *= torch.rand(*field.shape[:2], 1, generator=scene.random).to(DEVICE) + 0.1
    pool.write(LAYER, pool.slots(torch.arange(pages * PAGE, device=DEVICE)), *fields)
    meant = [(numbers.float() * scales[..., None]).to(dtype) for numbers, scales in map(quantised, fields)]
    wide = torch.stack([field.view(pages, PAGE, heads, dim) for field in meant], 1)
    return pool, replace(scene.kv, pool=pool.layer(LAYER)), replace(scene.kv, pool=wide)


def check(scene: Scene, dtype: torch.dtype, attended: Attend, error: float = 0.0) -> None:
    """Equal up to `error`; and not if the scales are another row's."""
    pool, narrow, wide = stored(scene, dtype)
    expected = attended(wide)
    assert expected.isfinite().all() and (attended(narrow) - expected).abs().max() <= error
    assert pool._scales is not None
    scales = pool._scales._scales
    scales.copy_(scales.roll(1, -1).nan_to_num_(0.0))
    assert (attended(narrow) - expected).abs().max() > 0.01


RULES = {
    "plain": ScoreScaling(0.2),
    "window": ScoreScaling(0.2, window=9),
    "capped": ScoreScaling(0.2, soft_cap=3.0),
}


@pytest.mark.parametrize(
    ("rule", "dim"),
    [("plain", 128), ("window", 32), *(pytest.param(n, 16, marks=pytest.mark.slow) for n in RULES)],
)
def test_plain_rows_and_chains(rule: str, dim: int) -> None:
    scene = Scene(4, 2, dim, ENDS)
    scene.ruled(RULES[rule])
    queries = QueryRows(*positions(ENDS, [3, 0, 2, 1], 3), 3)
    q, tiling = scene.queries(12), AttentionTiling(rows=16, keys=32, parts=2, warps=4, stages=2)
    launch = AttentionLaunch.on(scene.kv, 4, 4, 3, pdl=False)
    check(scene, torch.float32, lambda kv: attend(q, kv, queries, launch, tiling), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1.0, 2.0**-14, 2.0**12])
def test_queries_of_sixteen_bits_of_any_size(size: float) -> None:
    """They meet stored numbers in units of their own; values of very different sizes weigh as they should."""
    scene = Scene(4, 2, 32, ENDS)
    scene.ruled(ScoreScaling(0.2 / size))
    scene.kv.pool[:, 1] *= torch.exp2(torch.randint(-20, 20, (PAGE, 1, 1), generator=scene.random)).to(DEVICE)
    queries = QueryRows(*positions(ENDS, [3, 0, 2, 1], 1), 1)
    q, launch = (scene.queries(4) * size).half(), AttentionLaunch.on(scene.kv, 4, 4, 1, pdl=False)
    _, narrow, wide = stored(scene, torch.float32)
    expected = attend(q.float(), wide, queries, launch)
    error = (attend(q, narrow, queries, launch, out=torch.empty_like(expected)) - expected).norm()
    assert 0 < error < 2e-3 * expected.norm()


def test_short_keys_in_fp8_have_one_warp() -> None:
    """Which has no barriers; longer ones do not fit into its registers, and bf16 takes two."""
    fp8, longer = (tiling_of(32, 4, 8, key_bytes, scaled=True) for key_bytes in (128, 256))
    assert (fp8.warps, longer.warps, tiling_of(32, 4, 8, 256).warps) == (1, 2, 2)
    assert fp8 == replace(tiling_of(32, 4, 8, 128), warps=1), "all else is shared, memory for parts too"


def tree(scene: Scene) -> QueryRows:
    bits = parents_mask([-1, 0, 0, 1, 1, 2, 3, 0])
    mask = torch.tensor(bits, device=DEVICE).expand(1, 4, 8).contiguous()
    return QueryRows(*positions(ENDS, [3, 0, 2, 1], 8), 8, mask)


def test_trees() -> None:
    scene = Scene(4, 2, 32, ENDS)
    queries, q = tree(scene), scene.queries(32)
    tiling = AttentionTiling(rows=16, keys=32, parts=2, warps=4, stages=2)
    launch = AttentionLaunch.on(scene.kv, 4, 4, 8, pdl=False)
    check(scene, torch.float32, lambda kv: attend(q, kv, queries, launch, tiling), 1e-5)


@pytest.mark.parametrize("rule", ["plain", pytest.param("window", marks=pytest.mark.slow)])
def test_prompt_chunks(rule: str) -> None:
    """One whose blocks are all seen by some rows alone, and one behind others."""
    scene = Scene(4, 2, 32, ENDS)
    scene.ruled(RULES[rule])
    tiles = torch.stack([int32(1, 0, 0, 8), int32(3, 8, 114, 16)])
    q, tiling = scene.queries(24), ChunkTiling(rows=32, keys=32, warps=4, stages=2)
    check(scene, torch.float32, lambda kv: attend_chunks(q, kv, tiles, tiling))


@pytest.mark.parametrize(
    "kind", ["rows", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tree", "chunks"))]
)
def test_exact_arithmetic(kind: str) -> None:
    scene = Scene(4, 2, 32, ENDS)
    scene.kv = replace(scene.kv, pool=scene.kv.pool)
    launch = ExactLaunch.on(scene.kv, 4, 32, pdl=False)
    queries = tree(scene) if kind == "tree" else QueryRows(*positions(ENDS, [3, 0, 2, 1], 2), 2)
    q = scene.queries(4 * queries.width).half()
    tiles = torch.stack([int32(1, 0, 0, 4), int32(3, 4, 126, 4)])

    def attended(kv: PagedKv) -> torch.Tensor:
        if kind == "chunks":
            return attend_chunks_exactly(q, kv, tiles)
        return attend_exactly(q, kv, queries, launch, AttentionCut(16, 2, 4))

    check(scene, torch.float16, attended)


class Writers:
    """Six rows of q, k and v, and the ways by which they come into a pool of that dtype."""

    def __init__(self, normed: bool) -> None:
        self.random = torch.Generator().manual_seed(7)
        self.heads, self.kv, self.dim, self.k = 3, 2, 32, 64
        count = self.heads + 2 * self.kv
        self.x, self.weight = self.draw(6, self.k), self.draw(count * self.dim, self.k) * self.k**-0.5
        self.weight[(self.heads + 1) * self.dim :] *= 50.0  # heads of other sizes
        gains = self.draw(2, self.dim)
        self.norms = skinny.HeadNorms(gains, 1e-6) if normed else None
        angles = self.draw(50, self.dim // 2)
        places = torch.tensor([0, 49, 5, 17, 3, 8], dtype=torch.int32, device=DEVICE)
        self.rotation = skinny.RotaryInput(angles.cos(), angles.sin(), places)

    def draw(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=self.random).to(DEVICE)

    def write(self, way: str, dtype: torch.dtype) -> KvPool:
        pool = KvPool(PoolShape(KvFormat(2, self.kv, self.dim), 5, 4, dtype, DEVICE))
        places = torch.tensor([7, 19, -1, 0, 12, 13], dtype=torch.int32, device=DEVICE)
        kv, q = skinny.KvRows(pool.layer(1), places), self.draw(6, self.heads, self.dim)
        raw = self.x @ self.weight.t()
        if way == "narrow":
            launch = skinny.ProductLaunch.on(DEVICE, pdl=False)
            weights = skinny.QkvWeights(self.weight, None, self.norms)
            skinny.qkv_rope(skinny.SkinnyInput(self.x), weights, q, self.rotation, kv, launch)
        elif way == "wide":
            layout = rows.HeadLayout(self.heads, self.kv, self.dim, self.norms)
            rows.rope_write(raw, layout, q, self.rotation, kv)
        else:
            ones = torch.ones(6, device=DEVICE)
            after = exact_wide.AfterQkv(None, self.norms)
            exact_wide.rope_write(raw, ones, after, q, self.rotation, kv)
        return pool


@pytest.mark.parametrize("way", ["narrow", "wide", "exact"])
@pytest.mark.parametrize("normed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_are_stored_as_the_pool_stores_them(way: str, normed: bool) -> None:
    """To the bit, by kernels that make the same numbers; a narrow product's tiles are heads for this."""
    writers = Writers(normed)
    found, wide = writers.write(way, FP8), writers.write(way, torch.float32)
    expected = KvPool(found.shape)
    written = [7, 19, 0, 12, 13]
    at = torch.tensor(written, device=DEVICE)
    fields = [wide.layer(1)[at // 4, field, at % 4] for field in (0, 1)]
    expected.write(1, expected.slots(at), *fields)
    same = found.pages.view(torch.uint8)[:-1] == expected.pages.view(torch.uint8)[:-1]
    if way == "narrow" and not normed:
        assert same.float().mean() > 0.99, "sums of other tiles may be rounded to the number beside"
    else:
        assert same.all()


@pytest.mark.parametrize(("heads", "dim"), [(2, 8), (3, 256)])
def test_compact_is_the_pools_move(heads: int, dim: int) -> None:
    case = random_case(1, WIDTH)
    pool = KvPool(PoolShape(KvFormat(2, heads, dim), case.tables.pages.numel(), SMALL_PAGE, FP8, DEVICE))
    bytes_of = pool.pages.view(torch.uint8)
    bytes_of.copy_(torch.randint(127, bytes_of.shape, generator=torch.Generator().manual_seed(1)))
    twin = KvPool(pool.shape)
    twin.pages.view(torch.uint8).copy_(bytes_of)
    verdicts, paths, _ = accepted(case, 1)
    compact(case.batch, verdicts, pool.tensor)
    for slot, path in zip(case.slots, paths, strict=True):
        start = int(case.tables.length[slot]) - len(path)
        pairs = [(case.row(slot, start + node), case.row(slot, start + i)) for i, node in enumerate(path)]
        pairs = [(source, target) for source, target in pairs if source >= 0]
        if slot != case.tables.padding_slot:
            twin.move(*torch.tensor(pairs, device=DEVICE).unbind(1))
    moved = twin.pages.view(torch.uint8)
    assert torch.equal(bytes_of, moved)
