"""Puts the fast path together: weights, pools, tables, kernels, graphs. Each phase is timed.

The order matters: weights first, then as many KV pages as memory has left, then the graphs on top of both.

It also measures how long rounds of each depth take, for the policy that chooses between them.
Made-up sequences of one token decode through the engine's own runner, before any page has an owner.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from eyas.common.config import FEWEST_SLOTS, EngineConfig
from eyas.common.machine.gpus import number_of
from eyas.common.params import MAX_STOP_TOKEN_IDS, SamplingParams
from eyas.common.types import GenerationRequest, KvKind
from eyas.common.wire.control import MemoryTag
from eyas.engine.adapters.reader import OF_HEAD
from eyas.engine.adapters.table import AdapterMemory
from eyas.engine.attention.prompts import PromptPlan
from eyas.engine.batch.rows import ForwardRows
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.device.adapters import DeviceAdapters, LeaderAdapters
from eyas.engine.device.buckets import DepthBuckets, GraphBuckets
from eyas.engine.device.executor import StepExecutor
from eyas.engine.device.program import DeviceState
from eyas.engine.device.rank0_executor import Rank0Executor
from eyas.engine.device.runner import DeviceRunner, catch_up_sizes
from eyas.engine.device.special import SpecialSampler
from eyas.engine.device.step import StepLayout, StepShape
from eyas.engine.formats.adapted import Adapted, AdaptedProjection
from eyas.engine.grammar.grammars import GrammarManager
from eyas.engine.kernels.products import skinny
from eyas.engine.kernels.states.order import DeltaLayer
from eyas.engine.kernels.states.rings import SolvedStore
from eyas.engine.kv.movable import MovableMemory
from eyas.engine.kv.pool import KvPool
from eyas.engine.loading.arithmetic import RankArithmetic, pdl_of, prompts_of
from eyas.engine.loading.copies import has_copies
from eyas.engine.loading.draft_channels import from_gpu_to_gpu
from eyas.engine.loading.foreign_graphs import capture_if_possible
from eyas.engine.loading.memory import (
    DeviceMemory,
    MemoryDemand,
    pool_pages,
    slots_that_fit,
)
from eyas.engine.loading.rank_memory import LeaderMemory
from eyas.engine.loading.spec import EngineSpec, spread_experts
from eyas.engine.loading.startup import EngineStart, StartPhases
from eyas.engine.loading.step_shapes import (
    buckets_of,
    by_depth,
    captured,
    captured_catch_ups,
    check_windows,
    check_words,
    largest,
    looks_up,
    rehearsed,
)
from eyas.engine.loading.weight_memory import WeightMemory
from eyas.engine.models.base import AdaptedDraftModel, DecoderModel, DraftModel, FeatureTap
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.foreign.build import foreign_model
from eyas.engine.models.foreign.pages import DevicePages
from eyas.engine.models.heads import head_family, load_draft
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.ops.device_step import LayerContext, RowAttention
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.leader import RankLeader
from eyas.engine.parallel.ranks import RankInfo
from eyas.engine.sampling.scores import SLICE, SLICE_BYTES
from eyas.engine.speculation.depth_pacing import DepthPacing, pacing_of
from eyas.engine.speculation.device import DeviceDrafter, DeviceTap
from eyas.engine.speculation.drafters.device_lookup import DeviceLookup, words_predicted
from eyas.engine.speculation.feature_rows import DeviceWindows, FeatureRing
from kv_transfer.gpu.cuda import CudaDriver
from kv_transfer.layout import pages_for

BEYOND = 256
"""Rows past the context that drafts may write, at least."""


RUNS = 2  # of each: the shorter one counts
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def measure_depths(
    runner: DeviceRunner, depths: DepthBuckets, pacing: DepthPacing, config: EngineConfig
) -> None:
    """Tells `pacing` of a few batches. Their rows are garbage that is never read.

    A batch takes as long as the next larger one that has a graph: that one is measured in its place.
    """
    occupancies = itertools.count(-2, -1)  # real ones count from 0 up; -1 is none
    most = config.max_running
    for batch in sorted({min(depths.graphed(batch), most) for batch in BATCHES}):
        works = [_work(slot, next(occupancies), config) for slot in range(batch)]
        for depth in reversed(depths.places):  # plain rounds last: what they leave is never caught up
            depths.fixed = depth
            pacing.depths.times.measured(batch, depth, _seconds(runner, works))
    depths.fixed = None


def _seconds(runner: DeviceRunner, works: list[SequenceWork]) -> float:
    """Seconds of a round that follows others, as an engine's do: the host prepares the next while
    one runs.
    """
    landed, flight = [], runner.launch(works)
    for _ in range(RUNS + 1):  # the first one verifies what the depth before it has drafted
        following = runner.launch(works) if runner.ahead else None
        flight.land()
        landed.append(time.monotonic())
        flight = following or runner.launch(works)
    flight.land()
    return min(after - before for before, after in itertools.pairwise(landed))


def _work(slot: int, occupancy: int, config: EngineConfig) -> SequenceWork:
    """A round of a sequence with a page; the rows that it grows beyond that fall into others' pages."""
    assert config.num_pages is not None
    request = GenerationRequest("measured", (0,), SamplingParams())
    seq = Sequence(slot, Generation(request, 0, GenerationKind.LOCAL, 0.0, 0.0), 0, request.prompt_ids, [])
    seq.pages, seq.slot, seq.occupancy = [slot % config.num_pages], slot, occupancy
    seq.state = slot % config.slots_of_states
    return SequenceWork(seq, 0, [0], None, sample=True, round=True)


