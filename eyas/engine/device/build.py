"""Puts the fast path together: weights, pools, tables, kernels, graphs. Each phase is timed.

The order matters: weights first, then as many KV pages as memory has left, then the graphs on top of both.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from eyas.common.types import Group
from eyas.engine.attention.rows import Most, PagedAttention
from eyas.engine.device.buckets import MAX_ENDS, Buckets, default_batches
from eyas.engine.device.executor import Executor
from eyas.engine.device.hostsample import HostSampler
from eyas.engine.device.program import Machine
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.device.step import Layout, StepShape
from eyas.engine.device.tables import Tables, TableSizes
from eyas.engine.kernels import skinny
from eyas.engine.kv_pool import KvPool
from eyas.engine.loaded import Loaded
from eyas.engine.memory import Demand, DeviceMemory, pool_pages
from eyas.engine.models.fused import Fabric, FusedLlama
from eyas.engine.models.fused_eagle3 import FusedEagle3
from eyas.engine.speculation.device import DeviceDrafter
from eyas.engine.startup import Phases
from kv_transfer.layout import pages_for

BEYOND = 256
"""Rows past the context that drafts may write."""

RESERVE_BYTES = 4 << 30
"""For the graphs and the widest step's activations."""

MIXED_BATCHES = (8, 16, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Device:
    """`pools`: target first, then the draft head's, under the same page numbers."""

    runner: DeviceRunner
    pools: tuple[KvPool, ...]
    slowest_step_s: float


def build_device(loaded: Loaded, phases: Phases) -> tuple[Loaded, Device]:
    """Raises ConfigError if the model and its KV pages do not fit."""
    groups = [Group.TARGET] if loaded.head is None else [Group.TARGET, Group.DRAFT]
    tables = Tables(_sizes(loaded), loaded.config.device)
    attentions = {group: _attention(loaded, group, tables) for group in groups}
    with phases("weights"):
        models = _models(loaded, attentions)
    if loaded.config.num_pages is None:
        loaded = loaded.with_pages(_pages(loaded, groups))
    pools = tuple(KvPool(loaded.shape(group)) for group in groups)
    executor = Executor(_machine(loaded, models, tables, pools))
    buckets = _buckets(loaded, attentions[Group.TARGET].tile_rows)
    layout = Layout(loaded.config.page_size, tables.padding_slot, buckets.tile_rows)
    runner = DeviceRunner(executor, buckets, layout, HostSampler(executor, loaded.target.eos_token_ids))
    with phases("kernels"):
        slowest = _warm_up(executor, _rehearsed(loaded, buckets))
    with phases("capture"):
        executor.capture(list(buckets.captured()))
    return loaded, Device(runner, pools, slowest)


def _pages(loaded: Loaded, groups: list[Group]) -> int:
    config = loaded.config
    demand = Demand(
        page_bytes=sum(loaded.with_pages(1).shape(group).page_bytes for group in groups),
        page_size=config.page_size,
        context_length=loaded.target.context_length,
        rows_ahead=3 * loaded.round_rows,
        reserve=RESERVE_BYTES,
    )
    return pool_pages(DeviceMemory.measure(config.device), config.mem_fraction_static, demand)


def _sizes(loaded: Loaded) -> TableSizes:
    context = loaded.target.context_length + BEYOND
    return TableSizes(
        slots=loaded.config.max_running + 1,
        max_pages=pages_for(context, loaded.config.page_size),
        width=loaded.width,
    )


def _attention(loaded: Loaded, group: Group, tables: Tables) -> PagedAttention:
    config = loaded.config
    most = Most(config.max_running + MAX_ENDS, max(loaded.width, config.speculation.topk))
    shape = loaded.with_pages(1).shape(group)
    return PagedAttention(tables.pages, loaded.decoder(group).num_heads, shape, most, pdl=_pdl(loaded))


def _pdl(loaded: Loaded) -> bool:
    """Programmatic dependent launch: where there is a GPU (of compute capability 9.0)."""
    return loaded.config.device != "cpu"


def _models(loaded: Loaded, attentions: dict[Group, PagedAttention]) -> tuple[FusedLlama, FusedEagle3 | None]:
    device = loaded.config.device
    launch = skinny.Launch.on(device, pdl=_pdl(loaded))
    with loaded.weights(Group.TARGET) as weights:
        fabric = Fabric.on(device, loaded.target, launch, attentions[Group.TARGET])
        model = FusedLlama(loaded.target, weights, fabric)
    if loaded.head is None:
        return model, None
    with loaded.weights(Group.DRAFT) as weights:
        fabric = Fabric.on(device, loaded.head.decoder, launch, attentions[Group.DRAFT])
        return model, FusedEagle3(loaded.head, weights, model, fabric)


def _machine(
    loaded: Loaded,
    models: tuple[FusedLlama, FusedEagle3 | None],
    tables: Tables,
    pools: tuple[KvPool, ...],
) -> Machine:
    (model, head), spec = models, loaded.config.speculation
    drafter = None if head is None else DeviceDrafter(head, pools[1], tables, spec, pdl=_pdl(loaded))
    synthetic = None
    if drafter is not None and spec.synthetic_rates:
        synthetic = torch.tensor(spec.synthetic_rates, device=loaded.config.device)
    return Machine(model, pools[0], tables, drafter, synthetic, pdl=_pdl(loaded))


def _buckets(loaded: Loaded, tile_rows: int) -> Buckets:
    """Graphs for rounds, and for rounds beside a small chunk, as far as the configuration wants graphs."""
    config = loaded.config
    most, chunk = config.cuda_graph_max_bs, config.mixed_chunk_tokens
    if not most:
        return Buckets(loaded.width, tile_rows, ())
    batches = config.cuda_graph_bs or default_batches(most)
    mixed = tuple(b for b in MIXED_BATCHES if b < most) + (most,)
    return Buckets(
        loaded.width, tile_rows, batches, mixed if chunk else (), (chunk // 2, chunk) if chunk else ()
    )


def _rehearsed(loaded: Loaded, buckets: Buckets) -> Iterator[StepShape]:
    """Steps that may run without a graph: the largest prompt chunk, alone and beside rounds; and a round."""
    chunk = min(loaded.config.chunk_tokens, loaded.target.context_length)
    tiles = -(-chunk // buckets.tile_rows)
    yield StepShape(0, loaded.width, chunk, tiles, 1)
    yield StepShape(1, loaded.width, chunk, tiles, 1)
    yield StepShape(1, loaded.width)


def _warm_up(executor: Executor, shapes: Iterable[StepShape]) -> float:
    """Run steps of padding: loads and compiles what they need; seconds of the slowest when it is warm."""
    slowest = 0.0
    for shape in shapes:
        for _ in range(2):
            began = time.monotonic()
            executor.rehearse(shape)
        slowest = max(slowest, time.monotonic() - began)
    return slowest
