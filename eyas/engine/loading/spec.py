"""The specification of an engine before any weight is read: configurations, shapes, sources of tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from eyas.common.config import EXPERT_ROWS, MOST_CHUNK, EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.machine.gpus import number_of
from eyas.common.prompt_room import MOST_TOGETHER
from eyas.common.types import FAST, KvKind, Role
from eyas.common.wire.pool import SCALE_BYTES, PoolGeometry
from eyas.engine.adapters.reader import AdapterReader, HeadNames
from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.torch_heads import torch_attention
from eyas.engine.checkpoint.config import DraftConfig, ModelConfig
from eyas.engine.checkpoint.weights import (
    DummyWeights,
    FolderWeights,
    GivenWeights,
    StoredFile,
    WeightPlacement,
    WeightSource,
)
from eyas.engine.formats.adapted import Adapted
from eyas.engine.ipc.pulse import Beat, no_pulse
from eyas.engine.kv.groups import GRAIN, KvGroups, one_group, page_layers
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.models.heads import TAKING_UPDATES, head_spelling, read_head, with_token_map
from eyas.engine.models.refusal import refusal
from eyas.engine.models.table import read_model
from eyas.engine.parallel.expert_places import SpreadExperts
from eyas.engine.parallel.expert_plan import ExpertSlots
from eyas.engine.parallel.shards import check_experts, check_replicas, config_of_rank
from eyas.engine.states.shape import SPAN, ring_rows
from eyas.engine.states.store import StateFormat
from kv_transfer.backends.table import NONE
from kv_transfer.host_files import new_path
from kv_transfer.layout import PageMeaning

_log = logging.getLogger("eyas.engine")

MOST_UNASKED = 2**20
"""Tokens of a context where no option says more: tables of angles and of pages are as long."""


@dataclass(frozen=True)
class EngineSpec:
    """Everything that is known before any weight is read. `rank`: which of the ranks that share the model
    this is.

    `leader`: how the names of rank 0's files begin (`own_prefix`).
    """

    config: EngineConfig
    target: ModelConfig
    head: DraftConfig | None
    epoch: int
    rank: int = 0
    leader: str = "eyas"

    @classmethod
    def of(cls, config: EngineConfig, epoch: int = 0) -> Self:
        """Reads the models' folders, which ranks can share.

        Raises ConfigError in one sentence if they cannot be served.
        """
        target = read_model(config.model, config.load_format, config.texts, config.model_impl)
        target = target.limited_to(config.context_length or _served(target))
        _check_foreign(target, config)
        config = dataclasses.replace(config, chunk_tokens=_chunk_of(target, config), open_chunk=False)
        head = None
        if config.draft is not None:
            head = read_head(config.draft, target, config.load_format, config.draft_capture_layers)
            head = with_token_map(head, target, config)
        check_experts(target, config.dp_attention)
        check_replicas(target, config)
        _check_states(target, config)
        _check_kv_dtype(target, config)
        _check_adapters(target, config)
        if head is not None:
            _check_stages(head, config.tensor_parallel_size)
            _check_shared(head, config)
            config = dataclasses.replace(config, speculation=_depth_of(head, config.speculation))
            _check_block(head, config.speculation)
        heads = [] if head is None else [(head.decoder, head.outputs)]
        for decoder, outputs in [(target, target.vocab_size), *heads]:
            share = config_of_rank(decoder, config.tensor_parallel_size)
            if config.attention_backend != "torch":
                _check_implemented(share, outputs // config.tensor_parallel_size)
        return cls(config, target, head, epoch)

    def with_pages(self, num_pages: int) -> Self:
        """A copy with the number of pages that fit."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, num_pages=num_pages))

    @property
    def adapted(self) -> Adapted:
        """The matrices that adapters may update."""
        return Adapted.of(self.config.max_loras, self.config.lora_experts)

    @property
    def head_adapted(self) -> Adapted:
        """The matrices that adapters may update of a draft head that runs here."""
        head = self.head if self.drafts_here and not self.config.only_drafts else None
        return self.adapted if head is not None and head.algorithm in TAKING_UPDATES else Adapted.NOTHING

    @property
    def adapter_reader(self) -> AdapterReader:
        """How folders of adapters are read."""
        names = None
        if self.head is not None and self.head_adapted is not Adapted.NOTHING:
            names = HeadNames(self.head.decoder, head_spelling(self.head))
        return AdapterReader(self.target, self.config.max_lora_rank, names)

    def of_rank(self, rank: int) -> Self:
        """A copy for one of several ranks, whose GPUs follow each other from the configured one on."""
        device = self.config.device
        if device != "cpu":
            device = f"cuda:{number_of(device) + rank}"
        return dataclasses.replace(self, config=dataclasses.replace(self.config, device=device), rank=rank)

    def backend(self, group: KvKind, beat: Beat = no_pulse) -> AttentionBackend:
        """Attention in plain torch, for the group's decoder. `beat`: of the engine that computes it."""
        return torch_attention(self.decoder(group), self.shape(group), beat)

    @contextlib.contextmanager
    def weights(self, group: KvKind, file: StoredFile | None = None) -> Iterator[WeightSource]:
        """The tensors of the target, or of the head in its official spelling. `file`: has them in the place
        of the folder's files.
        """
        head, quantized = self.head if group is KvKind.DRAFT else None, self.decoder(group).quantized
        if quantized is not None and self.config.attention_backend == "torch":
            quantized = quantized.with_rows_as_they_are()  # rounding them is how a device is fast
        if self.config.load_format == "dummy" and file is None:
            optional = head.dummy_tensors if head else frozenset()
            yield DummyWeights(placement=self.placement, optional=optional, quantized=quantized)
            return
        decoder, prefixes = self.decoder(group), head.prefixes if head else ("",)
        spelling = head_spelling(head) if head else decoder.spelling
        placement, fused = self.placement, decoder.fused
        folder = decoder.folder if file is None else Path("the update")  # as errors name it
        sizes = (folder, spelling, placement, prefixes, quantized, fused)
        with FolderWeights(*sizes) if file is None else GivenWeights(file, *sizes) as weights:
            yield weights

    @property
    def placement(self) -> WeightPlacement:
        """The device of this rank's weights, and their dtype."""
        config, dtype = self.config, getattr(torch, self.config.dtype)
        if config.dp_attention > 1:
            return WeightPlacement(config.device, dtype, sharer=self.rank, sharers=config.dp_attention)
        return WeightPlacement(config.device, dtype, self.rank, config.tensor_parallel_size)

    def pool(self, group: KvKind) -> KvPool:
        """Creates a pool: on a CPU a file that other engines map; a GPU's pool is handed over to them, if it
        ever travels.
        """
        shape = self.shape(group)
        if self.config.device == "cpu" and not self.rank:
            return KvPool(shape, new_path(group.value, Path(self.config.pool_dir)))
        pool = KvPool(shape)
        if self.config.transfer != NONE:
            pool.hand_over(self.giver(group, self.rank))
        return pool

    def giver(self, group: KvKind, rank: int) -> Path:
        """The socket by which a rank hands its pool over: a name that rank 0's end leaves to be swept."""
        name = f"{self.leader}-{self.epoch:x}-{group.value}_{rank}"
        return Path(self.config.pool_dir) / name

    def shape(self, group: KvKind) -> PoolShape:
        """Sizes of this rank's part of the group's pool; attention ranks of a CPU have theirs in one pool."""
        assert self.config.num_pages is not None
        page_size, ranks = self.config.page_size, self.config.tensor_parallel_size
        dtype = self.placement.dtype
        pages = self.config.num_pages * len(self.groups) * (self.config.dp_attention if self.plain else 1)
        groups: KvGroups = ()
        if group is KvKind.DRAFT and self.head is not None:
            own = self.head.pool_format(page_size, ranks)
        else:
            own = dataclasses.replace(self.target.kv_format.of_rank(ranks), layers=page_layers(self.groups))
            groups = self.groups if self.windowed or self.states is not None else ()
            dtype = dtype if self.config.kv_cache_dtype == "auto" else torch.float8_e4m3fn
        return PoolShape(
            format=own,
            pages=pages,
            page_size=page_size,
            dtype=dtype,
            device=self.placement.device,
            groups=groups,
            states=self.states if group is KvKind.TARGET else None,
            slots=self.state_slots if group is KvKind.TARGET else 0,
        )

    @property
    def plain(self) -> bool:
        """True if plain torch computes."""
        return self.config.attention_backend == "torch"

    @property
    def groups(self) -> KvGroups:
        """The groups of the target's layers that have pages of their own; one, where windows save nothing."""
        ignored = self.windows_ignored and self.target.delta is None
        return one_group(self.target.kv_format.layers) if ignored else self.target.kv_groups

    @property
    def states(self) -> StateFormat | None:
        """The slots of this rank's states, if the target has some."""
        shape, config = self.target.delta, self.config
        if shape is None or config.only_drafts:
            return None
        ring = ring_rows(config.round_width)
        return StateFormat(
            self.target.state_layers, shape.of_rank(config.tensor_parallel_size), ring, self.placement.dtype
        )

    @property
    def state_slots(self) -> int:
        """Slots of states in the target's pool."""
        return 0 if self.states is None else self.config.slots_of_states

    @property
    def windowed(self) -> bool:
        """True if pages behind a window go."""
        return any(group.windowed for group in self.groups)

    @property
    def windows_ignored(self) -> str:
        """Why pages behind a window stay; "": they go, if there are windows."""
        if self.config.only_drafts:
            return "a draft worker has none"
        if self.config.dp_attention > 1:
            return "attention ranks keep all"
        if self.config.host_cache_gb:
            return "the host's cache takes whole pages"
        if self.head is not None and self.target.kv_groups[0].windowed:
            return "the draft head needs pages of all rows"
        return ""

    @property
    def drafts_here(self) -> bool:
        """True if this engine runs the draft head, if there is one. Else draft workers do."""
        return self.head is not None and bool({Role.DRAFT, Role.PREFILL} & set(self.config.roles))

    @property
    def round_rows(self) -> int:
        """Rows that the widest round writes, in the target's pool or the head's."""
        spec = self.config.speculation
        if self.head is None:
            return self.width
        return max(spec.draft_tokens, spec.steps * spec.topk + 1)

    @property
    def width(self) -> int:
        """Rows of a round of one sequence: the root and every draft."""
        return self.config.round_width

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """The rates by which drafts are accepted, if chance decides; only the fast path lets it."""
        if self.head is None or self.config.attention_backend == "torch":
            return ()
        return self.config.speculation.synthetic_rates

    @property
    def uniform_experts(self) -> bool:
        """True if chance chooses experts; only those of the fast path."""
        chance = self.config.uniform_experts and self.config.attention_backend != "torch"
        return chance and bool(self.target.experts)

    @property
    def slots_of_experts(self) -> ExpertSlots:
        """The slots of each of the target's layers that has experts, on all attention ranks."""
        most = max(part.experts for part in self.target.experts)
        return ExpertSlots(most, self.config.dp_attention, self.config.expert_replicas)

    def decoder(self, group: KvKind) -> ModelConfig:
        """The model whose KV the group holds: the target, or the draft head's decoder."""
        if group is KvKind.TARGET:
            return self.target
        assert self.head is not None
        return self.head.decoder

    def share(self, group: KvKind) -> ModelConfig:
        """The decoder with this rank's heads. Raises ConfigError if the ranks cannot divide it."""
        return config_of_rank(self.decoder(group), self.config.tensor_parallel_size)

    def geometry(self, group: KvKind) -> PoolGeometry:
        """The sizes of this rank's part of the pool, as they are sent to pullers."""
        return self.shape(group).geometry

    def layout_hash(self, group: KvKind) -> str:
        """A hash of the meaning of the group's pages; pages travel only between workers with equal hashes."""
        geometry, decoder = self.geometry(group), self.decoder(group)
        fingerprint = self.target.fingerprint
        if group is KvKind.DRAFT and self.head is not None:
            fingerprint += self.head.fingerprint
        if group is KvKind.TARGET and self.windowed:
            fingerprint += repr((GRAIN, self.groups))
        if group is KvKind.TARGET and self.states is not None and self.target.delta is not None:
            fingerprint += repr((SPAN, dataclasses.replace(self.states, shape=self.target.delta)))
        return PageMeaning(
            fingerprint=fingerprint,
            group=group,
            dtype=geometry.dtype,
            layers=geometry.layers,
            kv_heads=decoder.kv_format.kv_heads,
            head_dim=geometry.head_dim,
            rope=decoder.rope_meaning,
            latent=decoder.kv_format.latent,
            arithmetic=self.page_arithmetic(group),
        ).hash()

    def page_arithmetic(self, group: KvKind) -> str:
        """The arithmetic of the group's pages; for exact ones with the kind of GPU.

        A draft head's are advice: "".
        """
        arithmetic, device = self.config.arithmetic, self.placement.device
        if group is KvKind.DRAFT:
            return ""
        if arithmetic == FAST or not device.startswith("cuda"):
            return arithmetic
        major, minor = torch.cuda.get_device_capability(device)
        return f"{arithmetic} on sm_{major}{minor}"