@dataclass(frozen=True)
class DeviceCore:
    """`pools`: target first, then the draft head's, under the same page numbers. `pacing`: of their depth."""

    runner: DeviceRunner
    pacing: DepthPacing | None
    pools: tuple[KvPool, ...]
    slowest_step_s: float
    memory: dict[MemoryTag, tuple[MovableMemory, ...]]  # of all ranks, that can leave
    model: DecoderModel[ForwardRows]
    adapters: AdapterMemory | None  # on all ranks; None: there are no slots


@dataclass(frozen=True)
class WarmRank:
    """One rank, warm. `loaded`: with as many pages as fit into every rank."""

    loaded: EngineSpec
    executor: StepExecutor
    buckets: GraphBuckets
    slowest_step_s: float


def build_device(
    loaded: EngineSpec, start: EngineStart, grammars: GrammarManager, leader: RankLeader | None
) -> tuple[EngineSpec, DeviceCore]:
    """`leader`: of several ranks, which have met. Raises ConfigError if model and KV pages do not fit."""
    if leader is None:
        rank = build_rank(loaded, start, ProcessGroup(RankInfo(), loaded.config.device), StepExecutor)
    else:
        rank = build_rank(loaded, start, leader.group, partial(Rank0Executor, leader=leader))
    loaded, executor, state = rank.loaded, rank.executor, rank.executor.state
    layout = StepLayout(
        loaded.config.page_size,
        state.tables.padding_slot,
        rank.buckets.tile_rows,
        stated=state.pool.states is not None,
    )
    pages, ranks = state.pool.shape.pages, loaded.config.dp_attention
    layouts = [replace(layout, first_page=pages * number) for number in range(ranks)]
    adaptive = None
    if by_depth(loaded) and ranks == 1:
        adaptive = pacing_of(loaded.config, looks_up=looks_up(loaded))
    depths = None if adaptive is None else DepthBuckets(adaptive, by_depth(loaded))
    ahead = loaded.config.overlap_schedule
    runner = DeviceRunner(executor, rank.buckets, layouts, grammars, ahead=ahead, depths=depths)
    if adaptive is not None and depths is not None and loaded.config.device != "cpu":
        with start.phases("depths"):
            measure_depths(runner, depths, adaptive, loaded.config)
    adapters: AdapterMemory | None = state.adapters
    if state.adapters is not None and leader is not None:
        adapters = LeaderAdapters(state.adapters, leader)
    memory = _movable(state, leader)
    core = DeviceCore(runner, adaptive, state.pools, rank.slowest_step_s, memory, state.model, adapters)
    return loaded, core


