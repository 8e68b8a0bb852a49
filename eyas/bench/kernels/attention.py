"""Cases of attention: plain decode rows, the rows of a round that verifies drafts, chunks of prompts.

Sequences lie on scattered pages; the calls go through layers and sets of sequences, so that keys come from
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from eyas.bench.kernels.case import Call, KernelCalls, KernelCase, KernelSetting
from eyas.engine.attention.torch_heads import torch_attention
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.kernels.attention.attend import AttentionLaunch, QueryRows, attend
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.prefill import attend_chunks, tile_rows
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kv.pool import KvPool, PoolShape

DECODE = ((1, 1024), (8, 1024), (32, 1024), (8, 8192))  # sequences, rows below each
PREFILL = ((0, 2048), (6144, 2048))  # rows below the chunk, and of the chunk
MOST_LAYERS = 16


@dataclass(frozen=True)
class AttentionShape:
    """`batch` sequences of `width` query rows with `below` rows below them."""

    name: str
    batch: int
    below: int
    width: int
    tree: bool = False

    @property
    def rows(self) -> int:
        """The rows of one sequence, its queries' own too."""
        return self.below + self.width


def cases(setting: KernelSetting) -> Iterator[KernelCase]:
    """Decode, verify and prefill. Sizes beyond the model's context are left out, or cut down to it."""
    for shape in _rounds(setting):
        yield KernelCase(shape.name, partial(_round, setting, shape))
    plain = setting.model.layers[0].attention
    fa3 = setting.config.prefill_attention_backend == "flashinfer"
    for shape in _chunks(setting):
        yield KernelCase(shape.name, partial(_chunk, setting, shape))
        if fa3 and ScoreScaling.of(plain) == ScoreScaling(plain.scale):
            yield KernelCase(f"{shape.name}, FA3", partial(_fa3, setting, shape))


def _rounds(setting: KernelSetting) -> Iterator[AttentionShape]:
    spec = setting.config.speculation
    kind, tree = ("tree", True) if spec.topk > 1 else ("chain", False)
    for width, name in ((1, "decode"), (spec.width, f"verify {kind} {spec.width}")):
        room = setting.model.context_length - width
        for batch, below in dict.fromkeys((batch, min(below, room)) for batch, below in DECODE):
            yield AttentionShape(f"{name}, {batch} x {below}", batch, below, width, tree and width > 1)


def _chunks(setting: KernelSetting) -> Iterator[AttentionShape]:
    chunk, context = setting.config.chunk_tokens, setting.model.context_length
    sizes = [(below, min(count, chunk, context)) for below, count in PREFILL]
    for below, count in dict.fromkeys((min(below, context - count), count) for below, count in sizes):
        yield AttentionShape(f"prefill, {count} after {below}", 1, below, count)


def least(setting: KernelSetting, shape: AttentionShape) -> tuple[int, int]:
    """(bytes, operations) of one layer: keys, values, queries and results once; both products of scores."""
    spec = setting.model.layers[0].attention
    seen = [min(shape.below + i + 1, spec.window or math.inf) for i in range(shape.width)]
    if shape.tree:
        seen = [min(shape.rows, spec.window or math.inf)] * shape.width
    read = min(shape.rows, (spec.window or shape.rows) + shape.width - 1)
    keys = 2 * read * spec.num_kv_heads * spec.head_dim
    rows = 2 * shape.width * spec.num_heads * spec.head_dim
    flops = 4 * spec.num_heads * spec.head_dim * int(sum(seen))
    return shape.batch * (keys + rows) * setting.dtype.itemsize, shape.batch * flops


# --- a pool of random rows, and their sequences --------------------------------------------------------


