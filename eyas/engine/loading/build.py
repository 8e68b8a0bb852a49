"""Builds an engine from its configuration: loads, allocates, warms up, and says what it serves.

The composition root of an engine process. Which engine depends on the roles: draft alone is a
`DraftEngine`; everything else runs the target model, and drafts by itself (with the draft role, or where
prompts are computed for others), through draft workers, or not at all.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.machine.gpus import number_of
from eyas.common.model_folder import model_name
from eyas.common.params import SamplingParams
from eyas.common.prompt_room import LEAST_ROWS, STEP_GRAIN, beside
from eyas.common.step_times import StepRates
from eyas.common.tokenizers.source import tokenizer_digest
from eyas.common.types import GenerationRequest, KvKind, Role
from eyas.common.wire.control import MemoryTag
from eyas.engine.adapters.table import AdapterTable
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.batch.page_table import PageTable
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.formats.adapted import Adapted
from eyas.engine.grammar.grammars import GrammarManager
from eyas.engine.ipc.link import EngineLink
from eyas.engine.ipc.messages import EngineReady
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.ipc.pulse import Beat, EngineHeartbeat
from eyas.engine.kv.leases import LeaseTable
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.kv.pulls import PullManager
from eyas.engine.kv.stager import PageStager
from eyas.engine.kv.states import NO_STATE, PagesAndStates, StateSlots
from eyas.engine.layers.adapted import PlainAdapters
from eyas.engine.layers.linear import Linear
from eyas.engine.loading import follower
from eyas.engine.loading.attention_ranks import attention_ranks
from eyas.engine.loading.device_build import build_device, rounds_ahead
from eyas.engine.loading.draft_build import draft_worker, plain_machine, plain_runner
from eyas.engine.loading.draft_channels import decode_channels, gpu_of
from eyas.engine.loading.host_cache import check_host_cache, host_loads
from eyas.engine.loading.rank_replacement import LeaderReplacement
from eyas.engine.loading.replacement import WeightReplacement
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.startup import EngineStart
from eyas.engine.loading.step_rates import StepLimits, context_of_a_row, fastest_chunk, measure
from eyas.engine.loading.travel import PageTransfer, travel
from eyas.engine.loading.weight_sources import WeightSources
from eyas.engine.loading.weight_store import EngineWeights, FixedWeights, Replacement
from eyas.engine.loop.control import MemoryParts
from eyas.engine.loop.engine import Engine, EngineParts
from eyas.engine.loop.expert_balance import ExpertBalance
from eyas.engine.loop.forwards import LocalForward, StepForward
from eyas.engine.loop.plain_runner import PlainRunner
from eyas.engine.loop.runner import StepRunner
from eyas.engine.loop.spread_ranks import LeaderSpread, RankSpread
from eyas.engine.models.base import AdaptedDraftModel, DecoderModel, FeatureTap
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.foreign.build import foreign_model
from eyas.engine.models.foreign.pages import PlainPages
from eyas.engine.models.heads import head_family
from eyas.engine.models.ops.torch_ops import TorchMachine
from eyas.engine.parallel.leader import LOAD_S, START_S, RankLeader
from eyas.engine.scheduling.adapter_turns import AdapterTurns
from eyas.engine.scheduling.limits import GPU_YIELD, BatchLimits, PromptYield
from eyas.engine.scheduling.page_tables import most_rows
from eyas.engine.scheduling.ranked import DataParallelScheduler, RankView, Schedulers
from eyas.engine.scheduling.scheduler import Scheduler
from eyas.engine.scheduling.turns import StepRoom
from eyas.engine.speculation.depth_pacing import DepthPacing, pacing_of
from eyas.engine.speculation.draft_worker.draft_engine import DraftEngine, DraftParts
from eyas.engine.speculation.draft_worker.draft_runner import DraftRunner
from eyas.engine.speculation.drafters.base import Drafter
from eyas.engine.speculation.drafters.colocated import ColocatedDrafter
from eyas.engine.speculation.drafters.lookup import LookupDrafter
from eyas.engine.speculation.drafters.remote import RemoteDrafter
from kv_transfer.backends.table import NONE
from kv_transfer.host_files import new_path, own_prefix, sweep
from kv_transfer.layout import pages_for
from kv_transfer.owner import LeaseOwner

ROOM, DRAFTING = 40.0, 32.0
"""Rows without context that a CPU's step has room for, and sequences without context from which on it has no
drafts: a draft costs it as much as a token of another sequence, which is certain.
"""

YIELD_TIMES = 10.0
"""On a CPU a prompt yields to shorter ones that arrive within this many times its own compute time."""

PLAIN_PAGES = 2048
"""Of the torch backend, where no option says how many: it is a specification, whatever the device."""

_log = logging.getLogger("eyas.engine")


def build_engine(
    config: EngineConfig, link: EngineLink, start: EngineStart | None = None
) -> Engine | DraftEngine:
    """Load and warm an engine for `config.roles`. Raises ConfigError in one sentence if that cannot work."""
    start, pulse = start or EngineStart(), EngineHeartbeat(link)
    sweep(Path(config.pool_dir))
    _check_device(config)
    check_host_cache(config)
    _check_transfer(config)
    _check_attention_ranks(config)
    if config.device != "cpu":
        torch.cuda.set_device(number_of(config.device))  # of this thread: kernels run on the current device
    if config.num_pages is None and config.attention_backend == "torch":
        config = dataclasses.replace(config, num_pages=PLAIN_PAGES)
    loaded = EngineSpec.of(config, epoch=secrets.randbits(63))
    loaded = dataclasses.replace(loaded, leader=own_prefix(Path(config.pool_dir)))
    if loaded.target.quantized is not None:
        _log.info("weights: %s", loaded.target.quantized)
    if config.kv_cache_dtype != "auto" and not config.only_drafts:
        shape = loaded.with_pages(1).shape(KvKind.TARGET)
        each = len(loaded.groups) * shape.page_bytes // shape.page_size
        _log.info("KV: %s, %d bytes a token", config.kv_cache_dtype, each)
    _log_windows(loaded)
    _log_states(loaded)
    if config.only_drafts:
        drafting = _draft_parts(loaded, start, pulse)
        _log.info(start.phases.summary())
        return DraftEngine(drafting, link, pulse)
    if config.attention_backend == "torch":
        return Engine(_parts(loaded, _plain_core(loaded, pulse)), link, pulse)
    loaded, core = _device_core(loaded, start)
    parts = _parts(loaded, core)
    _log.info(start.phases.summary())
    return Engine(parts, link, pulse)


def _log_windows(loaded: EngineSpec) -> None:
    """Says what windows save, or why they save nothing."""
    if loaded.windowed:
        kinds = sum(group.windowed for group in loaded.groups)
        text = "KV: pages behind a window are freed, in %d of %d groups of layers"
        _log.info(text, kinds, len(loaded.groups))
    elif any(group.windowed for group in loaded.target.kv_groups) and not loaded.config.only_drafts:
        _log.info("KV: pages behind windows stay: %s", loaded.windows_ignored)


def _log_states(loaded: EngineSpec) -> None:
    """Says what the slots of states take."""
    if loaded.states is not None:
        each, slots = loaded.states.slot_bytes / 2**20, loaded.state_slots
        text = "states: %d slots (--state-slots) of %.1f MiB, %.1f GiB in all"
        _log.info(text, slots, each, slots * each / 2**10)


def _check_device(config: EngineConfig) -> None:
    if config.device == "cpu":
        return
    if not torch.cuda.is_available():
        message = f"--device: {config.device} is not available: PyTorch sees no GPU here"
        raise ConfigError(message, param="device")
    first, ranks = number_of(config.device), config.device_ranks
    if (there := torch.cuda.device_count()) < first + ranks:
        flag = "tensor-parallel-size" if config.dp_attention == 1 else "dp-attention"
        message = f"--{flag}: {ranks} GPUs from number {first} on, of {there}"
        raise ConfigError(message, param=flag)


def _check_transfer(config: EngineConfig) -> None:
    if config.transfer == NONE and set(config.roles) != set(Role):
        text = "--transfer: none, but only a worker with all roles needs no other's pages"
        raise ConfigError(text, param="transfer")


def _check_attention_ranks(config: EngineConfig) -> None:
    flag = "dp-attention"
    if config.dp_attention == 1:
        return
    if config.only_drafts:
        raise ConfigError(f"--{flag}: a draft worker is one process (--{flag} 1)", param=flag)
    if config.attention_backend != "torch" and config.transfer != NONE:
        text = "pages of attention ranks on GPUs do not travel (all --roles, and --transfer none)"
        raise ConfigError(f"--{flag}: {text}", param=flag)


@dataclass(frozen=True)
class _StepCore:
    """The runner of steps, and the parts of it that the scheduler needs. Pools: target first."""

    runner: StepRunner
    grammars: GrammarManager
    pools: tuple[KvPool, ...]
    drafter: Drafter | None
    pacing: DepthPacing | None
    limits: BatchLimits
    slowest_step_s: float
    rates: StepRates | None
    replacement: Replacement
    memory: MemoryParts
    adapters: AdapterTable | None
    balance: ExpertBalance | None


def _plain_core(loaded: EngineSpec, beat: Beat) -> _StepCore:
    config, target = loaded.config, loaded.target
    _log.info("arithmetic: %s (plain torch)", config.arithmetic)
    pool = loaded.pool(KvKind.TARGET)
    model, forward, leader = _plain_model(loaded, pool, beat)
    draft_runner = None
    if loaded.drafts_here:
        assert isinstance(model, Decoder)
        draft_runner = plain_runner(loaded, model.ends, plain_machine(loaded, beat))
    pools = (pool,) if draft_runner is None else (pool, draft_runner.pool)
    grammars = _grammars(loaded)
    tap = _tap(loaded, model) if loaded.head and isinstance(model, Decoder) else None
    runner = PlainRunner(model, pools, forward, tap, grammars, beat)
    drafter = _drafter(loaded, draft_runner)
    round_rows = loaded.round_rows if drafter else 1
    slowest = _warm_up(runner, pool, config)
    return _StepCore(
        runner=runner,
        grammars=grammars,
        pools=pools,
        drafter=drafter,
        pacing=pacing_of(config) if drafter else None,
        limits=BatchLimits(
            config.page_size,
            config.max_running,
            config.chunk_tokens,
            round_rows,
            room=StepRoom(ROOM, DRAFTING, context_of_a_row(target)),
            yields=PromptYield(config.chunk_tokens / (YIELD_TIMES * slowest)),
        ),
        slowest_step_s=slowest,
        rates=_rates(runner, config, StepLimits(8, 64, min(512, target.context_length), loaded.state_slots)),
        replacement=_replacement(loaded, model, leader),
        balance=_balance(model, leader),
        adapters=_plain_adapters(loaded, model, draft_runner),
        memory={MemoryTag.KV_CACHE: pools, **({MemoryTag.WEIGHTS: ()} if config.device == "cpu" else {})},
    )


def _plain_adapters(
    loaded: EngineSpec, model: DecoderModel[ForwardBatch], runner: DraftRunner | None
) -> AdapterTable | None:
    """The slots of adapters, if there are some."""
    if not loaded.config.max_loras:
        return None
    assert isinstance(model, Decoder)
    products = list(model.projections)
    if runner is not None and loaded.head_adapted is not Adapted.NOTHING:
        products += cast(AdaptedDraftModel[ForwardBatch], runner.head).projections
    return AdapterTable(PlainAdapters(loaded.adapter_reader, products, loaded.config.max_loras))


def _plain_model(
    loaded: EngineSpec, pool: KvPool, beat: Beat
) -> tuple[DecoderModel[ForwardBatch], StepForward, RankLeader | None]:
    """The model here, and what computes steps: it alone, or with other ranks and their leader."""
    if loaded.config.dp_attention > 1:
        return attention_ranks(loaded, pool, beat)
    backend = loaded.backend(KvKind.TARGET, beat)
    if loaded.target.foreign is not None:
        foreign = foreign_model(loaded.target, loaded.placement, PlainPages(backend))
        return foreign, LocalForward(foreign, pool, backend), None
    with loaded.weights(KvKind.TARGET) as weights:
        machine = TorchMachine(loaded.target, backend, adapted=loaded.adapted)
        model = Decoder(loaded.target, weights, machine)
    return model, LocalForward(model, pool, backend), None


def _device_core(loaded: EngineSpec, start: EngineStart) -> tuple[EngineSpec, _StepCore]:
    """The fast path of a GPU; `loaded` with as many pages as fit."""
    leader = None
    if loaded.config.device_ranks > 1:
        with start.phases("ranks"):
            ranks, first = loaded.config.device_ranks, loaded.of_rank(0)
            meeting = new_path("meeting", Path(first.config.pool_dir))
            leader = RankLeader(partial(follower.main, loaded), ranks, meeting)
            leader.meet(first.config.device, START_S, LOAD_S)
        loaded = first
    grammars = _grammars(loaded)
    if loaded.config.device == "cuda":
        grammars.prepare()
    loaded, device = build_device(loaded, start, grammars, leader)
    config = loaded.config
    with start.phases("rates"):
        length = loaded.target.context_length
        most = StepLimits(config.max_running, config.chunk_tokens, length, loaded.state_slots)
        chunk = config.chunk_tokens
        if config.device != "cpu" and Role.PREFILL in config.roles:
            chunk = fastest_chunk(device.runner, config, most)
        config = dataclasses.replace(config, chunk_tokens=chunk)
        rates = _rates(device.runner, config, most, STEP_GRAIN)
    limits = BatchLimits(
        config.page_size,
        config.max_running,
        config.chunk_tokens,
        loaded.round_rows,
        rounds_ahead=rounds_ahead(loaded),
        mixed_prefill_budget=_prompt_rows(device.runner.prompt_rows, config, most.rows),
        long_prompt_rows=device.runner.long_prompt_rows,
        yields=GPU_YIELD,
    )
    elsewhere = loaded.head is not None and not loaded.drafts_here
    drafter = _drafter(loaded, None) if elsewhere else None
    pacing = pacing_of(config) if drafter else device.pacing
    return loaded, _StepCore(
        runner=device.runner,
        grammars=grammars,
        pools=device.pools,
        drafter=drafter,
        pacing=pacing,
        limits=limits,
        slowest_step_s=device.slowest_step_s,
        rates=rates,
        adapters=None if device.adapters is None else AdapterTable(device.adapters),
        memory=device.memory,
        replacement=_replacement(loaded, device.model, leader),
        balance=_balance(device.model, leader),
    )


def _prompt_rows(
    rows: Callable[[int, bool], int], config: EngineConfig, most: int
) -> Callable[[int, bool], int]:
    """As `rows` of steps that have up to `most`, but where many prompt tokens wait as many fewer as those of
    `config` have that also decode.
    """
    chunk = config.chunk_tokens
    spare = beside(most) - beside(chunk) if config.mixed_tokens else most - chunk
    if not spare:
        return rows
    return lambda rounds, many: max(rows(rounds, many) - spare * many, LEAST_ROWS)


def _grammars(loaded: EngineSpec) -> GrammarManager:
    target = loaded.target
    return GrammarManager(loaded.config.texts.folder, target.vocab_size, target.eos_token_ids)


def _rates(runner: StepRunner, config: EngineConfig, most: StepLimits, grain: int = 1) -> StepRates | None:
    """Measured where a router may ask: of workers that compute prompts and decode, and exchange pages.

    An interpreted device is not asked.
    """
    both = {Role.PREFILL, Role.DECODE} <= set(config.roles)
    interpreted = config.device == "cpu" and config.attention_backend != "torch"
    if not both or interpreted or config.transfer == NONE:
        return None
    return measure(runner, config, most, grain)


def _parts(loaded: EngineSpec, core: _StepCore) -> EngineParts:
    """The engine around its core: scheduler, leases, pulls."""
    config, pools = loaded.config, core.pools
    context = _longest(loaded, core.limits)
    outbox = EventOutbox()
    moves = travel(loaded, dict(zip(KvKind, pools, strict=False)), outbox)
    new_id = moves.board.new_id if moves.board is not None else partial(secrets.randbits, 63)
    owner = LeaseOwner(config.worker, loaded.epoch, config.lease_s, new_id)
    pulls, ranks = moves.pulls[KvKind.TARGET], config.tensor_parallel_size
    scheduler = _scheduler(loaded, core, pulls)
    leases = LeaseTable(owner, scheduler.pool, config.page_size, moves.layouts, outbox, ranks, moves.board)
    return EngineParts(
        config=config,
        model=loaded.target,
        runner=core.runner,
        pools=pools,
        scheduler=scheduler,
        drafter=core.drafter,
        pacing=core.pacing,
        leases=leases,
        stager=PageStager(moves.outlets, leases.covers, outbox),
        pulls=pulls,
        draft_pulls=moves.pulls.get(KvKind.DRAFT),
        copiers=tuple(moves.copiers.values()),
        bell=moves.bell,
        travels=moves.possible,
        memory=core.memory,
        outbox=outbox,
        grammars=core.grammars,
        ready=_ready(loaded, moves, context, core.slowest_step_s, core.rates),
        store=EngineWeights(loaded, core.replacement, WeightSources(config.device)),
        adapters=core.adapters,
        balance=core.balance,
    )


def _balance(model: DecoderModel[Any], leader: RankLeader | None) -> ExpertBalance | None:
    """The balance of ranks' experts, if these may have replicas."""
    own = RankSpread.of(model)
    return None if own is None or leader is None else ExpertBalance(LeaderSpread(own, leader))


