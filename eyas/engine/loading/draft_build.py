"""Loads what a draft worker runs: a draft head without its target, in plain torch or on a device.

Of the target it takes the two ends, embedding and output head, which most heads share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from eyas.common.config import RESERVE_BYTES, EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import KvKind
from eyas.engine.attention.device import chunk_tile_rows, row_attention
from eyas.engine.attention.rows import Most
from eyas.engine.batch.tables import Tables
from eyas.engine.device.buckets import default_batches
from eyas.engine.kernels import skinny
from eyas.engine.loading.device_build import table_sizes
from eyas.engine.loading.memory import Demand, DeviceMemory, pool_pages
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models.decoder import EmbeddingAndHead
from eyas.engine.models.fused import FusedEnds
from eyas.engine.models.fused_step import LayerContext
from eyas.engine.models.heads import load_device_draft, load_draft
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo
from eyas.engine.speculation.device import DeviceProposer
from eyas.engine.speculation.device_runner import MOST_PASSES, DeviceDraftRunner
from eyas.engine.speculation.draft_runner import Asked, DraftRunner, Extension, RingRow
from eyas.engine.speculation.draft_sequences import BatchRunner
from eyas.engine.speculation.short_runs import DraftState
from kv_transfer.layout import pages_for


@dataclass(frozen=True)
class DraftWorker:
    """`loaded`: with as many pages as fit. `ahead`: what drafts ahead, if anything does. `slowest_step_s`: of
    the warm-up's batches; 0.0 without one.
    """

    loaded: EngineSpec
    runner: BatchRunner
    ahead: DraftRunner | None
    slowest_step_s: float = 0.0


def draft_worker(loaded: EngineSpec) -> DraftWorker:
    """Raises ConfigError if the head, or any page, does not fit."""
    if loaded.config.attention_backend == "torch":
        with loaded.weights(KvKind.TARGET) as weights:
            ends = EmbeddingAndHead.load(loaded.target, weights)
        runner = plain_runner(loaded, ends)
        # What drafts ahead runs certain rows and drafts at once, which a head of several stages does apart.
        foresees = loaded.head is not None and loaded.head.stages == 1
        return DraftWorker(loaded, runner, runner if foresees else None)
    if loaded.config.tensor_parallel_size > 1:
        flag = "tensor-parallel-size"
        raise ConfigError(f"--{flag}: a draft worker has one GPU", param=flag)
    return _device_worker(loaded)


def plain_runner(loaded: EngineSpec, ends: EmbeddingAndHead) -> DraftRunner:
    """The head in plain torch, with a pool of its own."""
    assert loaded.head is not None
    backend = loaded.backend(KvKind.DRAFT)
    with loaded.weights(KvKind.DRAFT) as weights:
        head = load_draft(loaded.head, weights, ends, backend)
    return DraftRunner(head, loaded.pool(KvKind.DRAFT), backend)


def _device_worker(loaded: EngineSpec) -> DraftWorker:
    """The same tables, kernels and head as in a target engine's steps, and nothing of the target but ends."""
    assert loaded.head is not None
    config, decoder = loaded.config, loaded.head.decoder
    pdl = config.device != "cpu"
    tables = Tables(table_sizes(loaded), config.device)
    launch = skinny.Launch.on(config.device, pdl=pdl)
    most = Most(config.max_running, max(loaded.width, config.speculation.topk))
    shape = loaded.with_pages(1).shape(KvKind.DRAFT)
    attention = row_attention(tables.pages, decoder.num_heads, shape, most, pdl=pdl)
    context = LayerContext.on(
        config.device, decoder, ProcessGroup(RankInfo(), config.device), launch, attention
    )
    with loaded.weights(KvKind.TARGET) as weights:
        ends = FusedEnds.load(loaded.target, weights)
    with loaded.weights(KvKind.DRAFT) as weights:
        head = load_device_draft(loaded.head, weights, ends, context)
    if config.num_pages is None:
        loaded = loaded.with_pages(_pages(loaded))
    firsts = torch.zeros(tables.sizes.slots, dtype=torch.int32, device=config.device)
    pool, spec = loaded.pool(KvKind.DRAFT), config.speculation
    proposer = DeviceProposer(head, pool, tables, spec, pdl=pdl, firsts=firsts)
    state = DraftState(proposer, tables, firsts, decoder.hidden_size)
    runner = DeviceDraftRunner(state, batch_sizes(config), chunk_tile_rows(decoder))
    slowest = 0.0
    if config.device != "cpu":  # an interpreted device has nothing to compile, to load or to capture
        runner.short.capture()
        slowest = warm_up(runner, decoder.hidden_size, spec)
    return DraftWorker(loaded, runner, None, slowest)


def batch_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Batches of sequences whose short runs have a graph, as the rounds of a target engine have."""
    most = min(config.cuda_graph_max_bs, config.max_running)
    sizes = config.cuda_graph_bs or (default_batches(most) if most else ())
    return tuple(size for size in sizes if size <= config.max_running)


def warm_up(runner: DeviceDraftRunner, width: int, spec: SpeculationConfig) -> float:
    """Drafts for made-up sequences, in pages without an owner: one row, whose feature comes from the host,
    then from a ring that does not exist; and as many as need every kernel.

    Seconds of the slower one when it is warm.
    """
    shape, behind = runner.pool.shape, runner.draft_rows(spec)
    slowest = 0.0
    long = max(skinny.MAX_ROWS, MOST_PASSES * runner.short.few) + 1
    most = min(long, shape.pages * shape.page_size - behind)
    for rows, ringed in ((1, 0), (1, 1), (most, 0)):
        pages = range(pages_for(rows + behind, shape.page_size))
        features = torch.zeros(rows - ringed, width)
        new = Extension(pages, 0, [0] * rows, features, ringed=[RingRow(0, 0)] * ringed)
        for _ in range(2):
            began = time.monotonic()
            runner.draft([Asked(rows, new, SamplingParams(), choice=0)], spec)
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def _pages(loaded: EngineSpec) -> int:
    """As many as fit beside the weights, and the logits and their softmax of the largest batch's graph."""
    assert loaded.head is not None
    scores = 2 * 4 * loaded.config.max_running * loaded.config.speculation.topk * loaded.head.outputs
    config, page_bytes = loaded.config, loaded.with_pages(1).shape(KvKind.DRAFT).page_bytes
    demand = Demand(
        page_bytes=page_bytes,
        page_size=config.page_size,
        context_length=loaded.target.context_length,
        rows_ahead=loaded.round_rows,
        reserve=RESERVE_BYTES + scores + page_bytes,  # and the page behind the pool
    )
    return pool_pages(DeviceMemory.measure(config.device), config.mem_fraction_static, demand)
