"""Every kernel that an engine or a draft worker of a configuration launches, for `kernels.launch.warm`.

The engine itself is the list: the same machine is put together on the device "meta", and steps of every shape
go through the same programs. So it is with a draft worker's head, and batches of every size. No weight is
read and no GPU is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from eyas.common.config import EngineConfig
from eyas.common.types import KvKind
from eyas.engine.batch.window import FIRST_ROWS
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.fp8 import scales_of
from eyas.engine.checkpoint.packed import PackedConfig
from eyas.engine.checkpoint.packed_numbers import PackedNumbers
from eyas.engine.checkpoint.quantized import Fp8Config, ScaledConfig
from eyas.engine.checkpoint.weights import Part, Shape, StoredFile, WeightSource
from eyas.engine.device.buckets import default_batches
from eyas.engine.device.executor import WORDS
from eyas.engine.device.program import StepProgram
from eyas.engine.device.runner import catch_up_sizes
from eyas.engine.device.special import SLICE
from eyas.engine.device.step import StepShape
from eyas.engine.formats.packed import in_order
from eyas.engine.kernels.drafts.forced import HEAD, draft_forced
from eyas.engine.kernels.drafts.rounds import FACTS
from eyas.engine.kernels.products.few import MOST_ROWS
from eyas.engine.kernels.products.skinny import MAX_ROWS
from eyas.engine.kernels.sampling.special import COLUMNS, mask_words
from eyas.engine.kernels.states.rings import remake
from eyas.engine.loading.arithmetic import prompts_of
from eyas.engine.loading.device_build import build_state
from eyas.engine.loading.draft_build import batch_sizes, draft_state
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.startup import StartPhases
from eyas.engine.loading.step_shapes import buckets_of, by_depth, captured, rehearsed, with_adapted
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.one_shot import OneShot
from eyas.engine.parallel.ranks import RankInfo
from eyas.engine.parallel.row_exchange import RowExchange
from eyas.engine.speculation.draft_worker.device_runner import BatchLayout, BatchMemory, BatchProgram
from eyas.engine.speculation.draft_worker.mailed_rounds import MailProgram, mail_wait
from eyas.engine.speculation.drafters.channels import mail_place, may_mail

NARROW_ROWS = (16, 32, 64, 128)
"""Rows of prompts by which products have kernels of their own. Steps with so few have no graph if the rows
are of many prompts, each of which goes on from a cache, or where no step with prompts has one.
"""


@torch.inference_mode()
def launches(config: EngineConfig) -> None:
    """Launches what an engine with `config`, for a GPU, may launch; its pages do not matter."""
    nowhere = dataclasses.replace(config, device="meta", num_pages=1)
    unread = MetaSpec.of(nowhere)
    warmed = unread.target.kv_format.latent or config.prefill_attention_backend != "flashinfer"
    prompts = prompts_of(unread) if warmed else None
    loaded, state = build_state(unread, _AbsentGroup(config.device_ranks), StartPhases(), prompts)
    state = dataclasses.replace(state, model=state.model.brief())
    inputs, results = (torch.empty(WORDS, dtype=torch.int32, device="meta") for _ in range(2))
    columns = len(COLUMNS) + mask_words(loaded.target.vocab_size)
    for shape in dict.fromkeys(_shapes(loaded)):
        program = StepProgram(state, shape, inputs, results)
        program.forward()
        if shape.chunk:  # also planned, where it may be, and scored
            planned = prompts is not None and prompts.plan(prompts.made_up(shape.chunk))
            rows = StepProgram(state, shape, inputs, results, planned).forward(every=True)
            state.slice_logits(rows, program.adapters, torch.empty(1, dtype=torch.int32, device="meta"))
        if shape.sampled:
            program.sample_special(torch.empty(min(shape.sampled, SLICE), columns, dtype=torch.int32))
            masks = torch.empty(1, mask_words(loaded.target.vocab_size), dtype=torch.int32)
            program.mask(masks[0, :1], masks)
        program.rest(program.choose())
    if loaded.width > 1:
        row = HEAD + state.tables.drafts.shape[1]
        draft_forced(state.tables, torch.empty(1, row, dtype=torch.int32, device="meta"))
    if state.tap is not None and state.tap.mails:
        slots, rows = (torch.empty(1, dtype=dtype, device="meta") for dtype in (torch.int32, torch.int64))
        program.mail(slots, rows, torch.empty(1, FACTS + FIRST_ROWS, dtype=torch.int32, device="meta"))
    if state.state_layers:
        remake(state.state_layers[:1], torch.empty(3, 1, dtype=torch.int32, device="meta"))
    if state.drafter is not None:
        drafter = state.drafter.of(adapted=True)
        features = program.features(torch.empty(1, dtype=torch.int64, device="meta")).float()
        for joining in default_batches(config.max_running):
            words = torch.empty(4, joining, dtype=torch.int32, device="meta")
            drafter.join(words, features.expand(joining, -1).contiguous(), loaded.width)
        for width in (buckets.width for buckets in by_depth(loaded).values()):
            for count in catch_up_sizes(config.max_running):
                drafter.catch_up(torch.empty(2, count, dtype=torch.int32, device="meta"), width)


class _AbsentGroup(ProcessGroup):
    """A group whose other ranks are not there: small sums have their kernel, joins have no values."""

    def __init__(self, ranks: int) -> None:
        super().__init__(RankInfo(), "meta")
        self.ranks = ranks
        if ranks > 1:
            addresses = torch.empty(ranks, dtype=torch.int64, device="meta")
            self._one_shot = OneShot(self.rank, addresses, pdl=True)

    def share_rows(self) -> None:
        self._rows = RowExchange(
            self.rank, torch.empty(self.ranks, dtype=torch.int64, device="meta"), pdl=True
        )

    def greet(self) -> None:
        pass

    def _collective(self, tensor: torch.Tensor) -> None:
        pass

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(self.ranks, *tensor.shape)

    def _collect(self, tensor: torch.Tensor, room: torch.Tensor) -> None:
        pass

    def _scatter(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        pass


def _shapes(loaded: EngineSpec) -> Iterator[StepShape]:
    """The step shapes of a start, and others, for which there may be no graph; each also with adapters, where
    there may be some.
    """
    yield from captured(loaded)
    yield from with_adapted(loaded, _without_graphs(loaded))


def _without_graphs(loaded: EngineSpec) -> Iterator[StepShape]:
    """The shapes that a start rehearses; rounds and prompts of any size; rounds of any number beside prompts
    too: they attend apart from those.
    """
    for buckets in by_depth(loaded).values() or (buckets_of(loaded),):
        width = buckets.width
        yield from rehearsed(loaded, buckets)
        few = MAX_ROWS + 1
        for batch in default_batches(loaded.config.max_running):
            singles = batch if width > 1 else 0
            yield StepShape(batch, width)
            yield StepShape(batch, width, few, -(-few // buckets.tile_rows), 1, singles)
            if singles:
                yield StepShape(0, width, singles=batch)
        for rows in (*NARROW_ROWS, *wide_rows(loaded.target, loaded.config)):
            yield StepShape(0, width, rows, -(-rows // buckets.tile_rows), 1)


def wide_rows(decoder: ModelConfig, config: EngineConfig) -> Iterator[int]:
    """Rows of prompts: the fewest of a wide step; in FP8 of a narrow one too; up to a chunk, a fourth more
    each time where tiles are chosen by rows, and twice as many where rows are put in order by their adapters.
    """
    rows, most = MAX_ROWS + 1, config.chunk_tokens
    yield rows
    in_fp8 = isinstance(decoder.quantized, Fp8Config)
    if in_fp8:
        yield 2 * MOST_ROWS  # a bucket of tiles that `few` does not take
    if in_fp8 or decoder.experts:
        while (rows := rows + rows // 4) < most:
            yield rows
    if config.max_loras and not config.deterministic:
        rows = 2 * MAX_ROWS
        while (rows := 2 * rows) < most:
            yield rows


class MetaSpec(EngineSpec):
    """An engine whose tensors have the shapes of its folders, and no memory."""

    @contextlib.contextmanager
    def weights(self, group: KvKind, file: StoredFile | None = None) -> Iterator[WeightSource]:
        here = EngineSpec(dataclasses.replace(self.config, device="cpu"), self.target, self.head, self.epoch)
        with here.weights(group) as named:
            yield MetaWeights(named)


class MetaWeights(WeightSource):
    """Tensors on the device "meta" under the names of `named`, whose values are not asked for.

    Integers are zeros, since loading looks at them.
    """

    def __init__(self, named: WeightSource) -> None:
        super().__init__(dataclasses.replace(named.placement, device="meta"), named.quantized)
        self._named = named
        self._packed: PackedNumbers | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def is_quantized(self, name: str) -> bool:
        return self._named.is_quantized(name)

    def is_packed(self, name: str) -> bool:
        return self._named.is_packed(name)

    def _load_packed(self, name: str, shape: Shape, part: Part) -> PackedNumbers:
        """Numbers like the first ones, which are read: all are of their types, and have zero points if they
        have.
        """
        self._packed = self._packed or in_order(self._named.take_packed(name, shape, None))
        assert isinstance(self.quantized, PackedConfig)
        first, each = self._packed, self.quantized.group or shape[1]
        sizes = shape[0], shape[1] // each
        numbers = torch.empty(shape, dtype=first.numbers.dtype, device="meta")
        scales = torch.empty(sizes, dtype=first.scales.dtype, device="meta")
        zeros = first.zeros
        if not isinstance(zeros, int):
            zeros = torch.empty(sizes, dtype=zeros.dtype, device="meta")
        values, factor = (None if each is None else each.to("meta") for each in (first.values, first.factor))
        groups = None if first.groups is None else first.groups.new_empty(shape[1], device="meta")
        return PackedNumbers(numbers, zeros, scales, groups, values, factor).part(*part)

    def _row_scale(self, name: str) -> float:
        return 1.0

    def _load_stored(
        self, name: str, shape: Shape, part: Part, scales: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(self.quantized, ScaledConfig)
        dtype = getattr(torch, self.quantized.dtype)
        stored = torch.empty(shape, dtype=dtype, device="meta")[part]
        scale = torch.empty(scales_of(shape, self.quantized.weights), device="meta")[scales]
        return stored.contiguous(), scale.contiguous()

    def _load(self, name: str, shape: Shape, part: Part, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.zeros(shape, dtype=dtype, device="meta" if dtype.is_floating_point else "cpu")
        return whole[part].clone() if part else whole


@torch.inference_mode()
def draft_launches(config: EngineConfig) -> None:
    """Launches what a draft worker with `config`, for a GPU, may launch; its pages do not matter."""
    _, state = draft_state(MetaSpec.of(dataclasses.replace(config, device="meta", num_pages=1)))
    for batch in sorted({*batch_sizes(config), *default_batches(config.max_running)}):
        layout = BatchLayout(batch, state.proposer.path_rows)
        memory = BatchMemory.of(layout, state.width, state.device)
        for words in (1, state.result_words):
            results = torch.empty(batch, words, dtype=torch.int32, device=state.device)
            BatchProgram(state, layout, memory, results).run()
        if may_mail(config.speculation):
            slots, stop = (torch.empty(n, dtype=torch.int32, device=state.device) for n in (batch, 1))
            MailProgram(state, slots, mail_wait(state, mail_place(config.speculation), stop)).run()
