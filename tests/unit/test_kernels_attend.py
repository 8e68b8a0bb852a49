"""The attention kernels, against a plain softmax over gathered rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.engine.batch.tables import mask_words
from eyas.engine.device.buckets import MAX_ENDS
from eyas.engine.kernels.attention import attend_tiles, prefill
from eyas.engine.kernels.attention.attend import AttentionLaunch, QueryRows, attend
from eyas.engine.kernels.attention.attend_tiles import AttentionTiling, tiling_of, within
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.prefill import ChunkTiling, attend_chunks, tile_rows, tiling_for
from eyas.engine.kernels.attention.scores import ScoreScaling
from tests.unit.attention_scene import DEVICE, PAGE, Scene, int32, parents_mask, positions
from tests.unit.crossed import crossed


def decode(scene: Scene, q: torch.Tensor, queries: QueryRows, tiling: AttentionTiling) -> torch.Tensor:
    """Runs twice: the second launch finds the tickets as the first left them, and must agree bit by bit."""
    launch = AttentionLaunch.on(scene.kv, scene.heads, len(queries.slots), queries.width, pdl=False)
    launch.parts.fill_(float("nan"))
    first, again = (attend(q, scene.kv, queries, launch, tiling) for _ in range(2))
    assert torch.equal(first, again) and not launch.tickets.any()
    return first


def decode_expected(scene: Scene, q: torch.Tensor, queries: QueryRows) -> torch.Tensor:
    rows = []
    for b, (slot, start) in enumerate(zip(queries.slots.tolist(), queries.starts.tolist(), strict=True)):
        for j in range(queries.width):
            after = [r for r in range(j + 1)]
            if queries.mask is not None:
                words = queries.mask[:, b, j].tolist()
                after = [r for r in range(queries.width) if (words[r // 64] >> r % 64) & 1]
            path = [*range(start), *(start + r for r in after)]
            rows.append(scene.expected(q[b * queries.width + j], slot, scene.seen(slot, path)))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "width", "parts"),
    [
        (8, 2, 64, 1, 4),
        (2, 2, 32, 4, 2),
        pytest.param(4, 1, 128, 1, 1, marks=pytest.mark.slow),
        pytest.param(7, 1, 32, 1, 8, marks=pytest.mark.slow),
        pytest.param(6, 2, 32, 8, 4, marks=pytest.mark.slow),
        pytest.param(8, 1, 32, 3, 16, marks=pytest.mark.slow),
    ],
)
def test_plain_rows_and_chains(heads: int, kv_heads: int, dim: int, width: int, parts: int) -> None:
    ends = [width, 100, 16 + width, 257, 64]
    scene = Scene(heads, kv_heads, dim, ends)
    queries = QueryRows(*positions(ends, [3, 0, 4, 2, 1], width), width)
    q = scene.queries(len(ends) * width)
    got = decode(scene, q, queries, AttentionTiling(rows=16, keys=32, parts=parts, warps=4, stages=2))
    assert (got - decode_expected(scene, q, queries)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("width", "rows", "parts"),
    [
        (5, 16, 4),
        pytest.param(33, 32, 2, marks=pytest.mark.slow),
        *(pytest.param(n, 64, 4, marks=pytest.mark.slow) for n in (64, 150)),
        (66, 64, 2),
    ],
)
def test_trees(width: int, rows: int, parts: int) -> None:
    """Masks of random bits: more than trees ask for. Bits of rows that do not exist count for nothing."""
    ends = [width, 90 + width, 31 + width]
    scene = Scene(4, 2, 32, ends)
    slots, starts = positions(ends, [1, 0, 2], width)
    shape = mask_words(width), len(ends), width
    mask = torch.randint(-(2**63), 2**63 - 1, shape, generator=scene.random)
    for j in range(width):
        mask[j // 64, :, j] |= 1 << j % 64 if j % 64 < 63 else -(2**63)
    queries = QueryRows(slots, starts, width, mask.to(DEVICE))
    q = scene.queries(len(ends) * width)
    got = decode(scene, q, queries, AttentionTiling(rows, keys=32, parts=parts, warps=4, stages=2))
    assert (got - decode_expected(scene, q, queries)).abs().max() < 1e-5


def test_a_tree_that_is_a_chain_is_a_chain() -> None:
    ends = [70, 20]
    scene = Scene(2, 1, 32, ends)
    slots, starts = positions(ends, [0, 1], 6)
    mask = torch.tensor([(1 << (j + 1)) - 1 for j in range(6)], device=DEVICE).expand(1, 2, 6).contiguous()
    q = scene.queries(12)
    tiling = tiling_of(batch=2, rows=12, kv_heads=1)
    chain, tree = (decode(scene, q, QueryRows(slots, starts, 6, bits), tiling) for bits in (None, mask))
    assert torch.equal(chain, tree)


def test_a_level_of_a_tree_sees_the_levels_above() -> None:
    """The last three nodes of a tree of seven, asked alone, see what they see among the others."""
    ends = [107, 37]
    scene = Scene(4, 2, 32, ends)
    slots, starts = positions(ends, [0, 1], 7)
    mask = torch.tensor([1, 3, 5, 11, 19, 37, 101], device=DEVICE).expand(1, 2, 7).contiguous()
    q = scene.queries(14)
    tiling = AttentionTiling(rows=16, keys=32, parts=4, warps=4, stages=2)
    whole = decode(scene, q, QueryRows(slots, starts, 7, mask), tiling).view(2, 7, 4, 32)
    level = QueryRows(slots, starts, 3, mask[..., 4:].contiguous(), extent=7)
    got = decode(scene, q.reshape(2, 7, 4, 32)[:, 4:].flatten(0, 1), level, tiling)
    assert (got.view(2, 3, 4, 32) - whole[:, 4:]).abs().max() < 1e-5


RULES = {
    "scale": ScoreScaling(0.4),
    "cap": ScoreScaling(0.5, soft_cap=1.5),
    "window": ScoreScaling(0.2, window=37),
    "short window": ScoreScaling(0.2, window=2),
    "chunk": ScoreScaling(0.2, chunk=40),
    "window and cap": ScoreScaling(0.5, window=70, soft_cap=1.5),
    "window and sinks": ScoreScaling(
        0.2, window=37, sinks=torch.tensor([-9.0, 0.0, 2.0, 5.0], device=DEVICE)
    ),
}


@pytest.mark.parametrize(
    ("name", "width", "parts", "firsts"),
    [
        pytest.param(name, *shape, marks=() if name == quick else pytest.mark.slow)
        for shape, quick in (
            ((1, 4, None), "scale"),
            ((4, 2, None), "window and sinks"),
            ((3, 3, [0, 61, 5, 97, 1]), "window and cap"),
        )
        for name in RULES
    ],
)
def test_rows_and_chains_by_a_layers_rule(
    name: str, width: int, parts: int, firsts: list[int] | None
) -> None:
    rule = RULES[name]
    ends = [width, 100, 16 + width, 257, 64]
    scene = Scene(4, 2, 32, ends)
    queries = QueryRows(*positions(ends, [3, 0, 4, 2, 1], width), width)
    q = scene.queries(len(ends) * width)
    plain = decode_expected(scene, q, queries)
    scene.ruled(rule, firsts)
    got = decode(scene, q, queries, AttentionTiling(rows=16, keys=32, parts=parts, warps=4, stages=2))
    assert (got - decode_expected(scene, q, queries)).abs().max() < 1e-5
    assert (got - plain).abs().max() > 0.05, "the rule changes nothing"


@pytest.mark.parametrize("window", [8, pytest.param(41, marks=pytest.mark.slow)])
def test_a_window_is_counted_along_a_trees_paths(window: int) -> None:
    """Not by row: the last node of a wide tree is no deeper than its first leaf."""
    ends = [107, 37, 8]
    scene = Scene(4, 2, 32, ends)
    slots, starts = positions(ends, [0, 1, 2], 8)
    mask = torch.tensor(parents_mask([-1, 0, 0, 1, 1, 2, 3, 0]), device=DEVICE).expand(1, 3, 8).contiguous()
    queries = QueryRows(
        slots, starts, 8, mask | -(1 << 9)
    )  # bits of rows that are not there count for nothing
    q = scene.queries(24)
    plain = decode_expected(scene, q, queries)
    scene.ruled(ScoreScaling(0.3, window))
    got = decode(scene, q, queries, AttentionTiling(rows=16, keys=32, parts=3, warps=4, stages=2))
    assert (got - decode_expected(scene, q, queries)).abs().max() < 1e-5
    assert (got - plain).abs().max() > 0.05
    level = QueryRows(slots, starts, 2, mask[..., 6:].contiguous(), extent=8)
    rows = decode(scene, q.reshape(3, 8, 4, 32)[:, 6:].flatten(0, 1), level, tiling_of(3, 4, 2))
    assert (rows.view(3, 2, 4, 32) - got.view(3, 8, 4, 32)[:, 6:]).abs().max() < 1e-5


@pytest.mark.slow
def test_a_window_and_a_tree_of_several_words() -> None:
    """70 nodes, each below the one half as far on: paths of up to seven, in two words."""
    width, ends = 70, [107, 190]
    scene = Scene(2, 1, 32, ends)
    slots, starts = positions(ends, [1, 0], width)
    bits = parents_mask([(node + 1) // 2 - 1 for node in range(width)])
    words = [[bit % (1 << 63) for bit in bits], [bit >> 64 for bit in bits]]  # node 63 is a leaf
    words[0][63] -= 1 << 63
    mask = torch.tensor(words, device=DEVICE).unsqueeze(1).expand(2, 2, width).contiguous()
    queries, q = QueryRows(slots, starts, width, mask), scene.queries(2 * width)
    plain = decode_expected(scene, q, queries)
    scene.ruled(ScoreScaling(0.3, window=75))
    got = decode(scene, q, queries, AttentionTiling(rows=64, keys=32, parts=3, warps=4, stages=2))
    assert (got - decode_expected(scene, q, queries)).abs().max() < 1e-5
    assert (got - plain).abs().max() > 0.05


@pytest.mark.parametrize(
    ("rule", "why"), [({"window": 3}, "window of 3"), ({"chunk": 30}, "in chunks of 30")]
)
def test_a_tree_that_a_rule_cuts_through_is_refused(rule: dict[str, int], why: str) -> None:
    scene = Scene(2, 1, 32, [40])
    scene.ruled(ScoreScaling(0.2, **rule))
    mask = torch.ones(1, 1, 4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=why):
        decode(scene, scene.queries(4), QueryRows(*positions([40], [0], 4), 4, mask), tiling_of(1, 8, 1))


def test_what_no_row_of_the_tile_sees_is_not_read() -> None:
    """Rows further back than the window may be anything: no program reads them, whatever its part."""
    scene = Scene(2, 1, 32, [300])
    scene.ruled(ScoreScaling(0.2, window=40))
    scene.poison(0, 240)  # the first row that is seen is 297 - 39 = 258, in the block that begins with 256
    queries = QueryRows(*positions([300], [0], 3), 3)
    q = scene.queries(3)
    got = decode(scene, q, queries, AttentionTiling(rows=16, keys=32, parts=4, warps=4, stages=2))
    assert (got - decode_expected(scene, q, queries)).abs().max() < 1e-5
    chunk = torch.tensor([[0, 0, 297, 3]], dtype=torch.int32, device=DEVICE)
    tiles = attend_chunks(q, scene.kv, chunk, ChunkTiling(16, 32, warps=4, stages=2))
    assert (tiles - got).abs().max() < 1e-5


@pytest.mark.parametrize("tree", [False, True])
def test_padding_is_finite_and_changes_nothing(tree: bool) -> None:
    ends = [75, 40]
    scene = Scene(2, 1, 32, ends)
    slots, starts = positions(ends, [0, 1], 2)
    mask = torch.tensor([[[1, 3], [1, 2], [0, 0]]], device=DEVICE) if tree else None
    q = scene.queries(6)
    tiling = AttentionTiling(rows=16, keys=32, parts=4, warps=4, stages=2)
    padded = QueryRows(int32(*slots, 2), int32(*starts, 0), 2, mask)
    got = decode(scene, q, padded, tiling)
    alone = decode(scene, q[:4], QueryRows(slots, starts, 2, None if mask is None else mask[:, :2]), tiling)
    assert torch.equal(got[:4], alone) and got.isfinite().all()


@pytest.mark.parametrize(
    ("starts", "parts"),
    [
        pytest.param([700, 30, *[20] * 8], [11, 0, *[0] * 8], id="one long"),
        pytest.param([700, 650, 300, 90, *[20] * 6], [11, 11, 3, 3, *[0] * 6], id="too few shares"),
        pytest.param([60] * 10, [2] * 10, id="all alike"),
        pytest.param([700, 30, *[20] * 6, 400, 20], [3, 0, *[0] * 6, 3, 0], id="not in order"),
    ],
)
def test_long_sequences_among_short_ones_take_the_spare_parts(
    starts: list[int], parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`parts`: those left by each sequence's programs; one alone leaves none."""
    monkeypatch.setattr(attend_tiles, "LONG", 32)
    scene, count = Scene(4, 1, 32, [start + 1 for start in starts]), len(starts)
    tiling = AttentionTiling(16, 32, parts=3, warps=2, stages=3, spare=8)
    queries, q = QueryRows(int32(*range(count)), int32(*starts), 1), scene.queries(count)
    assert (decode(scene, q, queries, tiling) - decode_expected(scene, q, queries)).abs().max() < 1e-5
    launch = AttentionLaunch.on(scene.kv, 4, count, 1, pdl=False)
    lses = torch.full((3 * count + (16 - 3) * 8, 4), float("nan"), device=DEVICE)
    attend(q, scene.kv, queries, replace(launch, lses=lses, parts=lses.new_empty(4 * len(lses), 32)), tiling)
    usual, spare = lses[: 3 * count].view(3, count, 4), lses[3 * count :].view(-1, 8, 4)
    left = usual.isfinite().sum(0) + torch.nn.functional.pad(spare.isfinite().sum(0), (0, 0, 0, count - 8))
    assert left.tolist() == [[each] * 4 for each in parts]


