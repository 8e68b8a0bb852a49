"""The torch attention backend against itself, and a float64 rendering of softmax(cap(q k scale)) v."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from eyas.engine.attention.torch_backend import KeyVisibility, TorchAttention
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import AttentionSpec
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from tests.unit.crossed import crossed

LAYER = 1


class Scene:
    """A pool of random rows with scattered page tables. Logical row r of a table has known k and v.

    `special`: fields of the layer's `AttentionSpec`.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, page_size: int = 16, **special: float
    ) -> None:
        torch.set_num_threads(1)  # many test processes share the cores
        self.generator = torch.Generator().manual_seed(0)
        pages = 8192 // page_size
        shape = PoolShape(KvFormat(3, kv_heads, head_dim), pages, page_size)
        self.heads, self.page_size = heads, page_size
        self.pool = KvPool(shape)
        self.pool.tensor.copy_(torch.randn(shape.sizes, generator=self.generator))
        plain = AttentionSpec(heads, kv_heads, head_dim, RopeConfig(), head_dim**-0.5)
        self.spec = replace(plain, **special)
        self.sinks = torch.randn(heads, generator=self.generator) if self.spec.sinks else None
        self.backend = TorchAttention(heads, shape, {KeyVisibility(0, 0), KeyVisibility.of(self.spec)})
        self._order = torch.randperm(pages, generator=self.generator).tolist()

    def table(self, rows: int) -> list[int]:
        count = -(-rows // self.page_size)
        taken, self._order = self._order[:count], self._order[count:]
        return taken

    def queries(self, spans: list[QuerySpan]) -> torch.Tensor:
        rows, shape = sum(span.count for span in spans), self.pool.shape
        return torch.randn(rows, self.heads, shape.head_dim, generator=self.generator)

    def run(self, spans: list[QuerySpan], q: torch.Tensor) -> torch.Tensor:
        plan = self.backend.plan(spans)
        return self.backend.run(q, self.pool.layer(LAYER), plan, self.spec, self.sinks)[: q.shape[0]]

    def expected(self, spans: list[QuerySpan], q: torch.Tensor) -> torch.Tensor:
        layer, rows = self.pool.layer(LAYER).double(), iter(q.double())
        group = self.heads // self.pool.shape.kv_heads
        results = []
        for span in spans:
            for i in range(span.count):
                own = range(span.start, span.start + i + 1) if span.paths is None else span.paths[i]
                path = [*range(span.start), *own]
                seen = path[-self.spec.window :]  # of 0: all
                if chunk := self.spec.chunk:
                    seen = path[(len(path) - 1) // chunk * chunk :]
                page = torch.tensor([span.pages[r // self.page_size] for r in seen])
                slot = torch.tensor([r % self.page_size for r in seen])
                k, v = (layer[page, which, slot].repeat_interleave(group, 1) for which in (0, 1))
                scores = torch.einsum("hd,khd->hk", next(rows), k) * self.spec.scale
                if cap := self.spec.soft_cap:
                    scores = (scores / cap).tanh() * cap
                if self.sinks is not None:  # a key that has no value
                    scores, v = (
                        torch.cat((scores, self.sinks.double()[:, None]), 1),
                        F.pad(v, (0, 0) * 2 + (0, 1)),
                    )
                results.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
        return torch.stack(results)


def mixed_spans(scene: Scene) -> list[QuerySpan]:
    """Every kind in one step: plain rows, a chain, a tree, chunks with and without a prefix."""
    tree = ((500,), (500, 501), (500, 503), (500, 501, 502), (500, 503, 505))
    return [
        QuerySpan(scene.table(300), 299, 1),
        QuerySpan(scene.table(700), 640, 6),
        QuerySpan(scene.table(600), 500, 5, tree),
        QuerySpan(scene.table(40), 0, 1),
        QuerySpan(scene.table(130), 0, 100),
        QuerySpan(scene.table(1500), 1300, 50),
        QuerySpan(scene.table(64), 63, 1),
    ]


PARENTS = (-1, 0, 0, 0, 1, 1, 2, 3, 4, 4, 6, 7, 8, 9, 10, 11)


def tree_paths(start: int) -> tuple[tuple[int, ...], ...]:
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(PARENTS):
        paths.append((*(paths[parent] if parent >= 0 else ()), start + node))
    return tuple(paths)


@pytest.mark.parametrize(
    ("special", "start"),
    crossed(
        [{}, {"window": 60, "sinks": True}, {"window": 600, "soft_cap": 20.0}, {"unseen": 3}, {"chunk": 100}],
        [1000, 1022, 1024, 70, 40],
        quick=lambda special, start: not special or start == 1022,
    ),
)
def test_a_node_has_the_bits_of_a_plain_row_after_its_path(special: dict[str, float], start: int) -> None:
    """However many nodes share a tile: each path is copied to pages of its own, its last row asked alone."""
    scene = Scene(4, 2, 16, **special)
    table, page = scene.table(start + len(PARENTS)), scene.page_size
    tree = QuerySpan(table, start, len(PARENTS), tree_paths(start))
    other = QuerySpan(scene.table(500), 480, 3, ((480,), (480, 481), (480, 482)))
    spans = [tree, QuerySpan(scene.table(90), 70, 1), other]
    q = scene.queries(spans)
    together = scene.run(spans, q)
    memory = scene.pool.tensor
    line = scene.table(start + len(PARENTS))
    for node, path in enumerate(tree_paths(start)):
        for target, source in enumerate((*range(start), *path)):
            if node == 0 or target >= start:
                rows = memory[table[source // page], :, :, source % page]
                memory[line[target // page], :, :, target % page] = rows
        alone = scene.run([QuerySpan(line, start + len(path) - 1, 1)], q[node : node + 1])
        assert torch.equal(together[node], alone[0])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(4, 2, 16, 16), (4, 4, 20, 16), (6, 2, 8, 5), (20, 2, 12, 16), (4, 1, 64, 128)],
)
def test_every_kind_of_span_in_one_step(heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    scene = Scene(heads, kv_heads, head_dim, page_size)
    spans = mixed_spans(scene)
    q = scene.queries(spans)
    got = scene.run(spans, q)
    assert (got - scene.expected(spans, q)).abs().max() < 1e-5

    ends = [0, *itertools.accumulate(span.count for span in spans)]
    for i, span in enumerate(spans):
        assert torch.equal(scene.run([span], q[ends[i] : ends[i + 1]]), got[ends[i] : ends[i + 1]])


@pytest.mark.parametrize(
    "special",
    [
        {"window": 1},
        {"window": 40},
        {"window": 64, "sinks": True},
        {"window": 300, "soft_cap": 1.5},
        {"window": 4096},
        {"soft_cap": 50.0},
        {"sinks": True},
        {"chunk": 90},
        {"scale": 0.7, "soft_cap": 0.4},
    ],
)
def test_windows_caps_and_scales(special: dict[str, float]) -> None:
    """As above: right, and to the bit what each span gives alone; and what is special is seen."""
    scene, plain = Scene(4, 2, 16, **special), Scene(4, 2, 16)
    spans = mixed_spans(scene)
    q = scene.queries(spans)
    got = scene.run(spans, q)
    assert (got - scene.expected(spans, q)).abs().max() < 1e-5
    if special != {"window": 4096}:
        assert (got - plain.expected(spans, q)).abs().max() > 1e-3

    ends = [0, *itertools.accumulate(span.count for span in spans)]
    for i, span in enumerate(spans):
        assert torch.equal(scene.run([span], q[ends[i] : ends[i + 1]]), got[ends[i] : ends[i + 1]])


def test_a_window_leaves_out_what_no_row_of_a_tile_sees() -> None:
    scene = Scene(4, 2, 16, window=40)
    spans = [QuerySpan(scene.table(1500), 1499, 1), QuerySpan(scene.table(1500), 1300, 200)]
    views = scene.backend.plan(spans).views
    seen = {
        sight.window: sum(part.keys.gather.numel() for part in view.parts) for sight, view in views.items()
    }
    assert seen[40] < seen[0] / 4


def test_long_rows_do_not_depend_on_tile_mates_or_chunking() -> None:
    scene = Scene(4, 2, 16)
    table = scene.table(1500)
    whole = QuerySpan(table, 1300, 200)
    q = scene.queries([whole])
    got = scene.run([whole], q)
    for i in (0, 1, 43, 44, 107, 199):
        assert torch.equal(scene.run([QuerySpan(table, 1300 + i, 1)], q[i : i + 1])[0], got[i])
    halves = [
        scene.run([QuerySpan(table, 1300, 33)], q[:33]),
        scene.run([QuerySpan(table, 1333, 167)], q[33:]),
    ]
    assert torch.equal(torch.cat(halves), got)


def test_a_step_too_wide_for_one_gather() -> None:
    scene = Scene(8, 8, 64)
    spans = [QuerySpan(scene.table(700), 699, 1) for _ in range(11)]  # 121 blocks of 256 KiB, budget 128
    spans += [QuerySpan(scene.table(300), 290, 9)]
    q = scene.queries(spans)
    got = scene.run(spans, q)
    assert len(scene.backend.plan(spans).views[KeyVisibility(0, 0)].parts) == 2
    assert torch.equal(got[-9:], scene.run(spans[-1:], q[-9:]))
    assert (got - scene.expected(spans, q)).abs().max() < 1e-5


def test_rows_that_are_unseen_are_so_but_by_themselves() -> None:
    """With the first two rows of the pages a sequence's rows begin; a chunk, a chain and a tree."""
    scene, other = Scene(4, 2, 16, unseen=2), Scene(4, 2, 16)
    table = scene.table(90)
    spans = [QuerySpan(table, 0, 70), QuerySpan(table, 70, 2), QuerySpan(table, 72, 2, ((72,), (72, 75)))]
    q = scene.queries(spans)
    found = scene.run(spans, q)
    other.pool.tensor.copy_(scene.pool.tensor)
    for row in (0, 1):
        alone = scene.pool.tensor[table[0], LAYER, 1, row].repeat_interleave(2, 0)
        assert torch.equal(found[row], alone)
    # What begins two rows later, in other pages, sees the same keys.
    later = other.table(90)
    for row in range(2, 90):
        source, place = table[row // 16], row - 2
        other.pool.tensor[later[place // 16], :, :, place % 16] = other.pool.tensor[source, :, :, row % 16]
    moved = [QuerySpan(later, 0, 68), QuerySpan(later, 68, 2), QuerySpan(later, 70, 2, ((70,), (70, 73)))]
    assert (found[2:] - other.run(moved, q[2:])).abs().max() < 1e-5
    assert (found[2:] - other.run(spans, q)[2:]).abs().max() > 1e-3


def test_rows_that_a_query_does_not_see_may_hold_anything() -> None:
    scene = Scene(4, 2, 16)
    table = scene.table(80)
    spans = [QuerySpan(table, 60, 3), QuerySpan(table, 63, 2, ((63,), (63, 65)))]
    q = scene.queries(spans)
    clean = scene.run(spans, q)
    for row in (64, *range(66, 80)):
        scene.pool.tensor[table[row // 16], :, :, row % 16] = float("nan")
    assert torch.equal(scene.run(spans, q), clean)
    scene.pool.tensor[table[65 // 16], :, :, 65 % 16] = float("nan")
    assert scene.run(spans, q)[-1].isnan().all() and torch.equal(scene.run(spans, q)[:-1], clean[:-1])
