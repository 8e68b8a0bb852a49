"""Builds an engine from its configuration: loads, allocates, warms up, and says what it serves.

The composition root of an engine process. Which engine depends on the roles: draft alone is a
`DraftEngine`; everything else runs the target model, and drafts by itself (with the draft role, or where
prompts are computed for others), through draft workers, or not at all.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Group, Role
from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.torch_backend import TorchAttention
from eyas.engine.draft_engine import DraftEngine, DraftParts
from eyas.engine.engine import Engine, Parts
from eyas.engine.kv_pool import KvPool, PoolShape, new_pool_path, sweep_stale
from eyas.engine.leases import Leases, OfferedPool
from eyas.engine.link import EngineLink
from eyas.engine.messages import Ready
from eyas.engine.model_config import DraftConfig, ModelConfig, strip_prefix
from eyas.engine.models.eagle3 import Eagle3Capture, Eagle3Head
from eyas.engine.models.llama import Ends
from eyas.engine.models.registry import model_class
from eyas.engine.outbox import Outbox
from eyas.engine.pages import PagePool
from eyas.engine.prefix_cache import PrefixCache
from eyas.engine.pulls import Pulls
from eyas.engine.runner import Runner
from eyas.engine.scheduler import Limits, Scheduler
from eyas.engine.sequence import Generation, Kind, Sequence, Work
from eyas.engine.speculation.colocated import ColocatedDrafter
from eyas.engine.speculation.draft_runner import DraftRunner
from eyas.engine.speculation.drafter import Drafter
from eyas.engine.speculation.remote import RemoteDrafter
from eyas.engine.weights import DummyWeights, FolderWeights, Placement, Weights
from kv_transfer.backends.base import Backend, page_view
from kv_transfer.backends.local import LocalBackend
from kv_transfer.backends.shm import ShmBackend
from kv_transfer.copier import Copier
from kv_transfer.layout import Geometry, Meaning
from kv_transfer.owner import Owner


def build_engine(config: EngineConfig, link: EngineLink) -> Engine | DraftEngine:
    """Load and warm an engine for `config.roles`. Raises ConfigError in one sentence if that cannot work."""
    sweep_stale(Path(config.pool_dir))
    target = ModelConfig.from_folder(config.model)
    head = None if config.draft is None else DraftConfig.from_folder(config.draft, target)
    _check_device(config)
    loaded = _Loaded(config, target, head, epoch=secrets.randbits(63))
    if set(config.roles) == {Role.DRAFT}:
        return DraftEngine(_draft_parts(loaded), link)
    return Engine(_target_parts(loaded), link)


def _check_device(config: EngineConfig) -> None:
    if config.attention_backend != "torch":
        raise ConfigError(f"attention backend {config.attention_backend!r} is not there yet (torch is)")
    if config.device == "cpu":
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"device {config.device!r} is not available: PyTorch sees no GPU here")
    if set(config.roles) != set(Role):
        raise ConfigError("a GPU worker takes all roles in this version: KV pages of a GPU cannot travel yet")


@dataclass(frozen=True)
class _Loaded:
    """What is known before any weight is read."""

    config: EngineConfig
    target: ModelConfig
    head: DraftConfig | None
    epoch: int

    def backend(self, group: Group) -> AttentionBackend:
        return TorchAttention(self.decoder(group).num_heads, self.shape(group))

    @contextlib.contextmanager
    def weights(self, group: Group) -> Iterator[Weights]:
        """The tensors of the target, or of the head in its official spelling."""
        folder = self.decoder(group).folder
        if self.config.load_format == "dummy":
            yield DummyWeights(placement=self.placement)
            return
        spelling = strip_prefix if group is Group.DRAFT else str
        with FolderWeights(folder, spelling, self.placement) as weights:
            yield weights

    @property
    def placement(self) -> Placement:
        on_cpu = self.config.device == "cpu"
        return Placement(self.config.device, torch.float32 if on_cpu else torch.bfloat16)

    def pool(self, group: Group) -> KvPool:
        """On a CPU a file that other engines map; a GPU's pool is its own."""
        shape = self.shape(group)
        if self.config.device != "cpu":
            return KvPool(shape)
        return KvPool(shape, new_pool_path(group.value, Path(self.config.pool_dir)))

    def shape(self, group: Group) -> PoolShape:
        decoder = self.decoder(group)
        return PoolShape(
            pages=self.config.num_pages,
            layers=decoder.num_layers,
            page_size=self.config.page_size,
            kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            dtype=self.placement.dtype,
            device=self.placement.device,
        )

    def decoder(self, group: Group) -> ModelConfig:
        if group is Group.TARGET:
            return self.target
        assert self.head is not None
        return self.head.decoder

    def geometry(self, group: Group) -> Geometry:
        shape = self.shape(group)
        return Geometry(
            pages=shape.pages,
            page_size=shape.page_size,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=str(shape.dtype).removeprefix("torch."),
        )

    def meaning(self, group: Group) -> str:
        geometry, decoder = self.geometry(group), self.decoder(group)
        fingerprint = self.target.fingerprint
        if group is Group.DRAFT and self.head is not None:
            fingerprint += self.head.fingerprint
        return Meaning(
            fingerprint=fingerprint,
            group=group,
            dtype=geometry.dtype,
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            rope=str(decoder.rope),
        ).hash()