def spread_experts(loaded: EngineSpec, rank: int) -> SpreadExperts | None:
    """The places of the target's experts on an attention rank; None: none has replicas."""
    if not loaded.config.expert_replicas:
        return None
    layers = len(loaded.target.experts)
    return SpreadExperts(loaded.slots_of_experts, rank, layers, loaded.config.device)


def _check_foreign(target: ModelConfig, config: EngineConfig) -> None:
    """Raises ConfigError for a flag that a model which transformers computes is not served with."""
    if target.foreign is None:
        return
    unserved = {
        f"draft {config.draft}": config.draft is not None,
        "tensor-parallel-size": config.tensor_parallel_size > 1,
        "dp-attention": config.dp_attention > 1,
        "deterministic": config.deterministic,
    }
    for flag, is_set in unserved.items():
        if is_set:
            instead = "take --draft ngram, suffix or none" if flag.startswith("draft") else "leave it out"
            raise ConfigError(
                f"--{flag}: transformers computes {target.architecture}, where it does not work: {instead}",
                param=flag.split()[0],
            )


def _served(target: ModelConfig) -> int:
    """The context that is served where nothing else is said: tables and queues are as long."""
    if target.context_length > MOST_UNASKED:
        text = "of a context of %d tokens %d are served; more are with --context-length"
        _log.warning(text, target.context_length, MOST_UNASKED)
    return min(target.context_length, MOST_UNASKED)