def _replacement(loaded: EngineSpec, model: DecoderModel[Any], leader: RankLeader | None) -> Replacement:
    """How the target's weights change, or why they do not. `leader`: of ranks that share the model."""
    if not isinstance(model, Decoder):
        return FixedWeights("transformers computes this model")
    own = WeightReplacement(loaded, model)
    return own if leader is None else LeaderReplacement(own, leader)


def _scheduler(loaded: EngineSpec, core: _StepCore, pulls: PullManager) -> Schedulers:
    """Builds one scheduler, or one for each attention rank, with an equal share of the pool's pages."""
    config, groups = loaded.config, loaded.groups
    ranks, pools, holds = config.dp_attention, core.pools, core.grammars.holds
    each, states = _pages_of_rank(loaded), None
    pages = [PagePool(each, each * rank) for rank in range(ranks)]
    if loaded.states is not None:
        states = StateSlots(loaded.state_slots)
        pages = [PagesAndStates(each, states, pools[0].shape.slot_pages)]
    lookahead = len(pools) - 1
    caches = [
        PrefixCache(own, config.page_size, lookahead=lookahead, groups=groups, states=states) for own in pages
    ]
    if ranks == 1:
        host = host_loads(loaded, pools, pages[0], caches[0], core.slowest_step_s)
        scheduler = Scheduler(pages[0], caches[0], core.limits, pulls, host, holds)
        if core.adapters is not None:
            scheduler.adapters = AdapterTurns(core.adapters)
        return scheduler
    return DataParallelScheduler(
        [
            Scheduler(pages[rank], caches[rank], core.limits, RankView(pulls, rank), holds=holds)
            for rank in range(ranks)
        ]
    )