def _target_parts(loaded: _Loaded) -> Parts:
    config, target = loaded.config, loaded.target
    backend = loaded.backend(Group.TARGET)
    with loaded.weights(Group.TARGET) as weights:
        model = model_class(target.architecture)(target, weights, backend)
    pool = loaded.pool(Group.TARGET)
    drafts_here = loaded.head is not None and bool({Role.DRAFT, Role.PREFILL} & set(config.roles))
    draft_runner = _draft_runner(loaded, model.ends) if drafts_here else None
    runner = Runner(model, pool, backend, _capture(loaded) if loaded.head else None)
    drafter = _drafter(config, draft_runner, target.vocab_size)
    spec = config.speculation
    round_rows = max(spec.draft_tokens, spec.steps * spec.topk + 1) if drafter else 1
    limits = Limits(config.page_size, config.max_running, config.chunk_tokens, round_rows)
    pages = PagePool(config.num_pages)
    cache = PrefixCache(pages, config.page_size, lookahead=1 if draft_runner else 0)
    pools = (pool,) if draft_runner is None else (pool, draft_runner.pool)
    outbox = Outbox()
    slowest = _warm_up(runner, config)
    groups = [Group.TARGET, *([Group.DRAFT] if draft_runner else [])]
    copier = Copier(_mover(loaded, Group.TARGET, pool), config.num_pages)
    offered = {g: OfferedPool(str(p.path), loaded.meaning(g)) for g, p in zip(groups, pools, strict=True)}
    return Parts(
        config=config,
        runner=runner,
        pools=pools,
        scheduler=Scheduler(pages, cache, limits),
        drafter=drafter,
        leases=Leases(
            Owner(config.worker, loaded.epoch, config.lease_s), pages, config.page_size, offered, outbox
        ),
        pulls=Pulls(copier, config.page_size, outbox),
        copier=copier,
        outbox=outbox,
        ready=_ready(loaded, dict(zip(groups, pools, strict=True)), slowest),
    )


def _draft_parts(loaded: _Loaded) -> DraftParts:
    config = loaded.config
    if loaded.head is None:
        raise ConfigError("a draft worker needs a draft head (--draft DIR)")
    with loaded.weights(Group.TARGET) as weights:
        ends = Ends.load(loaded.target, weights)
    runner = _draft_runner(loaded, ends)
    copier = Copier(_mover(loaded, Group.DRAFT, runner.pool), config.num_pages)
    outbox = Outbox()
    return DraftParts(
        config=config,
        runner=runner,
        pool=PagePool(config.num_pages),
        pulls=Pulls(copier, config.page_size, outbox),
        copier=copier,
        outbox=outbox,
        ready=_ready(loaded, {Group.DRAFT: runner.pool}, slowest=0.0),
    )


def _draft_runner(loaded: _Loaded, ends: Ends) -> DraftRunner:
    assert loaded.head is not None
    backend = loaded.backend(Group.DRAFT)
    with loaded.weights(Group.DRAFT) as weights:
        head = Eagle3Head(loaded.head, weights, ends, backend)
    return DraftRunner(head, loaded.pool(Group.DRAFT), backend)


def _capture(loaded: _Loaded) -> Eagle3Capture:
    assert loaded.head is not None
    with loaded.weights(Group.DRAFT) as weights:
        return Eagle3Capture(loaded.head, weights)


def _drafter(config: EngineConfig, draft_runner: DraftRunner | None, vocab_size: int) -> Drafter | None:
    if draft_runner is not None:
        return ColocatedDrafter(draft_runner, config.speculation)
    if config.draft is not None:  # draft workers may come at any time
        return RemoteDrafter(config.draft_workers, config.speculation, vocab_size)
    return None


def _mover(loaded: _Loaded, group: Group, pool: KvPool) -> Backend:
    """What brings other workers' pages into `pool`: nothing can, into a GPU's."""
    if loaded.config.device != "cpu":
        return LocalBackend(np.empty((0, 0), np.uint8), {})
    memory = memoryview(pool.tensor.view(-1).numpy()).cast("B")
    return ShmBackend(page_view(memory, loaded.geometry(group)), loaded.config.pool_dir)


def _ready(loaded: _Loaded, pools: dict[Group, KvPool], slowest: float) -> Ready:
    config, target, head = loaded.config, loaded.target, loaded.head
    return Ready(
        epoch=loaded.epoch,
        model=Path(config.model).name,
        fingerprint=target.fingerprint,
        draft_fingerprint=head.fingerprint if head else "",
        context_length=target.context_length,
        vocab_size=target.vocab_size,
        pages_total=config.num_pages,
        meanings={group.value: loaded.meaning(group) for group in pools},
        pools={group.value: str(pool.path) for group, pool in pools.items()},
        geometry=json.dumps({group.value: json.loads(loaded.geometry(group).to_json()) for group in pools}),
        slowest_step_s=slowest,
        draft_width=head.decoder.hidden_size if head else 0,
    )


def _warm_up(runner: Runner, config: EngineConfig) -> float:
    """Run the largest prompt chunk and one decode row; seconds of the slower one. Pages are not owned yet."""
    rows = min(config.chunk_tokens, config.num_pages * config.page_size, runner.model.config.context_length)
    request = GenerationRequest("warm-up", (0,) * rows, SamplingParams())
    seq = Sequence(0, Generation(request, 0, Kind.LOCAL, 0.0, 0.0), 0, request.prompt_ids, [])
    seq.pages = list(range(-(-rows // config.page_size)))
    slowest = 0.0
    for tokens in (1, rows):
        began = time.monotonic()
        runner.run([Work(seq, 0, [0] * tokens, None, sample=True)])
        slowest = max(slowest, time.monotonic() - began)
    return slowest