def _movable(state: DeviceState, leader: RankLeader | None) -> dict[MemoryTag, tuple[MovableMemory, ...]]:
    """The memory that can leave, on all ranks. Weights of a CPU stay, since they are in the host's memory."""
    parts: list[MovableMemory] = state.movable
    if leader is not None:
        parts = [LeaderMemory(own, leader, number) for number, own in enumerate(parts)]
    pools = len(state.pools)
    movable: dict[MemoryTag, tuple[MovableMemory, ...]] = {MemoryTag.KV_CACHE: tuple(parts[:pools])}
    if state.weights is not None or state.device == "cpu":
        movable[MemoryTag.WEIGHTS] = tuple(parts[pools:])
    return movable


def build_rank(
    loaded: EngineSpec,
    start: EngineStart,
    ranks: ProcessGroup,
    executor_of: Callable[[DeviceState], StepExecutor],
) -> WarmRank:
    """Builds one rank; every rank does the same, at about the same time."""
    buckets = buckets_of(loaded)
    check_words(loaded, buckets)
    check_windows(loaded)
    with start.phases("import"):
        prompts = prompts_of(loaded)
    loaded, state = build_state(loaded, ranks, start.phases, prompts)
    executor = executor_of(state)
    with start.phases("kernels"):
        start.wait_for_kernels()
        ranks.barrier()  # from here on they wait for each other's kernels
        depths = [depth for depth in by_depth(loaded).values() if not depth.headless] or [buckets]
        slowest = max(_warm_up(executor, rehearsed(loaded, depth)) for depth in depths)
    with start.phases("capture"):
        if loaded.target.foreign is None:
            executor.capture(captured(loaded), captured_catch_ups(loaded, state))
        else:
            capture_if_possible(executor, captured(loaded))
    return WarmRank(loaded, executor, buckets, slowest)


def build_state(
    loaded: EngineSpec, ranks: ProcessGroup, phases: StartPhases, prompts: PromptPlan | None = None
) -> tuple[EngineSpec, DeviceState]:
    """Everything that steps share, and `loaded` with as many pages as fit, if it did not say how many."""
    if loaded.config.dp_attention > 1:
        ranks.share_rows()
    if loaded.config.expert_replicas:
        ranks.greet()
    groups = [KvKind.TARGET, KvKind.DRAFT] if loaded.drafts_here else [KvKind.TARGET]
    tables = SlotTables(table_sizes(loaded), loaded.config.device)
    arithmetic = RankArithmetic.of(loaded)
    attentions = {group: arithmetic.attention(group, tables, prompts) for group in groups}
    weights = _weight_memory(loaded)
    with phases("weights"), contextlib.nullcontext() if weights is None else weights.filling():
        model, tap, head = _models(arithmetic, ranks, attentions)
        adapters = _adapters(loaded, model, head)
    ring = None if tap is None or head is None else _ring(loaded, tables, tap)
    windows = None if tap is None or head is not None else _windows(loaded)
    special = SpecialSampler(tables, loaded.target.vocab_size, pdl=pdl_of(loaded.config))
    if loaded.config.num_pages is None:
        loaded = _with_slots(loaded, groups, ranks)
        loaded = loaded.with_pages(ranks.least(_pages(loaded, groups)))
    pools = tuple(loaded.pool(group) for group in groups)
    drafter, elsewhere, spec = None, None, loaded.config.speculation
    if tap is not None and head is not None:
        drafter = DeviceDrafter((tap, head), pools[1], tables, spec, pdl=pdl_of(loaded.config), ring=ring)
        if loaded.head_adapted is not Adapted.NOTHING:
            drafter.take_updates()
    elif tap is not None:
        elsewhere = DeviceTap(tap, spec, loaded.width, windows)
    return loaded, DeviceState(
        *(model, pools[0], tables, special, drafter, _synthetic(loaded)),
        pdl=pdl_of(loaded.config),
        prompts=prompts,
        lookup=None if elsewhere else _lookup(loaded, tables, drafter),
        tap=elsewhere,
        state_layers=_state_layers(model, pools[0]),
        sharers=ranks if loaded.config.dp_attention > 1 else None,
        weights=weights,
        adapters=adapters,
    )