def _pages_of_rank(loaded: EngineSpec) -> int:
    """Pages of one rank: as many as are configured, for each group of layers."""
    assert loaded.config.num_pages is not None, "it is known once there is a pool"
    return loaded.config.num_pages * len(loaded.groups)


def _longest(loaded: EngineSpec, limits: BatchLimits) -> int:
    """Tokens of the longest request that context and pool can hold.

    Warns of a pool that one of full length does not fit into; refuses one for hardly any request.
    """
    pages, context_length = _pages_of_rank(loaded), loaded.target.context_length
    longest, size = most_rows(pages, loaded.groups, limits), limits.page_size
    if longest < size:
        least = pages_for(size + limits.rows_ahead, size)
        message = f"--num-pages: {pages} cannot hold one page of a request; it takes {least}"
        raise ConfigError(message, param="num-pages")
    if longest < context_length:
        text = "%d KV pages (--num-pages) hold a request of %d tokens, prompt and answer; the context has %d"
        _log.warning(text, pages, longest, context_length)
    return min(longest, context_length)


def _draft_parts(loaded: EngineSpec, start: EngineStart, beat: Beat) -> DraftParts:
    if loaded.head is None:
        raise ConfigError("--draft: a draft worker needs a draft head (--draft DIR)", param="draft")
    worker = draft_worker(loaded, start, beat)
    pool, outbox = worker.runner.pool, EventOutbox()
    moves = travel(worker.loaded, {KvKind.DRAFT: pool}, outbox)
    return DraftParts(
        config=worker.loaded.config,
        runner=worker.runner,
        pool=PagePool(pool.shape.pages),
        pulls=moves.pulls[KvKind.DRAFT],
        copier=moves.copiers[KvKind.DRAFT],
        bell=moves.bell,
        outbox=outbox,
        ready=_ready(worker.loaded, moves, loaded.target.context_length, worker.slowest_step_s),
        gpu=gpu_of(worker.loaded),
        mailed=worker.mailed,
    )