@pytest.mark.parametrize("dim", [32, 512])
def test_a_launch_has_room_for_every_batch_it_is_for(dim: int) -> None:
    scene = Scene(8, 2, dim, [16])
    launch = AttentionLaunch.on(scene.kv, heads=8, batch=40, width=20, pdl=False)
    for batch in range(1, 41):
        for width in range(1, 21):
            tiling = tiling_of(batch, width * 4, kv_heads=2, dim=dim)
            more = tiling.spare * (attend_tiles.most_parts(tiling.rows) - tiling.parts)
            assert (tiling.parts * batch + more) * width * 8 <= len(launch.lses) == len(launch.parts)
            assert batch * 2 * -(-width * 4 // tiling.rows) <= len(launch.tickets)


def cut(scene: Scene, chunks: list[tuple[int, int, int]], most: int) -> torch.Tensor:
    """Tiles of chunks (slot, logical row of the first query, count), their rows one after another."""
    tiles, row = [], 0
    for slot, start, count in chunks:
        for i in range(0, count, most):
            tiles.append((slot, row + i, start + i, min(most, count - i)))
        row += count
    return torch.tensor(tiles, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rows", "keys"),
    [
        (4, 1, 32, 64, 32),
        (7, 1, 32, 64, 64),
        pytest.param(2, 2, 64, 16, 16, marks=pytest.mark.slow),
        pytest.param(16, 2, 32, 128, 32, marks=pytest.mark.slow),
    ],
)
def test_chunks(heads: int, kv_heads: int, dim: int, rows: int, keys: int) -> None:
    """Chunks with and without a prefix, of one row, that end in the middle of a page and of a tile."""
    chunks = [(1, 0, 40), (0, 70, 33), (3, 0, 1), (2, 31, 17)]
    scene = Scene(heads, kv_heads, dim, [start + count for _, start, count in sorted(chunks)])
    tiling = ChunkTiling(rows, keys, warps=4, stages=2)
    tiles = cut(scene, chunks, tile_rows(heads, kv_heads, tiling.rows))
    padded = torch.cat((tiles, tiles.new_zeros(3, 4)))  # a bucket's tiles that do nothing
    q = scene.queries(sum(count for _, _, count in chunks))
    got = attend_chunks(q, scene.kv, padded, tiling)
    expected = [range(start + i + 1) for _, start, count in chunks for i in range(count)]
    slots = [slot for slot, _, count in chunks for _ in range(count)]
    rows_expected = [scene.expected(*row) for row in zip(q, slots, map(list, expected), strict=True)]
    assert (got - torch.stack(rows_expected)).abs().max() < 1e-5
    assert torch.equal(attend_chunks(q, scene.kv, tiles.flip(0), tiling), got)


@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(4, 1, 64), (8, 2, 16)])
def test_chunks_whose_keys_are_cut_into_parts(
    heads: int, kv_heads: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and short ones, of which the shortest are not cut; several programs share a tile's queries."""
    monkeypatch.setattr(prefill, "_PROGRAMS", 10**6)
    monkeypatch.setattr(prefill, "_LEAST", 2)
    chunks = [(1, 0, 40), (0, 170, 33), (3, 0, 1), (2, 331, 17)]
    scene = Scene(heads, kv_heads, 32, [start + count for _, start, count in sorted(chunks)])
    q = scene.queries(sum(count for _, _, count in chunks))
    tiling = ChunkTiling(rows, 32, warps=4, stages=2, programs=2)
    tiles = cut(scene, chunks, 2 * rows // scene.group)
    padded = torch.cat((tiles, tiles.new_zeros(2, 4)))
    got = attend_chunks(q, scene.kv, padded, tiling)
    paths = [(slot, start + i + 1) for slot, start, count in chunks for i in range(count)]
    expected = [scene.expected(row, slot, [*range(end)]) for row, (slot, end) in zip(q, paths, strict=True)]
    assert (got - torch.stack(expected)).abs().max() < 1e-5
    monkeypatch.setattr(prefill, "_PROGRAMS", 1)
    assert not torch.equal(attend_chunks(q, scene.kv, padded, tiling), got), "nothing is cut"


def test_parts_of_keys_fill_the_last_wave_of_programs() -> None:
    """Of a turn's rows, in the graphs that they have: 16 to a program of each of two key heads of 256."""
    pool = torch.empty(1, 2, 16, 2, 256, dtype=torch.bfloat16, device="meta")
    kv = PagedKv(pool, torch.empty(1, 2048, dtype=torch.int32, device="meta"))
    tiling = prefill.tiling_for(kv, 8, prefill.tile_rows(16, 2))
    assert (tiling.rows, tiling.programs) == (128, 1)
    for rows in range(200, 769):
        graph = next(total for total in (256, 320, 384, 512, 640, 768) if total >= rows)
        parts = prefill._parts(kv, tiling, -(-graph // 16) + MAX_ENDS, 8 * graph)
        work = 2 * -(-rows // 16)
        whole, cut = (-(-work * parts // 132) / parts for parts in (1, parts))
        assert parts > 1 and cut < whole
        assert cut <= max(1.4 * work / 132, 0.5)
    measured = {256: 4, 640: 5, 768: 4, 1024: 1}
    for rows, best in measured.items():
        assert prefill._parts(kv, tiling, rows // 16 + MAX_ENDS, 8 * rows) == best


def test_few_rows_have_small_programs_and_as_many_parts_as_run_at_once() -> None:
    """An 8B's heads: a GPU has 132 programs of 128 rows at a time, or twice as many of 64. More rows than it
    has two parts of are whole, and computed by the programs of rows that nobody counted.
    """
    pool = torch.empty(4, 2, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    kv = PagedKv(pool, torch.empty(1, 1024, dtype=torch.int32, device="meta"))
    uncounted, parts = tiling_for(kv, 4, 32), {}
    small = replace(uncounted, rows=64, warps=4, programs=2)
    assert (uncounted.rows, uncounted.warps, uncounted.programs) == (128, 8, 1)
    for count in (16, 80, 144, 208, 256, 257, 272, 464, 600, 3072):
        tiling = tiling_for(kv, 4, 32, count)
        assert tiling == (small if count <= 256 else uncounted)
        parts[count] = prefill._parts(kv, tiling, 0, 4 * count)
        assert 8 * -(-4 * count // tiling.rows) * parts[count] <= 264 or parts[count] == 1
    few = {16: 8, 80: 6, 144: 3, 208: 2, 256: 2}
    assert parts == few | dict.fromkeys((257, 272, 464, 600, 3072), 1)
    for count, fewer in {16: 8, 80: 4, 112: 3, 144: 2, 208: 2, 256: 2, 464: 1}.items():
        tiling = tiling_for(kv, 4, 32, count, beside=True)
        assert prefill._parts(kv, tiling, 0, 4 * count) == fewer, "rounds beside them have room"


@pytest.mark.parametrize(
    ("name", "later"),
    crossed(
        RULES, [False, True], quick=lambda name, later: name == f"window and {'cap' if later else 'sinks'}"
    ),
)
def test_chunks_by_a_layers_rule(name: str, later: bool) -> None:
    """Chunks longer and shorter than the window, with a prefix that it does not reach; all rows, and `later`
    ones.
    """
    rule, firsts = RULES[name], [0, 33, 40, 150] if later else None
    chunks = [(1, 0, 50), (0, 70, 33), (3, 150, 60), (2, 31, 17)]
    if firsts is not None:
        chunks[0], chunks[3] = (1, 33, 17), (2, 40, 8)
    scene = Scene(4, 1, 32, [103, 50, 48, 210])
    tiling = ChunkTiling(64, 32, warps=4, stages=2)
    tiles = cut(scene, chunks, tile_rows(4, 1, tiling.rows))
    q = scene.queries(sum(count for _, _, count in chunks))
    plain = attend_chunks(q, scene.kv, tiles, tiling)
    scene.ruled(rule, firsts)
    got = attend_chunks(q, scene.kv, tiles, tiling)
    paths = [(slot, list(range(start + i + 1))) for slot, start, count in chunks for i in range(count)]
    expected = [
        scene.expected(row, slot, scene.seen(slot, path)) for row, (slot, path) in zip(q, paths, strict=True)
    ]
    assert (got - torch.stack(expected)).abs().max() < 1e-5
    assert (got - plain).abs().max() > 0.05, "the rule changes nothing"


def beside_wider_heads(scene: Scene, share: int) -> None:
    """From now on its heads stand `share` values apart, NaN between them."""
    pool = scene.kv.pool
    wide = torch.full((*pool.shape[:-1], share), float("nan"), device=DEVICE)
    wide[..., : scene.dim] = pool
    scene.kv = replace(scene.kv, pool=wide[..., : scene.dim])


@pytest.mark.parametrize(("dim", "share"), [(512, 512), (512, 1024), (32, 64)])
def test_heads_that_are_wide_or_stand_apart(dim: int, share: int) -> None:
    """Rounds and chunks by the tilings that a model gets; several programs share a tile's queries."""
    ends = [1, 40, 17]
    scene = Scene(4, 2, dim, ends)
    beside_wider_heads(scene, share)
    queries, q = QueryRows(*positions(ends, [1, 0, 2], 1), 1), scene.queries(3)
    tiling = tiling_of(3, 2, 2, 4 * dim, dim=dim)
    assert (decode(scene, q, queries, tiling) - decode_expected(scene, q, queries)).abs().max() < 1e-5
    chunks, q = [(1, 10, 30), (2, 0, 17)], scene.queries(47)
    got = attend_chunks(q, scene.kv, cut(scene, chunks, 30), tiling_for(scene.kv, 2, 30))
    paths = [(slot, start + i + 1) for slot, start, count in chunks for i in range(count)]
    expected = [scene.expected(row, slot, [*range(end)]) for row, (slot, end) in zip(q, paths, strict=True)]
    assert (got - torch.stack(expected)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("dim", "dtype", "group"),
    [
        (128, torch.bfloat16, 4),
        (256, torch.float32, 8),
        (512, torch.bfloat16, 8),
        (512, torch.float32, 24),
        (512, torch.float8_e4m3fn, 2),
    ],
)
def test_a_tiles_programs_take_all_its_queries(dim: int, dtype: torch.dtype, group: int) -> None:
    kv = PagedKv(torch.empty(1, 2, PAGE, 1, dim, dtype=dtype), torch.zeros(1, 1))
    for queries in (0, 1, 64):
        tiling, most = tiling_for(kv, group, queries), queries or tile_rows(group, 1)
        each = tiling.rows // group
        assert tiling.programs * each >= most > (tiling.programs - 1) * each
        assert tiling.rows * dim <= 128 * 256, "registers hold no more"


def before_first(seen: list[int], first: int) -> list[int]:
    """The rows of a path that its last one sees, where its own may be before a slot's first row."""
    return [row for row in seen if row >= first] or seen[-1:]


def test_rows_before_the_first_one_see_themselves() -> None:
    """Which others do not see: of a chain, and of chunks that begin before it, in it and after it."""
    firsts, ends = [2, 0, 3, 6, 40], [4, 100, 20, 8, 64]
    scene = Scene(4, 2, 32, ends)
    scene.kv = replace(scene.kv, firsts=int32(*firsts))
    queries = QueryRows(*positions(ends, [3, 0, 4, 2, 1], 4), 4)
    q = scene.queries(20)
    got = decode(scene, q, queries, AttentionTiling(rows=16, keys=32, parts=2, warps=4, stages=2))
    paths = [(slot, ends[slot] - 4 + j) for slot in (3, 0, 4, 2, 1) for j in range(4)]
    assert (got - expected_before(scene, q, paths, firsts)).abs().max() < 1e-5

    chunks = [(3, 0, 8), (2, 0, 20), (4, 0, 50), (1, 0, 3)]
    tiling = ChunkTiling(64, 32, warps=4, stages=2)
    q = scene.queries(sum(count for _, _, count in chunks))
    got = attend_chunks(q, scene.kv, cut(scene, chunks, tile_rows(4, 2, tiling.rows)), tiling)
    paths = [(slot, start + i) for slot, start, count in chunks for i in range(count)]
    assert (got - expected_before(scene, q, paths, firsts)).abs().max() < 1e-5


def expected_before(
    scene: Scene, q: torch.Tensor, paths: list[tuple[int, int]], firsts: list[int]
) -> torch.Tensor:
    """Of queries at a slot's row each."""
    seen = [before_first(list(range(own + 1)), firsts[slot]) for slot, own in paths]
    return torch.stack(
        [scene.expected(row, slot, rows) for row, (slot, _), rows in zip(q, paths, seen, strict=True)]
    )


def test_few_keys_of_a_window_are_not_cut_where_programs_are_many() -> None:
    def parts(batch: int, window: int) -> int:
        return within(tiling_of(batch, 8, 8, dim=64), window, batch * 8).parts

    assert [parts(batch, 128) for batch in (1, 8, 32, 128)] == [16, 4, 1, 1]
    assert all(
        parts(batch, window) == tiling_of(batch, 8, 8).parts for batch in (1, 32) for window in (0, 4096)
    )