def _check_stages(head: DraftConfig, ranks: int) -> None:
    """Raises ConfigError for a head of several stages that ranks would share: what its pages keep for the
    next row is whole on each, and cannot be divided on the way between workers as heads are.
    """
    if head.stages > 1 and ranks > 1:
        flag = "tensor-parallel-size"
        text = f"draft head {head.folder} has {head.stages} MTP layers, which ranks cannot share"
        raise ConfigError(f"--{flag}: {text}", param=flag)


def _check_shared(head: DraftConfig, config: EngineConfig) -> None:
    """Raises ConfigError for a head whose experts attention ranks cannot share. In plain torch rank 0 has it
    whole.
    """
    if config.attention_backend != "torch" and head.decoder.experts:
        check_experts(head.decoder, config.dp_attention)


def _chunk_of(target: ModelConfig, config: EngineConfig) -> int:
    """Prompt rows of a step. Where no option says how many, and layers have states or latents: as many as
    give an expert `EXPERT_ROWS`, up to `MOST_CHUNK`, of latents `MOST_TOGETHER`. Every step reads all
    experts: beside so many products that is little.
    """
    if not config.open_chunk or target.delta is None and not target.kv_format.latent:
        return config.chunk_tokens
    most = MOST_TOGETHER if target.delta is None else MOST_CHUNK
    rows = [EXPERT_ROWS * part.experts // part.per_row for part in target.experts]
    return max(config.chunk_tokens, min(max(rows, default=0), most))


def _depth_of(head: DraftConfig, spec: SpeculationConfig) -> SpeculationConfig:
    """Drafts as deep as a head's block, where no option says how deep: all of it comes of one pass, and what
    does not pay is not verified if depths adapt.
    """
    if head.block is None or not spec.open_depth:
        return spec
    steps = head.block.most if spec.adaptive else min(spec.steps, head.block.most)
    return dataclasses.replace(spec, steps=steps, draft_tokens=steps + 1)


def _check_block(head: DraftConfig, spec: SpeculationConfig) -> None:
    """Raises ConfigError for drafts that a head cannot make in its one pass."""
    if head.block is None:
        return
    if spec.topk > 1:
        what = f"draft head {head.folder} drafts chains, all of a chain at once"
        raise ConfigError(f"--spec-topk {spec.topk}: {what}", param="spec-topk")
    if spec.steps > head.block.most:
        what = f"draft head {head.folder} drafts up to {head.block.most} tokens at once"
        raise ConfigError(f"--spec-steps {spec.steps}: {what}", param="spec-steps")


def _check_adapters(target: ModelConfig, config: EngineConfig) -> None:
    """Raises ConfigError for slots of adapters where none is served."""
    if not config.max_loras:
        return
    flag = "max-loras"
    if target.foreign is not None:
        text = f"--{flag}: transformers computes {target.architecture}, which takes no adapters"
        raise ConfigError(text, param=flag)
    if config.dp_attention > 1:
        raise ConfigError(f"--{flag}: attention ranks take no adapters (--dp-attention 1)", param=flag)


def _check_kv_dtype(target: ModelConfig, config: EngineConfig) -> None:
    """Raises ConfigError for KV in FP8 whose scales have no place."""
    in_fp8 = config.kv_cache_dtype != "auto" and not target.kv_format.latent
    if in_fp8 and target.head_dim % SCALE_BYTES:
        flag = "kv-cache-dtype"
        text = f"heads of {target.head_dim} elements have no room for its scales (a multiple of 4 has)"
        raise ConfigError(f"--{flag} {config.kv_cache_dtype}: {text}", param=flag)
    if in_fp8 and target.uneven_heads:
        flag = "kv-cache-dtype"
        text = "layers that differ in their heads have no room for its scales"
        raise ConfigError(f"--{flag} {config.kv_cache_dtype}: {text}", param=flag)


def _check_implemented(decoder: ModelConfig, outputs: int) -> None:
    """Raises ConfigError for what the device path would run by other equations than the model's.

    `decoder`: one rank's share; `outputs`: the rows of the output head that it has.
    """
    if why := refusal(decoder, outputs):
        raise ConfigError(
            f"{decoder.architecture} of {decoder.folder} has no implementation for a GPU: {why} "
            "(--attention-backend torch serves it slowly)",
            param="attention-backend",
        )


def _check_states(target: ModelConfig, config: EngineConfig) -> None:
    """Raises ConfigError, naming the flag, for what does not work with states, or needs a model with some."""
    if target.delta is None:
        if config.state_slots is not None:
            raise ConfigError(
                f"--state-slots: {target.architecture} has no recurrent states", param="state-slots"
            )
        return
    refused = {
        "dp-attention": (config.dp_attention > 1, "attention ranks have no slots of states"),
        "host-cache-gb": (config.host_cache_gb > 0, "states do not leave for the host's memory"),
        "spec-draft-tokens": (
            config.round_width > SPAN,
            f"a round has at most {SPAN} rows, drafts and the one before them",
        ),
    }
    for flag, (is_set, why) in refused.items():
        if is_set:
            raise ConfigError(f"--{flag}: {target.architecture} has recurrent states: {why}", param=flag)