def _tap(loaded: EngineSpec, model: Decoder[Linear]) -> FeatureTap:
    assert loaded.head is not None
    with loaded.weights(KvKind.DRAFT) as weights:
        kind = head_family(loaded.head.algorithm)
        return kind.load_tap(loaded.head, weights, model.final_norm, model.machine)


def _drafter(loaded: EngineSpec, draft_runner: DraftRunner | None) -> Drafter | None:
    """The drafter of this engine: a head here or far away, beside it the lookup, or that alone."""
    spec = loaded.config.speculation
    head: Drafter | None = None
    if draft_runner is not None:
        head = ColocatedDrafter(draft_runner)
    elif loaded.head is not None:  # draft workers may come at any time
        head = RemoteDrafter(spec, loaded.target.vocab_size, decode_channels(loaded))
    return LookupDrafter(spec, head) if loaded.config.speculates else None


def _ready(
    loaded: EngineSpec,
    moves: PageTransfer,
    context_length: int,
    slowest: float,
    rates: StepRates | None = None,
) -> EngineReady:
    config, target, head = loaded.config, loaded.target, loaded.head
    return EngineReady(
        epoch=loaded.epoch,
        model=model_name(config.model),
        fingerprint=target.fingerprint,
        draft_fingerprint=head.fingerprint if head else "",
        context_length=context_length,
        vocab_size=target.vocab_size,
        pages_total=_pages_of_rank(loaded) * config.dp_attention,
        pools=moves.infos,
        files=moves.files,
        slowest_step_s=slowest,
        draft_width=head.feature_width if head else 0,
        synthetic=bool(loaded.synthetic_rates) or loaded.uniform_experts,
        rates=rates,
        arithmetic=config.arithmetic,
        staged=bool(moves.outlets),
        tokenizer=tokenizer_digest(config.texts.folder),
    )


def _warm_up(runner: PlainRunner, pool: KvPool, config: EngineConfig) -> float:
    """Run the largest prompt chunk of each rank, and a decode row; seconds of the slower step. Pages are not
    owned yet.
    """
    each, size = pool.shape.pages // config.dp_attention, pool.page_size
    rows = min(config.chunk_tokens, each * size, runner.model.config.context_length)
    request = GenerationRequest("warm-up", (0,) * rows, SamplingParams())
    generation = Generation(request, 0, GenerationKind.LOCAL, 0.0, 0.0)
    sequences = [Sequence(rank, generation, 0, request.prompt_ids, []) for rank in range(config.dp_attention)]
    for rank, seq in enumerate(sequences):
        pages = list(range(each * rank, each * rank + pages_for(rows, size)))
        seq.tables = [PageTable(pages) for _ in pool.shape.groups or (None,)]
        seq.state = 0 if pool.states is not None else NO_STATE
    slowest = 0.0
    for tokens in (1, rows):
        began = time.monotonic()
        runner.launch([SequenceWork(seq, 0, [0] * tokens, None, sample=True) for seq in sequences])
        slowest = max(slowest, time.monotonic() - began)
    return slowest
