"""The shapes of steps at a start: those with a graph, those that are rehearsed, and the largest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from eyas.common.config import GRAPH_ROWS
from eyas.common.errors import ConfigError
from eyas.common.types import KvKind
from eyas.engine.attention.device import chunk_tile_rows
from eyas.engine.device.buckets import FEW_SINGLES, MAX_ENDS, GraphBuckets, default_batches
from eyas.engine.device.executor import WORDS
from eyas.engine.device.program import DeviceState
from eyas.engine.device.runner import catch_up_sizes
from eyas.engine.device.step import StepShape
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.speculation.depth import ladder, shallower
from eyas.engine.speculation.feature_rows import RING_ROWS

MIXED_BATCHES = (8, 16, 32, 48, 64, 80, 96, 128, 192, 256)
LONE_CHUNKS = (640, 768, 1024, 1536)
"""Rows of prompts that have a graph where layers have states: an agent's turn, which goes on from a cached
state, has so many. One by one, the host launches their kernels, some 700, for longer than a GPU computes.
"""
LATENT_CHUNKS = (768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
"""The same where layers have latents, whose kernels are twice as many."""


def buckets_of(loaded: EngineSpec) -> GraphBuckets:
    """Graphs for rounds, and for rounds beside a small chunk, as far as the configuration wants graphs."""
    config = loaded.config
    most, tokens = config.cuda_graph_max_bs, (config.chunk_tokens, config.mixed_tokens)
    groups = [KvKind.TARGET] if loaded.head is None else [KvKind.TARGET, KvKind.DRAFT]
    rows = min(chunk_tile_rows(loaded.share(group)) for group in groups)
    if not most:
        return GraphBuckets(loaded.width, rows, (), (), *tokens)
    batches = config.cuda_graph_bs or default_batches(most)
    mixed = tuple(b for b in MIXED_BATCHES if b < most) + (most,)
    return GraphBuckets(
        *(loaded.width, rows, batches, mixed if config.mixed_tokens else (), *tokens),
        lone_chunks=tuple(_lone_chunks(loaded)),
    )


def _lone_chunks(loaded: EngineSpec) -> Iterator[int]:
    """Rows of chunks that have a graph where nothing decodes beside them. Attention ranks launch alike,
    whatever prompts each of them has; exact steps plan none.
    """
    config, target = loaded.config, loaded.target
    plans = target.kv_format.latent and config.dp_attention == 1 and not config.deterministic
    for chunk in LONE_CHUNKS if target.delta is not None else LATENT_CHUNKS if plans else ():
        if config.mixed_tokens < chunk <= config.chunk_tokens:
            yield chunk


def by_depth(loaded: EngineSpec) -> dict[int, GraphBuckets]:
    """The buckets of every depth, if depths are adaptive: each has graphs of up to `GRAPH_ROWS` rows.

    Beside chunks only plain rounds and the deepest have any; sequences without drafts alone are plain rounds.
    Where drafts come from elsewhere the steps' graphs do not change: a sequence without drafts has one row.
    """
    whole, spec = buckets_of(loaded), loaded.config.speculation
    if whole.width == 1 or not spec.adaptive or (loaded.head is not None and not loaded.drafts_here):
        return {}
    shapes = {}
    for depth in ladder(spec):
        width = shallower(spec, depth).width if depth else 1
        batches, mixed = (
            tuple(batch for batch in batches if batch * width <= GRAPH_ROWS or batch == batches[0])
            for batches in (whole.batches, whole.mixed_batches)
        )
        if not depth:
            mixed = tuple(b for b in mixed if b & (b - 1) == 0 or b == mixed[-1])  # a row of padding is cheap
        elif depth < spec.steps:
            mixed = ()
        lone = whole.lone_chunks if mixed else ()
        shapes[depth] = replace(
            whole, width=width, batches=batches, mixed_batches=mixed, alone=False, lone_chunks=lone
        )
    if looks_up(loaded):
        own = replace(shapes[spec.steps], width=spec.deepest + 1, mixed_batches=(), lone_chunks=())
        shapes[-spec.deepest] = replace(own, headless=True)
    return shapes


def looks_up(loaded: EngineSpec) -> bool:
    """Whether rounds may let a head in the step wait, and verify what is looked up alone: if two such rounds
    leave no more rows than may wait.
    """
    spec = loaded.config.speculation
    beside = spec.adaptive and spec.ngram and loaded.head is not None and loaded.drafts_here
    return beside and 2 * (spec.deepest + 1) <= RING_ROWS


def captured(loaded: EngineSpec) -> list[StepShape]:
    """Every shape that has a graph, the largest first. Steps whose rows have adapters have graphs of their
    own: the others launch nothing for them.
    """
    depths = by_depth(loaded).values() or (buckets_of(loaded),)
    shapes = itertools.chain.from_iterable(buckets.captured() for buckets in depths)
    return sorted(with_adapted(loaded, shapes), key=lambda shape: -shape.rows)


def with_adapted(loaded: EngineSpec, shapes: Iterable[StepShape]) -> Iterator[StepShape]:
    """Each shape, and behind it, where there may be adapters, the same with rows that have some."""
    for shape in shapes:
        yield shape
        if loaded.config.max_loras:
            yield replace(shape, adapted=True)


def captured_catch_ups(loaded: EngineSpec, state: DeviceState) -> list[tuple[int, int]]:
    """Sequences and widths of every graph by which sequences catch up."""
    if state.drafter is None or not state.drafter.adaptive:
        return []
    sizes = reversed(catch_up_sizes(state.tables.padding_slot))
    depths = [
        depth for depth in by_depth(loaded).values() if not depth.headless
    ]  # it waits as in plain rounds
    return [(size, depth.width) for size in sizes for depth in depths]


def rehearsed(loaded: EngineSpec, buckets: GraphBuckets) -> Iterator[StepShape]:
    """Steps that may run without a graph: the largest prompt chunk, alone and beside rounds; and a round.

    Also as many rounds as there may be, if those have none; each also with adapters, where there may be some.
    `buckets`: of one depth.
    """
    yield from with_adapted(loaded, _rehearsed(loaded, buckets))


def _rehearsed(loaded: EngineSpec, buckets: GraphBuckets) -> Iterator[StepShape]:
    chunk = min(loaded.config.chunk_tokens, loaded.target.context_length)
    tiles, width = -(-chunk // buckets.tile_rows), buckets.width
    yield StepShape(0, width, chunk, tiles, 1)
    yield StepShape(1, width, chunk, tiles, 1)
    yield StepShape(1, width)
    if width > 1:
        yield StepShape(1, width, singles=1)
    if loaded.config.max_running > max(buckets.batches, default=0):
        yield StepShape(loaded.config.max_running, width)


def largest(loaded: EngineSpec, buckets: GraphBuckets) -> StepShape:
    """The largest step shape, with or without a graph: no step has more of anything."""
    config = loaded.config
    batch = max(config.max_running, config.cuda_graph_max_bs)
    ends = max(batch, MAX_ENDS)  # a chunk's graph has room for MAX_ENDS, whatever the batch
    tiles = -(-config.chunk_tokens // buckets.tile_rows) + ends  # every prompt's last one is partly empty
    singles = FEW_SINGLES if loaded.width > 1 else 0  # each one beyond these takes the place of a round
    shape = StepShape(batch, loaded.width, config.chunk_tokens, tiles, ends, singles)
    return replace(shape, adapted=config.max_loras > 0)


def check_words(loaded: EngineSpec, buckets: GraphBuckets) -> None:
    """Raises ConfigError if the largest step, or what all ranks find in it, cannot be told at once."""
    shape = largest(loaded, buckets)
    result_words = ProcessGroup.exchanged(shape.result_ends[-1] + shape.batch * shape.width)
    words = max(
        shape.parts(loaded.target.delta is not None)["all"][1], loaded.config.dp_attention * result_words
    )
    if words > WORDS:
        raise ConfigError(
            f"steps of {shape.batch} sequences with {shape.width} rows each and {shape.chunk} prompt rows "
            f"take {words} words, and {WORDS} is the most: lower --max-running or --chunk-tokens",
            param="max-running",
        )


def check_windows(loaded: EngineSpec) -> None:
    """Raises ConfigError if a layer's window is shorter than the tree of drafts that it verifies, or a layer
    attends in chunks, whose bounds would cut through trees.
    """
    if loaded.config.speculation.topk > 1 and any(layer.attention.chunk for layer in loaded.target.layers):
        raise ConfigError(
            "trees of drafts are not verified by a model that attends in chunks: take --spec-topk 1",
            param="spec-topk",
        )
    windows = [layer.attention.window for layer in loaded.target.layers if layer.attention.window]
    if loaded.config.speculation.topk > 1 and min(windows, default=loaded.width) < loaded.width:
        raise ConfigError(
            f"trees of {loaded.width} rows do not fit into the model's window of {min(windows)} tokens: "
            "lower --spec-draft-tokens or take --spec-topk 1",
            param="spec-draft-tokens",
        )
