"""The kernels of latent attention, against a plain softmax over gathered latents and plain products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.attend_tiles import AttentionTiling
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.latent import latent_products, latent_rows
from eyas.engine.kernels.latent.latent_attend import (
    LatentScratch,
    PartialResults,
    attend_latent_chunks,
    attend_latents,
)
from eyas.engine.kernels.latent.latent_tiles import latent_tile_rows, latent_tiling_of
from eyas.engine.kernels.products.skinny import KvRows, RotaryInput
from tests.unit.attention_scene import DEVICE, LAYER, PAGE, int32
from tests.unit.latent_scene import EPS, LATENT, ROTATED, SCALE, LatentScene


def positions(ends: list[int], order: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return int32(*order), int32(*(ends[slot] - width for slot in order))


def added(parted: PartialResults) -> torch.Tensor:
    """The parts' sum, by the kernel that multiplies it; with a factor that changes nothing."""
    _, m, heads, latent = parted.parts.shape
    unit = torch.eye(latent, device=DEVICE).expand(heads, latent, latent).contiguous()
    out = torch.empty(m, heads * latent, device=DEVICE)
    latent_products.values(parted, unit, out)
    return out.view(m, heads, latent)


def decode(
    scene: LatentScene,
    q: torch.Tensor,
    queries: QueryRows,
    tiling: AttentionTiling,
    kv: PagedKv | None = None,
) -> torch.Tensor:
    """Runs twice, over scratch memory of NaN: both agree bit by bit."""
    most = len(queries.slots), queries.width
    scratch = LatentScratch.on(scene.kv.pool, LATENT, scene.heads, most, pdl=False)
    found = []
    for _ in range(2):
        scratch.parts.fill_(float("nan"))
        scratch.lses.fill_(float("nan"))
        found.append(added(attend_latents(q, kv or scene.kv, queries, LATENT, scratch, tiling)))
    assert torch.equal(*found)
    return found[0]