class PoolRows:
    """A pool large enough for `calls` calls of a shape, and the pages of each set of its sequences."""

    def __init__(self, setting: KernelSetting, shape: AttentionShape) -> None:
        size, model = setting.config.page_size, setting.model
        nbytes, _ = least(setting, shape)
        calls = setting.calls(nbytes)
        self.layers = min(model.num_layers, MOST_LAYERS, calls)
        self.sets = -(-calls // self.layers)
        each = -(-shape.rows // size)
        pages = 1 + each * shape.batch * self.sets
        format = replace(model.kv_format, layers=self.layers)
        self.shape = PoolShape(format, pages, size, setting.dtype, setting.device)
        self.pool = KvPool(self.shape)
        self.pool.tensor.normal_()
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.pages = order.view(self.sets, shape.batch, each)
        self.q = setting.normal(shape.batch * shape.width, model.num_heads, model.head_dim)

    def calls(self, call: Callable[[int, torch.Tensor], object]) -> list[Call]:
        """call(set, layer) for every set and layer."""
        layers = [self.pool.layer(i) for i in range(self.layers)]
        return [partial(call, chosen, layer) for chosen in range(self.sets) for layer in layers]

    def spans(self, chosen: int, shape: AttentionShape) -> list[QuerySpan]:
        """The sequences of one set, as plans on the host take them."""
        tables = self.pages[chosen].tolist()
        return [QuerySpan(table, shape.below, shape.width, paths_of(shape)) for table in tables]

    def tables(self, setting: KernelSetting) -> torch.Tensor:
        """int32 [sets * batch, pages each] on the device."""
        return self.pages.flatten(0, 1).to(torch.int32).to(setting.device)


def ancestors(width: int) -> list[int]:
    """The ancestors of a binary tree's nodes in order of depth: bit r is set if node r is on the
    way to it.
    """
    masks = [1]
    for node in range(1, width):
        masks.append(masks[(node - 1) // 2] | 1 << node)
    return masks


def paths_of(shape: AttentionShape) -> tuple[tuple[int, ...], ...] | None:
    """The rows on the way to each node of a tree; None for consecutive rows."""
    if not shape.tree:
        return None
    return tuple(
        tuple(shape.below + r for r in range(shape.width) if seen >> r & 1) for seen in ancestors(shape.width)
    )


# --- rounds --------------------------------------------------------------------------------------------


def _round(setting: KernelSetting, shape: AttentionShape) -> KernelCalls:
    rows = PoolRows(setting, shape)
    calls = _attend_calls(setting, shape, rows) if setting.fast else _torch_calls(setting, shape, rows)
    return KernelCalls(calls, *least(setting, shape), clock=setting.clock)


def _attend_calls(setting: KernelSetting, shape: AttentionShape, rows: PoolRows) -> Sequence[Call]:
    scores, tables = ScoreScaling.of(setting.model.layers[0].attention), rows.tables(setting)
    one = PagedKv(rows.pool.layer(0), tables, scores)
    launch = AttentionLaunch.on(one, setting.model.num_heads, shape.batch, shape.width, setting.pdl)
    out = torch.empty_like(rows.q)
    ints = partial(torch.tensor, device=setting.device)
    masks = ints([ancestors(shape.width)] * shape.batch, dtype=torch.int64) if shape.tree else None
    starts = ints([shape.below] * shape.batch, dtype=torch.int32)
    slots = torch.arange(shape.batch * rows.sets, dtype=torch.int32, device=setting.device)
    queries = [QueryRows(own, starts, shape.width, masks) for own in slots.split(shape.batch)]

    def call(chosen: int, layer: torch.Tensor) -> object:
        return attend(rows.q, PagedKv(layer, tables, scores), queries[chosen], launch, out=out)

    return rows.calls(call)


def _torch_calls(setting: KernelSetting, shape: AttentionShape, rows: PoolRows) -> Sequence[Call]:
    """Planned once, as for the layers of one forward."""
    spec = setting.model.layers[0].attention
    attention = torch_attention(setting.model, rows.shape)
    plans = [attention.plan(rows.spans(chosen, shape)) for chosen in range(rows.sets)]

    def call(chosen: int, layer: torch.Tensor) -> object:
        return attention.run(rows.q, layer, plans[chosen], spec)

    return rows.calls(call)


# --- prompts -------------------------------------------------------------------------------------------


def _chunk(setting: KernelSetting, shape: AttentionShape) -> KernelCalls:
    rows = PoolRows(setting, shape)
    if not setting.fast:
        calls = _torch_calls(setting, shape, rows)
        return KernelCalls(calls, *least(setting, shape), clock=setting.clock)
    model, out = setting.model, torch.empty_like(rows.q)
    most = tile_rows(model.num_heads, model.num_kv_heads)
    tables, scores = rows.tables(setting), ScoreScaling.of(model.layers[0].attention)
    tiles = [
        torch.tensor(
            [(own, i, shape.below + i, min(most, shape.width - i)) for i in range(0, shape.width, most)][
                ::-1
            ],
            dtype=torch.int32,
            device=setting.device,
        )
        for own in range(rows.sets)
    ]

    def call(chosen: int, layer: torch.Tensor) -> object:
        return attend_chunks(rows.q, PagedKv(layer, tables, scores), tiles[chosen], out=out)

    return KernelCalls(rows.calls(call), *least(setting, shape), clock=setting.clock)


def _fa3(setting: KernelSetting, shape: AttentionShape) -> KernelCalls:
    """Calls of flashinfer's kernel, planned once. Raises ConfigError where it has no template."""
    from eyas.engine.attention.flashinfer_backend import Fa3Build, PrefillAttention

    model = setting.model
    build = Fa3Build(setting.dtype, model.head_dim, setting.device)
    build.wait()
    rows = PoolRows(setting, shape)
    rows.sets = 1  # a plan holds for the layers of one step, of which each has keys of its own
    scale = model.layers[0].attention.scale
    attention = PrefillAttention(model.num_heads, rows.shape, scale, build)
    attention.plan(rows.spans(0, shape))
    out = torch.empty_like(rows.q)

    def call(_: int, layer: torch.Tensor) -> None:
        attention.run(rows.q, layer, out)

    return KernelCalls(rows.calls(call), *least(setting, shape), clock="queue")