def _adapters(
    loaded: EngineSpec, model: DecoderModel[ForwardRows], head: DraftModel[ForwardRows] | None
) -> DeviceAdapters | None:
    """The slots of adapters, if there are some. Their memory is taken before that of pages."""
    if not loaded.config.max_loras:
        return None
    assert isinstance(model, Decoder)
    products = list(model.projections)
    if loaded.head_adapted is not Adapted.NOTHING:
        products += cast(AdaptedDraftModel[ForwardRows], head).projections
    matrices = [each for each in products if isinstance(each, AdaptedProjection)]
    return DeviceAdapters(loaded.adapter_reader, matrices, loaded.config.max_loras, loaded.config.device)


def _weight_memory(loaded: EngineSpec) -> WeightMemory | None:
    """The memory of weights that may leave the GPU; None: they stay there."""
    config = loaded.config
    if not (config.memory_saver and config.device.startswith("cuda")):
        return None
    number = number_of(config.device)
    return WeightMemory(CudaDriver(number), torch.device("cuda", number))


def _state_layers(model: DecoderModel[ForwardRows], pool: KvPool) -> tuple[DeltaLayer, ...]:
    """The layers with states, for whose rings kernels get memory of their own."""
    if (states := pool.states) is None:
        return ()
    assert isinstance(model, Decoder)
    states.beside = kept = SolvedStore.on(states)
    return tuple(DeltaLayer(rule, states.layers[i], kept.layers[i]) for i, rule in model.rules.items())


def _lookup(loaded: EngineSpec, tables: SlotTables, drafter: DeviceDrafter | None) -> DeviceLookup | None:
    """The lookup, wherever anything is drafted in the step: any request may bring a prediction."""
    if not loaded.config.speculates:
        return None
    trees = drafter is not None and drafter.trees
    return DeviceLookup(tables, loaded.config.speculation, headed=drafter is not None, trees=trees)


def _with_slots(loaded: EngineSpec, groups: list[KvKind], ranks: ProcessGroup) -> EngineSpec:
    """A copy with as many slots of states as fit, if it did not say how many, and if that is fewer."""
    config, states = loaded.config, loaded.states
    if states is None or config.state_slots is not None:
        return loaded
    demand = replace(_demand(loaded, groups), states=0)
    memory, each = DeviceMemory.measure(config.device), _state_bytes(loaded) // loaded.state_slots
    fit = ranks.least(slots_that_fit(memory, config.mem_fraction_static, demand, each))
    if fit >= loaded.state_slots:
        return loaded
    loaded = replace(loaded, config=replace(config, state_slots=max(fit, FEWEST_SLOTS)))
    text = "states: %d slots of %.1f MiB fit, with what kernels keep of their rows: no more sequences run"
    logging.getLogger("eyas.engine").warning(text, loaded.state_slots, each / 2**20)
    return loaded


def _pages(loaded: EngineSpec, groups: list[KvKind]) -> int:
    config, demand = loaded.config, _demand(loaded, groups)
    return pool_pages(DeviceMemory.measure(config.device), config.mem_fraction_static, demand)


def _demand(loaded: EngineSpec, groups: list[KvKind]) -> MemoryDemand:
    config = loaded.config
    proofs = sum(loaded.with_pages(1).shape(group).page_bytes for group in groups)  # one behind each pool
    page_bytes = len(loaded.groups) * proofs
    return MemoryDemand(
        page_bytes=page_bytes,
        page_size=config.page_size,
        context_length=loaded.target.context_length,
        rows_ahead=rounds_ahead(loaded) * loaded.round_rows,
        groups=loaded.groups,
        reserve=config.reserve_bytes
        + loaded.target.vocab_size * _logit_bytes(loaded)
        + _exchanged_bytes(loaded)
        + _block_bytes(loaded)
        + proofs,
        states=_state_bytes(loaded),
    )


