"""Loads what a draft worker runs: a draft head without its target, in plain torch or on a device.

Of the target it takes the two ends, embedding and output head, which most heads share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import KvKind
from eyas.engine.adapters.reader import OF_HEAD
from eyas.engine.attention.device import row_attention
from eyas.engine.attention.rows import RowLimits
from eyas.engine.batch.tables import SlotTables
from eyas.engine.device.buckets import default_batches
from eyas.engine.ipc.pulse import Beat, no_pulse
from eyas.engine.ipc.row_ring import RingRow
from eyas.engine.kernels.launch.recording import GraphRecorder
from eyas.engine.kernels.products import skinny
from eyas.engine.loading.copies import has_copies
from eyas.engine.loading.device_build import table_sizes
from eyas.engine.loading.draft_channels import from_gpu_to_gpu
from eyas.engine.loading.memory import DeviceMemory, MemoryDemand, pool_pages
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.startup import EngineStart
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.heads import load_draft
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.ops.device_step import LayerContext
from eyas.engine.models.ops.machine import Machine
from eyas.engine.models.ops.torch_ops import TorchMachine
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.ranks import RankInfo
from eyas.engine.speculation.device import DeviceProposer
from eyas.engine.speculation.draft_worker.device_runner import DeviceDraftRunner
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftInput, DraftRunner
from eyas.engine.speculation.draft_worker.draft_sequences import BatchRunner
from eyas.engine.speculation.draft_worker.mailed_rounds import MailedRounds
from eyas.engine.speculation.draft_worker.seats import DraftSeats, DraftState
from eyas.engine.speculation.drafters.channels import mail_place, may_mail
from kv_transfer.layout import pages_for


@dataclass(frozen=True)
class DraftWorker:
    """`loaded`: with as many pages as fit. `mailed`: where a device may take rounds from mailboxes by itself.
    `slowest_step_s`: of the warm-up's batches; 0.0 without one.
    """

    loaded: EngineSpec
    runner: BatchRunner
    mailed: MailedRounds | None = None
    slowest_step_s: float = 0.0


def draft_worker(loaded: EngineSpec, start: EngineStart | None = None, beat: Beat = no_pulse) -> DraftWorker:
    """`beat`: of the engine. Raises ConfigError if the head, or any page, does not fit."""
    if loaded.config.attention_backend == "torch":
        machine = plain_machine(loaded, beat)
        return DraftWorker(loaded, plain_runner(loaded, _ends(loaded, machine), machine))
    if loaded.config.tensor_parallel_size > 1:
        flag = "tensor-parallel-size"
        raise ConfigError(f"--{flag}: a draft worker has one GPU", param=flag)
    return _device_worker(loaded, start or EngineStart())


def _ends(loaded: EngineSpec, machine: Machine[Any]) -> ModelEnds:
    """The target's; of nothing for a drafter that reads nothing of the target."""
    assert loaded.head is not None
    if not loaded.head.capture_layers:
        return ModelEnds(torch.empty(0), None)
    with loaded.weights(KvKind.TARGET) as weights:
        return ModelEnds.load(loaded.target, weights, machine)


def plain_machine(loaded: EngineSpec, beat: Beat) -> TorchMachine:
    """The machine of a head's own layers in plain torch. `beat`: of the engine."""
    assert loaded.head is not None
    backend = loaded.backend(KvKind.DRAFT, beat)
    return TorchMachine(loaded.head.decoder, backend, adapted=loaded.head_adapted, adapted_of=OF_HEAD)


def plain_runner(loaded: EngineSpec, ends: ModelEnds, machine: TorchMachine) -> DraftRunner:
    """The head in plain torch, with a pool of its own."""
    assert loaded.head is not None
    with loaded.weights(KvKind.DRAFT) as weights:
        head = load_draft(loaded.head, weights, ends, machine)
    return DraftRunner(head, loaded.pool(KvKind.DRAFT), machine.backend)


