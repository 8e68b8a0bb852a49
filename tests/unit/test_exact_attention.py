"""A query has one set of bits over its path, whether it runs alone, in a batch, a chain, a tree or a prompt.

Triton's interpreter runs the kernels, with `tensor_core`'s model of Hopper's matrix unit and parts that are
short enough for it. So this shows that blocks, parts and columns follow the path alone, and that by the model
nothing else matters; that the hardware follows the model, tests/gpu shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from eyas.engine.kernels.attention import exact_blocks
from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.exact_attend import AttentionCut, ExactLaunch
from eyas.engine.kernels.attention.exact_parts import PartSizes
from eyas.engine.kernels.attention.exact_paths import attend_exactly
from eyas.engine.kernels.attention.exact_prefill import ChunkCut
from eyas.engine.kernels.attention.scores import ScoreScaling
from tests.bits.attention import Bits, Exact, Path, Tokens, Tree, branching, ruled
from tests.bits.compare import Composition, differences
from tests.unit import tensor_core

SHORT = PartSizes(near=64, near_end=128, middle=128, middle_end=384, far=192)
ALONE, SHARED = AttentionCut(16, 1, 4), AttentionCut(16, 3, 4)
PATH: Path = tuple(range(330))


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(420, (2, 1, 16), "cpu", torch.float16)


@pytest.fixture(autouse=True)
def _matrix_unit() -> Iterator[None]:
    with tensor_core.hopper():
        yield


def said(runs: dict[str, partial[Bits]]) -> list[str]:
    return [str(found) for found in differences(Composition(*run) for run in runs.items())]


def plain(tokens: Tokens, *ends: int) -> dict[str, partial[Bits]]:
    """Rows that end there, each alone and by one program."""
    exact = Exact(tokens, SHORT, ALONE)
    return {f"row {end}": partial(exact.rows, [PATH[:end]]) for end in ends}


def test_rows_and_chains_however_they_are_shared_out(tokens: Tokens) -> None:
    shared = Exact(tokens, SHORT, SHARED)
    runs = plain(tokens, 65, 129, 257)
    runs["batch"] = partial(shared.rows, [PATH[:n] for n in (257, 65, 1)])
    runs["chain over a part's end"] = partial(shared.rows, [PATH[:258]], 4)
    assert said(runs) == []


def test_prompt_chunks_however_they_are_cut(tokens: Tokens) -> None:
    exact = Exact(tokens, SHORT)
    runs = plain(tokens, 129, 200, 257)
    runs["one chunk"] = partial(exact.chunks, [(PATH[:258], 120)], 128)
    runs["beside another"] = partial(exact.chunks, [(PATH[:70], 0), (PATH[:258], 190)], 64)
    assert said(runs) == []


def test_heads_of_512_as_a_model_has_them() -> None:
    """Cut as launches are by default: rows alone, a chain, and a chunk by programs of fewer rows."""
    own, cut = Tokens(140, (2, 1, 512), "cpu", torch.float16), AttentionCut.of(1, 2, 1, 512)
    assert (cut.rows, AttentionCut.of(1, 64, 1, 512).rows, ChunkCut.of(512).rows) == (16, 32, 32)
    assert (AttentionCut.of(1, 64, 1, 256).rows, ChunkCut.of(256).rows) == (32, 64)
    runs = {f"row {end}": partial(Exact(own, SHORT, ALONE).rows, [PATH[:end]]) for end in (65, 68)}
    runs["chain"] = partial(Exact(own, SHORT).rows, [PATH[:68]], 4)
    runs["chunk"] = partial(Exact(own, SHORT).chunks, [(PATH[:68], 60)], ChunkCut.of(512).rows)
    assert said(runs) == []


def test_programs_of_a_chunk_take_every_query_of_its_tile() -> None:
    """Of five heads a tile of 128 rows has 25 queries, and a program of 64 rows 12."""
    own = Tokens(420, (5, 1, 16), "cpu", torch.float16)
    runs = plain(own, 24, 25, 26)
    runs["chunk"] = partial(Exact(own, SHORT).chunks, [(PATH[:26], 0)], 64)
    assert said(runs) == []


@pytest.mark.parametrize("length", [61, 126])
def test_a_trees_nodes_stand_in_the_columns_of_their_paths(tokens: Tokens, length: int) -> None:
    """Its spine is the path that follows; siblings stand between, and paths cross a block and a part."""
    tree = branching(PATH[:length], PATH[length : length + 4], range(400, 404))
    runs = plain(tokens, length + 1, length + 4)
    runs["sibling"] = partial(Exact(tokens, SHORT, ALONE).rows, [(*PATH[: length + 3], 403)])
    runs["tree"] = partial(Exact(tokens, SHORT, SHARED).trees, [tree])
    assert said(runs) == []


@pytest.mark.slow
def test_more_rows_and_wider_chains(tokens: Tokens) -> None:
    runs = plain(tokens, *range(126, 131), *range(255, 260))
    runs["wide chain"] = partial(
        Exact(tokens, SHORT, AttentionCut(32, 2, 4)).rows, [PATH[:260], PATH[:131]], 10
    )
    assert said(runs) == []


@pytest.mark.slow
def test_a_tree_of_several_words_and_its_neighbour(tokens: Tokens) -> None:
    tree = branching(PATH[:100], PATH[100:135], range(340, 375))
    chain = Tree(PATH[:250], tuple(range(-1, 69)), PATH[250:320])
    runs = plain(tokens, 101, 135, 320)
    runs["trees"] = partial(Exact(tokens, SHORT, AttentionCut(128, 2, 8)).trees, [tree, chain])
    assert said(runs) == []


RULES = {
    "window": ScoreScaling(0.3, window=70),
    "cap": ScoreScaling(0.3, soft_cap=2.0),
    "sinks": ScoreScaling(0.3, sinks=torch.tensor([1.0, 4.0])),
    "chunk": ScoreScaling(0.3, chunk=100),
}


@pytest.mark.parametrize(
    "rule",
    [
        RULES["window"],
        *(pytest.param(RULES[each], marks=pytest.mark.slow) for each in ("cap", "sinks", "chunk")),
    ],
    ids=RULES.keys(),
)
def test_windows_caps_and_sinks(tokens: Tokens, rule: ScoreScaling) -> None:
    own = ruled(tokens, rule)
    tree = branching(PATH[:255], PATH[255:258], range(400, 403))
    shared = Exact(own, SHORT, SHARED)
    runs = plain(own, 200, 258)
    runs["chain"] = partial(shared.rows, [PATH[:258]], 3)
    runs["chunk"] = partial(shared.chunks, [(PATH[:258], 196)], 128)
    if not rule.chunk:
        runs["tree"] = partial(shared.trees, [tree])
    assert said(runs) == []
    (row,) = runs["row 258"]().values()
    assert (row - own.expected(PATH[:258])).abs().max() < 1e-3
    assert (row - tokens.expected(PATH[:258])).abs().max() > 0.01, "the rule changes nothing"


def test_a_row_is_a_softmax_over_its_path(tokens: Tokens) -> None:
    rows = Exact(tokens, SHORT, SHARED).rows([PATH[:330], PATH[:3]])
    for row, path in zip(rows.values(), (PATH[:330], PATH[:3]), strict=True):
        assert (row - tokens.expected(path)).abs().max() < 1e-3


def test_parts_are_counted_as_they_are_cut() -> None:
    parts = PartSizes()
    assert [parts.of(n) for n in (1, 128, 129, 2048, 2049, 16384, 16385, 131072)] == [
        *(1, 1, 2, 16, 17, 44, 45, 100)
    ]


def test_the_rows_that_several_programs_share() -> None:
    """As launches of every size are cut."""
    for batch, width, group, kv_heads in ((70, 9, 4, 8), (264, 1, 4, 8), (9, 40, 8, 2)):
        shared = [
            b * w
            for b in range(1, batch + 1)
            for w in range(1, width + 1)
            if AttentionCut.of(b, w * group, kv_heads).shares > 1
        ]
        assert AttentionCut.most_shared(batch, width, group, kv_heads) == max(shared)


def test_what_draft_heads_ask_for_is_refused(tokens: Tokens) -> None:
    kv = tokens.laid([PATH[:20]])
    launch = ExactLaunch.on(kv, 2, 1, pdl=False)
    start, slot = tokens.ints(19), tokens.ints(0)
    mask = torch.ones(1, 1, 1, dtype=torch.int64)
    for query, pool in (
        (QueryRows(slot, start, 1, mask, extent=3), kv),
        (QueryRows(slot, start, 1), replace(kv, firsts=slot)),
    ):
        with pytest.raises(ValueError, match="levels of growing trees"):
            attend_exactly(tokens.q[:1], pool, query, launch)


# --- what the harness must notice ------------------------------------------------------------------------


def test_parts_by_the_batch_are_noticed(tokens: Tokens) -> None:
    """A batch of two in longer parts than a row alone."""
    runs = plain(tokens, 330)
    runs["batch"] = partial(Exact(tokens, PartSizes(128, 256, 128, 384, 192), ALONE).rows, [PATH, PATH[:9]])
    assert len(said(runs)) == 1


def test_shorter_blocks_are_noticed(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = plain(tokens, 330).values()
    expected = alone()
    monkeypatch.setattr(exact_blocks, "BLOCK", exact_blocks.BLOCK.__class__(32))
    runs = {"blocks of 64": partial(dict, expected), "of 32": alone}
    assert len(said(runs)) == 1


def test_columns_by_a_trees_rows_are_noticed(tokens: Tokens) -> None:
    """Siblings that weigh nothing stand between a path's keys: the same sum, in other columns."""
    hidden = Tokens(420, (2, 1, 16), "cpu", torch.float16)
    hidden.kv[400:402, 0] = -40 * hidden.q[PATH[65]].sum(0)
    exact, path = Exact(hidden, SHORT, ALONE), PATH[:66]
    (in_order,) = exact.rows([path]).values()
    (by_row,) = exact.rows([(*PATH[:61], 400, 401, *PATH[61:66])]).values()
    torch.testing.assert_close(by_row, in_order, rtol=0, atol=1e-3)
    runs = {"in order": partial(dict, row=in_order), "by row": partial(dict, row=by_row)}
    assert len(said(runs)) == 1