def _logit_bytes(loaded: EngineSpec) -> int:
    """Bytes of logits for one id: of a step's rows that give a token, and of prompt rows that are scored at a
    time.
    """
    return 4 * largest(loaded, buckets_of(loaded)).sampled + SLICE_BYTES * SLICE


def _block_bytes(loaded: EngineSpec) -> int:
    """Bytes of the logits of all drafts of the largest batch, if a head gives them in one pass."""
    if loaded.head is None or loaded.head.block is None or not loaded.drafts_here:
        return 0
    batch = largest(loaded, buckets_of(loaded)).batch
    return 4 * loaded.head.outputs * batch * loaded.config.speculation.steps


def _state_bytes(loaded: EngineSpec) -> int:
    """Bytes of all slots of states, and of what kernels keep beside their rings."""
    if (states := loaded.states) is None:
        return 0
    beside = len(states.layers) * states.shape.solved_bytes(states.ring, states.dtype.itemsize)
    return loaded.state_slots * (states.slot_bytes + beside)


def _exchanged_bytes(loaded: EngineSpec) -> int:
    """Bytes that the experts of this rank make of other attention ranks' rows: those of the target in the
    largest step, or after them the head's.
    """
    groups = [KvKind.TARGET] if loaded.head is None else [KvKind.TARGET, KvKind.DRAFT]
    each = max(
        (
            (part.per_row + 1) * (loaded.decoder(group).hidden_size + part.width)
            for group in groups
            for part in loaded.decoder(group).experts
        ),
        default=0,
    )
    shape, others = largest(loaded, buckets_of(loaded)), loaded.config.dp_attention - 1
    rows = max(shape.rows, shape.batch * loaded.config.speculation.topk)  # of a level of trees
    return others * rows * each * loaded.placement.dtype.itemsize


def rounds_ahead(loaded: EngineSpec) -> int:
    """The number of rounds for which a sequence has pages.

    The one in flight, the next, and the drafts that the head then writes below a root not yet known: with a
    chain of n drafts 3 n + 1 rows, of which the host knows one. The drafts of a tree would do with 2 rounds.
    """
    return 2 if loaded.head is None else 3


def table_sizes(loaded: EngineSpec) -> TableSizes:
    """The sizes of the tables of a target's steps, or of a draft worker's."""
    context = loaded.target.context_length + max(BEYOND, rounds_ahead(loaded) * loaded.round_rows)
    return TableSizes(
        slots=loaded.config.max_running + 1,
        max_pages=pages_for(context, loaded.config.page_size),
        width=loaded.width,
        context=loaded.target.context_length,
        endings=len(loaded.target.eos_token_ids) + MAX_STOP_TOKEN_IDS,
        predicted=words_predicted(loaded.target.context_length) if loaded.config.speculates else 1,
        groups=1 if loaded.config.only_drafts else len(loaded.groups),
    )