def decode_expected(
    scene: LatentScene, q: torch.Tensor, queries: QueryRows, scale: float = SCALE, least: int = 0
) -> torch.Tensor:
    rows = []
    for b, (slot, start) in enumerate(zip(queries.slots.tolist(), queries.starts.tolist(), strict=True)):
        for j in range(queries.width):
            after = [*range(j + 1)]
            if queries.mask is not None:
                words = queries.mask[:, b, j].tolist()
                extent = queries.extent or queries.width
                after = [r for r in range(extent) if (words[r // 64] >> r % 64) & 1]
            path = [row for row in (*range(start), *(start + r for r in after)) if row >= least]
            rows.append(scene.expected(q[b * queries.width + j], slot, path, scale))
    return torch.stack(rows)


def parents_mask(parents: list[int]) -> list[int]:
    """What each node sees: itself and its ancestors; -1: it has no parent."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return masks


@pytest.mark.parametrize(
    ("heads", "width", "rows", "parts"),
    [
        (4, 1, 16, 4),
        (16, 3, 64, 8),
        *(
            pytest.param(*shape, marks=pytest.mark.slow)
            for shape in ((16, 1, 16, 1), (40, 2, 64, 4), (8, 8, 32, 2))
        ),
    ],
)
def test_plain_rows_and_chains(heads: int, width: int, rows: int, parts: int) -> None:
    """Also where a sequence's rows take more than one program, and the last of them is partly empty."""
    ends = [width, 100, 16 + width, 290, 64]
    scene = LatentScene(heads, ends)
    queries = QueryRows(*positions(ends, [3, 0, 4, 2, 1], width), width)
    q = scene.queries(len(ends) * width)
    got = decode(scene, q, queries, AttentionTiling(rows, 32, parts, warps=4, stages=2))
    assert (got - decode_expected(scene, q, queries)).abs().max() < 1e-5
    assert (got - decode_expected(scene, q, queries, SCALE / 1.2)).abs().max() > 1e-2, "no scale matters"


@pytest.mark.parametrize(
    ("width", "rows", "parts"), [(6, 16, 2), pytest.param(66, 64, 4, marks=pytest.mark.slow)]
)
def test_trees(width: int, rows: int, parts: int) -> None:
    """Each node below the one half as far on; in one word, and in two."""
    ends = [width, 190 + width, 31 + width]
    scene = LatentScene(4, ends)
    bits = parents_mask([(node + 1) // 2 - 1 for node in range(width)])
    words = [[bit >> 64 * word & (1 << 64) - 1 for bit in bits] for word in range(-(-width // 64))]
    signed = [[bit - (1 << 64) if bit >> 63 else bit for bit in word] for word in words]
    mask = torch.tensor(signed, device=DEVICE).unsqueeze(1).expand(-1, 3, width).contiguous()
    slots, starts = positions(ends, [1, 0, 2], width)
    queries, q = QueryRows(slots, starts, width, mask), scene.queries(3 * width)
    tiling = AttentionTiling(rows, 32, parts, warps=4, stages=2)
    got = decode(scene, q, queries, tiling)
    assert (got - decode_expected(scene, q, queries)).abs().max() < 1e-5
    shifted = QueryRows(slots, starts, width, mask.roll(1, 2))
    assert (got - decode_expected(scene, q, shifted)).abs().max() > 1e-2, "no column of the mask matters"


def test_a_level_of_a_tree_sees_the_levels_above() -> None:
    ends = [207, 37]
    scene = LatentScene(4, ends)
    slots, starts = positions(ends, [0, 1], 7)
    mask = torch.tensor([11, 19, 101], device=DEVICE).expand(1, 2, 3).contiguous()
    level, q = QueryRows(slots, starts, 3, mask, extent=7), scene.queries(6)
    got = decode(scene, q, level, AttentionTiling(16, 32, 2, warps=4, stages=2))
    assert (got - decode_expected(scene, q, level)).abs().max() < 1e-5


def test_a_tree_that_is_a_chain_is_a_chain() -> None:
    ends = [270, 20]
    scene = LatentScene(2, ends)
    slots, starts = positions(ends, [0, 1], 6)
    mask = torch.tensor([(1 << (j + 1)) - 1 for j in range(6)], device=DEVICE).expand(1, 2, 6).contiguous()
    q, tiling = scene.queries(12), latent_tiling_of(2, 12)
    chain, tree = (decode(scene, q, QueryRows(slots, starts, 6, bits), tiling) for bits in (None, mask))
    assert torch.equal(chain, tree)


def test_rows_below_a_bound_may_be_anything() -> None:
    scene = LatentScene(4, [150])
    for row in range(70):
        scene.kv.pool[scene.kv.tables[0, row // PAGE], 0, row % PAGE] = float("nan")
    bounded = PagedKv(scene.kv.pool, scene.kv.tables, scene.kv.scores, int32(70, 0))
    queries, q = QueryRows(*positions([150], [0], 3), 3), scene.queries(3)
    got = decode(scene, q, queries, AttentionTiling(16, 32, 4, warps=4, stages=2), bounded)
    expected = decode_expected(scene, q, queries, least=70)
    assert (got - expected).abs().max() < 1e-5
    tiles = torch.tensor([[0, 0, 147, 3]], dtype=torch.int32, device=DEVICE)
    assert (attend_latent_chunks(q, bounded, tiles, LATENT) - expected).abs().max() < 1e-5


def test_padding_is_finite_and_changes_nothing() -> None:
    ends = [275, 40]
    scene = LatentScene(2, ends)
    slots, starts = positions(ends, [0, 1], 2)
    mask = torch.tensor([[[1, 3], [1, 2], [0, 0]]], device=DEVICE)
    q, tiling = scene.queries(6), AttentionTiling(16, 32, 4, warps=4, stages=2)
    got = decode(scene, q, QueryRows(int32(*slots, 2), int32(*starts, 0), 2, mask), tiling)
    alone = decode(scene, q[:4], QueryRows(slots, starts, 2, mask[:, :2].contiguous()), tiling)
    assert torch.equal(got[:4], alone) and got.isfinite().all()


def test_a_wrong_page_is_seen() -> None:
    scene = LatentScene(4, [150, 150])
    queries, q = QueryRows(*positions([150], [0], 1), 1), scene.queries(1)
    right = decode(scene, q, queries, latent_tiling_of(1, 4))
    scene.kv.tables[0, 5] = scene.kv.tables[1, 5]
    assert (decode(scene, q, queries, latent_tiling_of(1, 4)) - right).abs().max() > 1e-2


@pytest.mark.parametrize(("heads", "rows"), [(4, 64), (16, 64), (40, 32), (128, 64)])
def test_chunks(heads: int, rows: int) -> None:
    """Chunks with and without a prefix, of one row, that end in the middle of a page and of a tile."""
    chunks = [(1, 0, 20), (0, 70, 33), (3, 0, 1), (2, 31, 7)]
    chunks = chunks if heads < 40 else [(0, 70, 3), (1, 0, 5)]
    scene = LatentScene(heads, [start + count for _, start, count in sorted(chunks)])
    most, tiles, row, expected = max(1, rows // heads), [], 0, []
    q = scene.queries(sum(count for _, _, count in chunks))
    for slot, start, count in chunks:
        tiles += [(slot, row + i, start + i, min(most, count - i)) for i in range(0, count, most)]
        expected += [scene.expected(q[row + i], slot, [*range(start + i + 1)]) for i in range(count)]
        row += count
    tiling = AttentionTiling(rows, 32, 1, warps=4, stages=2)
    padded = torch.tensor([*tiles, (0, 0, 0, 0)], dtype=torch.int32, device=DEVICE)
    got = attend_latent_chunks(q, scene.kv, padded, LATENT, tiling)
    assert (got - torch.stack(expected)).abs().max() < 1e-5


def test_the_usual_tiles_fit_what_is_there() -> None:
    """Scratch has room for every batch it is for, and a tile of a chunk for the heads of its rows."""
    pool = torch.empty(1, 1, PAGE, 1, LATENT + ROTATED)
    scratch = LatentScratch.on(pool, LATENT, 8, (40, 20), pdl=False)
    for batch in range(1, 41):
        for width in range(1, 21):
            assert latent_tiling_of(batch, width * 8).parts * batch * width * 8 <= len(scratch.lses)
    assert [latent_tile_rows(heads) for heads in (4, 16, 40, 64, 128)] == [16, 4, 1, 1, 1]
    assert latent_tiling_of(1, 16).parts == 64 and latent_tiling_of(128, 16).parts == 2
    assert latent_tiling_of(32, 64).parts == 4, "no room for two programs"


# --- rows and products -----------------------------------------------------------------------------------


def rotation(m: int, rotated: int = ROTATED) -> RotaryInput:
    angles = torch.outer(torch.arange(40.0), 0.3 ** torch.arange(rotated // 2))
    places = torch.randint(40, (m,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return RotaryInput(angles.cos().to(DEVICE), angles.sin().to(DEVICE), places.to(DEVICE))


def turned(x: torch.Tensor, by: RotaryInput) -> torch.Tensor:
    """x [m, .., rotated]: element i and i + rotated / 2 as the parts of a complex number."""
    turn = torch.complex(by.cos[by.positions].double(), by.sin[by.positions].double())
    turn = turn.view(x.shape[0], *[1] * (x.dim() - 2), -1)
    found = torch.complex(*x.double().chunk(2, -1)) * turn
    return torch.cat((found.real, found.imag), -1)


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * gain


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(DEVICE)


@pytest.mark.parametrize("rank", [0, 48])
def test_rows_are_normed_rotated_and_kept(rank: int) -> None:
    """Without a norm the queries are those that the product gave."""
    m, queries = 5, rank or 40
    x = random(m, queries + LATENT + ROTATED)
    gains = torch.rand(LATENT, device=DEVICE) + 0.5, torch.rand(queries, device=DEVICE) + 0.5
    norms = latent_rows.InnerNorms(gains[0], gains[1] if rank else None, EPS)
    layer = torch.full((6, 3, 1, PAGE, 1, LATENT + ROTATED), float("nan"), device=DEVICE)[:, LAYER]
    places, by = int32(3, 17, -1, 80, 95), rotation(m)
    found = latent_rows.write_latents(x, norms, by, KvRows(layer, places))
    expected = normed(x[:, :queries], gains[1]) if rank else x[:, :queries].double()
    assert (found - expected).abs().max() < 1e-5
    latent, key = x[:, queries:].split((LATENT, ROTATED), 1)
    kept = torch.cat((normed(latent, gains[0]), turned(key, by)), 1)
    for row, place in enumerate(places.tolist()):
        if place >= 0:
            assert (layer[place // PAGE, 0, place % PAGE, 0] - kept[row]).abs().max() < 1e-5
    assert (~layer.isnan()).sum() == 4 * (LATENT + ROTATED)
    whole = normed(x[:, queries:], torch.ones(LATENT + ROTATED, device=DEVICE))[:, :LATENT] * gains[0]
    assert (whole - kept[:, :LATENT]).abs().max() > 1e-2, "a norm over the key too would not be seen"


@pytest.mark.parametrize(("m", "plain"), [(1, 16), (19, 24), (70, 16)])
def test_queries_meet_latents(m: int, plain: int) -> None:
    heads, by = 3, rotation(m)
    q = random(m, heads * (plain + ROTATED) + 9)[:, : heads * (plain + ROTATED)]
    factor = random(heads, plain, LATENT)
    found = latent_products.absorb(q, factor, by)
    first, last = q.reshape(m, heads, -1).double().split((plain, ROTATED), -1)
    expected = torch.cat((torch.einsum("mhp,hpl->mhl", first, factor.double()), turned(last, by)), -1)
    assert found.shape == expected.shape and (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("m", "width"), [(1, 16), (19, 24), (70, 48)])
def test_mixed_latents_become_values(m: int, width: int) -> None:
    heads = 3
    mixed, factor = random(m, heads, LATENT), random(heads, width, LATENT)
    out = torch.full((m, heads * width), float("nan"), device=DEVICE)
    latent_products.values(mixed, factor, out)
    expected = torch.einsum("mhl,hvl->mhv", mixed.double(), factor.double()).flatten(1)
    assert (out - expected).abs().max() < 1e-4


def _by_count(parted: PartialResults) -> torch.Tensor:
    return parted.lses.softmax(0)


def _by_base_e(parted: PartialResults) -> torch.Tensor:
    return (parted.lses * torch.log(torch.tensor(2.0))).softmax(0)


@pytest.mark.parametrize(("weigh", "same"), [(_by_base_e, True), (_by_count, False)])
def test_parts_weigh_as_much_as_their_exponentials(
    weigh: Callable[[PartialResults], torch.Tensor], same: bool
) -> None:
    """Powers of two, not of e."""
    parted = PartialResults(random(3, 4, 2, LATENT), random(3, 4, 2) * 3, int32(3, 3), 2)
    expected = (weigh(parted)[..., None] * parted.parts).sum(0)
    assert ((added(parted) - expected).abs().max() < 1e-5) == same


def test_rows_before_the_first_one_see_themselves() -> None:
    """Which others do not see: of a chain, and of chunks that begin before it, in it and after it."""
    firsts, ends = [2, 0, 3, 6, 40], [4, 100, 20, 8, 64]
    scene = LatentScene(4, ends)
    scene.kv = replace(scene.kv, firsts=int32(*firsts))
    queries = QueryRows(*positions(ends, [3, 0, 4, 2, 1], 4), 4)
    q = scene.queries(20)
    paths = [(slot, ends[slot] - 4 + j) for slot in (3, 0, 4, 2, 1) for j in range(4)]
    got = decode(scene, q, queries, AttentionTiling(16, 32, 2, warps=4, stages=2))
    assert (got - expected_before(scene, q, paths, firsts)).abs().max() < 1e-5

    q = scene.queries(28)
    tiles = int32(3, 0, 0, 8, 2, 8, 0, 8, 2, 16, 8, 8, 2, 24, 16, 4).view(4, 4)
    assert latent_tile_rows(4) >= 8
    got = attend_latent_chunks(q, scene.kv, tiles, LATENT)
    paths = [*((3, i) for i in range(8)), *((2, i) for i in range(20))]
    assert (got.view(28, 4, LATENT) - expected_before(scene, q, paths, firsts)).abs().max() < 1e-5


def expected_before(
    scene: LatentScene, q: torch.Tensor, paths: list[tuple[int, int]], firsts: list[int]
) -> torch.Tensor:
    """Of queries at a slot's row each, which see their own row wherever it is."""
    rows = []
    for row, (slot, own) in zip(q, paths, strict=True):
        seen = [place for place in range(own + 1) if place >= firsts[slot]] or [own]
        rows.append(scene.expected(row, slot, seen))
    return torch.stack(rows)