def _device_worker(loaded: EngineSpec, start: EngineStart) -> DraftWorker:
    """A draft worker with the tables, kernels and head of a target engine's steps, and of the target only the
    ends.
    """
    with start.phases("weights"):
        loaded, state = draft_state(loaded)
    config, slowest = loaded.config, 0.0
    seats, sizes, spec = DraftSeats(state.tables.padding_slot), batch_sizes(config), config.speculation
    runner = DeviceDraftRunner(state, seats, sizes)
    mailed = None
    if from_gpu_to_gpu(loaded) and may_mail(spec):
        mailed = MailedRounds(state, seats, mail_place(spec), sizes)
    if config.device != "cpu":  # an interpreted device has nothing to compile, to load or to capture
        with start.phases("kernels"):
            start.wait_for_kernels()
        with start.phases("capture"):
            recorder = GraphRecorder()
            runner.capture(recorder)
            if mailed is not None:
                mailed.capture(recorder)
            slowest = warm_up(runner, state.width, spec)
    return DraftWorker(loaded, runner, mailed, slowest)


def draft_state(loaded: EngineSpec) -> tuple[EngineSpec, DraftState]:
    """Builds the state that all batches share; gives `loaded` with as many pages as fit, if it did not say
    how many.
    """
    assert loaded.head is not None
    config, decoder, spec = loaded.config, loaded.head.decoder, loaded.config.speculation
    width = loaded.head.feature_width
    pdl = config.device != "cpu"
    tables = SlotTables(table_sizes(loaded), config.device)
    launch = skinny.ProductLaunch.on(config.device, pdl=pdl)
    most = RowLimits(config.max_running, max(loaded.width, spec.topk))
    shape = loaded.with_pages(1).shape(KvKind.DRAFT)
    attention = row_attention(tables.pages, decoder.num_heads, shape, most, pdl=pdl)
    group = ProcessGroup(RankInfo(), config.device)
    context = LayerContext.on(config.device, decoder, group, launch, attention)
    machine = DeviceMachine(context, copies=has_copies(loaded, KvKind.DRAFT))
    ends = _ends(loaded, machine)
    with loaded.weights(KvKind.DRAFT) as weights:
        head = load_draft(loaded.head, weights, ends, machine)
    if config.num_pages is None:
        loaded = loaded.with_pages(_pages(loaded))
    firsts = torch.zeros(tables.sizes.slots, dtype=torch.int32, device=config.device)
    pool = loaded.pool(KvKind.DRAFT)
    proposer = DeviceProposer(head, pool, tables, spec, pdl=pdl, firsts=firsts)
    return loaded, DraftState(proposer, tables, firsts, width, loaded.target.vocab_size)


def batch_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Batches of sequences that have a graph, as the rounds of a target engine have."""
    most = min(config.cuda_graph_max_bs, config.max_running)
    sizes = config.cuda_graph_bs or (default_batches(most) if most else ())
    return tuple(size for size in sizes if size <= config.max_running)


def warm_up(runner: DeviceDraftRunner, width: int, spec: SpeculationConfig) -> float:
    """Drafts for made-up sequences of one row, in pages without an owner: its feature comes from the host,
    then from a ring that does not exist. Seconds of the slower one when it is warm.
    """
    shape, behind = runner.pool.shape, runner.draft_rows(spec)
    slowest = 0.0
    for ringed in (0, 1):
        pages = range(pages_for(1 + behind, shape.page_size))
        features = torch.zeros(1 - ringed, width)
        new = DraftExtension(pages, 0, [0], features, ringed=[RingRow(0, 0)] * ringed)
        for _ in range(2):
            began = time.monotonic()
            runner.draft([DraftInput(ringed, new, SamplingParams(), choice=0)], spec)
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def _pages(loaded: EngineSpec) -> int:
    """The number of pages that fit beside the weights, and the logits and their softmax of the largest
    batches' graphs.
    """
    assert loaded.head is not None
    spec = loaded.config.speculation
    rows = loaded.config.max_running * (spec.topk if loaded.head.block is None else spec.steps)
    scores = 2 * 4 * rows * loaded.head.outputs
    config, page_bytes = loaded.config, loaded.with_pages(1).shape(KvKind.DRAFT).page_bytes
    demand = MemoryDemand(
        page_bytes=page_bytes,
        page_size=config.page_size,
        context_length=loaded.target.context_length,
        rows_ahead=loaded.round_rows,
        reserve=config.reserve_bytes + scores + page_bytes,  # and the page behind the pool
    )
    return pool_pages(DeviceMemory.measure(config.device), config.mem_fraction_static, demand)