def _models(
    arithmetic: RankArithmetic, ranks: ProcessGroup, attentions: dict[KvKind, RowAttention]
) -> tuple[DecoderModel[ForwardRows], FeatureTap | None, DraftModel[ForwardRows] | None]:
    """The target, and as much of the head as runs here."""
    loaded, alone = arithmetic.loaded, ProcessGroup(RankInfo(), arithmetic.loaded.config.device)
    whole, sharers = (ranks, alone) if loaded.config.dp_attention == 1 else (alone, ranks)

    def machine(group: KvKind, launch: skinny.ProductLaunch) -> DeviceMachine:
        shared = (whole, launch, attentions[group])
        made = LayerContext.on(loaded.config.device, loaded.decoder(group), *shared)
        sharing = sharers if loaded.decoder(group).experts else alone  # of dense layers each rank has all
        return DeviceMachine(replace(made, uniform_experts=loaded.uniform_experts, sharers=sharing))

    if loaded.target.foreign is not None:
        return _foreign(loaded, attentions[KvKind.TARGET]), None, None
    with loaded.weights(KvKind.TARGET) as weights:
        kernels = machine(KvKind.TARGET, arithmetic.products)
        kernels = replace(
            kernels,
            copies=has_copies(loaded, KvKind.TARGET),
            adapted=loaded.adapted,
            spread=spread_experts(loaded, loaded.rank),
        )
        model = Decoder(loaded.target, weights, kernels)
    if loaded.uniform_experts:
        log = logging.getLogger("eyas.engine")
        log.warning("chance chooses experts (--uniform-experts): answers mean nothing")
    if loaded.head is None:
        return model, None, None
    kind, group = head_family(loaded.head.algorithm), KvKind.DRAFT if loaded.drafts_here else KvKind.TARGET
    beside = machine(group, arithmetic.drafts)
    if loaded.drafts_here:
        copies, adapted = has_copies(loaded, KvKind.DRAFT), loaded.head_adapted
        beside = replace(beside, copies=copies, adapted=adapted, adapted_of=OF_HEAD)
    with loaded.weights(KvKind.DRAFT) as weights:
        tap = kind.load_tap(loaded.head, weights, model.final_norm, beside)
        if not loaded.drafts_here:
            return model, tap, None
        return model, tap, load_draft(loaded.head, weights, model.ends, beside)


def _foreign(loaded: EngineSpec, attention: RowAttention) -> DecoderModel[ForwardRows]:
    """The target, if transformers computes it."""
    target, config = loaded.target, loaded.config
    sizes = target.context_length, target.head_dim
    pages = DevicePages(attention, *sizes, device=config.device, pdl=pdl_of(config))
    return foreign_model(target, loaded.placement, pages)


def _synthetic(loaded: EngineSpec) -> torch.Tensor | None:
    """The rates by which drafts are accepted, if chance decides."""
    if not loaded.synthetic_rates:
        return None
    log = logging.getLogger("eyas.engine")
    log.warning("drafts are accepted by chance (synthetic acceptance): answers mean nothing")
    return torch.tensor(loaded.synthetic_rates, device=loaded.config.device)


def _warm_up(executor: StepExecutor, shapes: Iterable[StepShape]) -> float:
    """Run steps of padding: loads and compiles what they need; seconds of the slowest when it is warm."""
    slowest = 0.0
    for shape in shapes:
        for brief in (True, False):
            began = time.monotonic()
            program = executor.rehearse(shape, brief=brief)
            prompts = executor.state.prompts
            if shape.chunk and prompts is not None and (spans := prompts.made_up(shape.chunk)):
                executor.rehearse(shape, spans=spans, brief=brief)
        slowest = max(slowest, time.monotonic() - began)
    if executor.state.state_layers:
        executor.rehearse_arrival()
    if executor.state.drafter is not None:
        executor.rehearse_join(program)
        if executor.state.drafter.adaptive:
            for size in catch_up_sizes(executor.tables.padding_slot):
                executor.rehearse_catch_up(size, executor.tables.sizes.width)
    return slowest


def _windows(loaded: EngineSpec) -> DeviceWindows | None:
    """The windows of features for draft workers, if they may go from GPU to GPU. Memory as of `_ring`."""
    if loaded.head is None or not from_gpu_to_gpu(loaded):
        return None
    sizes = loaded.config.max_running + 1, loaded.config.speculation.deepest + 1
    return DeviceWindows(*sizes, loaded.head.feature_width, loaded.placement.dtype, loaded.config.device)


def _ring(loaded: EngineSpec, tables: SlotTables, tap: FeatureTap) -> FeatureRing | None:
    """The ring in which plain rounds leave rows to a draft head. Its memory is taken before that of pages."""
    if not loaded.config.speculation.adaptive:
        return None
    return FeatureRing(tables, len(tap.layers) * loaded.target.hidden_size, loaded.placement.dtype)
