"""Chooses the kernels of a step's rows: the fast ones, or those whose bits follow a sequence alone.

`fast` takes whatever is quickest for a step's shape. `exact` takes the narrow products, row kernels and
attention whose kernels are named `exact_*`; flashinfer is not for it, and nothing comes in later. Draft heads
stay fast: their tokens are advice. What exact rows cannot be is refused here by name.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.types import KvKind
from eyas.engine.attention.cudnn_backend import FEWEST, CudnnAttention
from eyas.engine.attention.device import row_attention
from eyas.engine.attention.exact_latents import ExactLatents
from eyas.engine.attention.exact_rows import ExactAttention
from eyas.engine.attention.latent_prompts import ExpandedPrompts
from eyas.engine.attention.prompts import PlannedAttention, PromptAttention, PromptPlan
from eyas.engine.attention.rows import RowLimits
from eyas.engine.attention.side_by_side import SideBySideAttention
from eyas.engine.batch.tables import SlotTables
from eyas.engine.checkpoint.config import ExpertsSpec, LatentSpec, ModelConfig
from eyas.engine.checkpoint.packed import PackedConfig
from eyas.engine.device.buckets import MAX_ENDS
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.experts.grouped_tiles import TILES
from eyas.engine.kernels.products import skinny
from eyas.engine.kv.pool import PoolShape
from eyas.engine.loading.bit_checks import check_tiles, packed_alike, products_of, unequal, weights_of
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models.feed_forward import GATES
from eyas.engine.models.ops.device_step import RowAttention
from eyas.engine.models.ops.expert_products import KNOWN_SCORES
from eyas.engine.speculation.feature_rows import RING_ROWS
from eyas.engine.states.shape import DeltaShape

UNSPLIT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Without memory for partial sums cuBLAS splits no k. It reads these before its first product."""

_log = logging.getLogger("eyas.engine")


@dataclass(frozen=True)
class RankArithmetic:
    """The kernels of one rank of the device path.

    `products` and `drafts`: how the target's products, and a draft head's, are launched; they have scratch
    memory of their own, since some of the head's run beside the target's.
    """

    loaded: EngineSpec
    products: skinny.ProductLaunch
    drafts: skinny.ProductLaunch

    @classmethod
    def of(cls, loaded: EngineSpec) -> RankArithmetic:
        """Chooses the arithmetic before any weight is read.

        Raises ConfigError for what the exact arithmetic does not cover.
        """
        config = loaded.config
        fast, drafts = (skinny.ProductLaunch.on(config.device, pdl=pdl_of(config)) for _ in range(2))
        if not config.deterministic:
            _log.info("arithmetic: fast")
            return cls(loaded, fast, drafts)
        _check(loaded)
        os.environ.update(UNSPLIT)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        exact = dataclasses.replace(fast, exact=True)
        return cls(loaded, _judged(exact, loaded), drafts)

    @property
    def exact(self) -> bool:
        """True if a row's bits follow its sequence alone."""
        return self.products.exact

    def attention(self, group: KvKind, tables: SlotTables, prompts: PromptPlan | None) -> RowAttention:
        """The attention of the group's decoder.

        `prompts` is planned for the target's heads: a draft head with others does without it.
        """
        loaded, config = self.loaded, self.loaded.config
        batch = max(config.max_running, config.cuda_graph_max_bs)
        waiting = RING_ROWS if config.speculation.adaptive else 1
        shape, share = loaded.with_pages(1).shape(group), loaded.share(group)
        width, heads = max(loaded.width, config.speculation.topk, waiting), share.num_heads
        block = loaded.head.block if group is KvKind.DRAFT and loaded.head is not None else None
        if block is not None and block.first < 0:
            width += block.width(config.speculation.steps)  # behind certain rows, in one pass
        most = RowLimits.of(share, batch + MAX_ENDS, width)
        if self.exact and group is KvKind.TARGET:
            kind = ExactLatents if shape.format.latent else ExactAttention
            return kind(tables.pages, heads, shape, most, pdl=pdl_of(config))
        prompts = prompts if _heads(loaded, group) == _heads(loaded, KvKind.TARGET) else None
        return row_attention(tables.pages, heads, shape, most, pdl=pdl_of(config), prompts=prompts)


def prompts_of(loaded: EngineSpec) -> PromptPlan | None:
    """The prompt attention: for latents the expanded form, but in exact arithmetic. Else cuDNN or FA3, if it
    is requested: the build of FA3's kernels begins here and goes on behind everything else. Where steps have
    too few rows for cuDNN, rows that are read side by side, of heads that these kernels take.

    A model, or a layer, that it has no template for is served all the same, as the log says.
    """
    config, target = loaded.config, loaded.share(KvKind.TARGET)
    latents = target.layers[0].attention
    if isinstance(latents, LatentSpec):
        if config.deterministic:
            return None
        return ExpandedPrompts(latents, loaded.with_pages(1).shape(KvKind.TARGET))
    name, shape = config.prefill_attention_backend, loaded.with_pages(1).shape(KvKind.TARGET)
    few = name == "triton" or (name == "cudnn" and config.chunk_tokens < FEWEST)
    if config.deterministic or (few and not SideBySideAttention.takes(shape)):
        return None
    if config.kv_cache_dtype != "auto":
        _log.info("prompts attend by the triton kernel, which alone reads KV in FP8")
        return None
    if target.uneven_heads:
        _log.info("prompts attend by the triton kernel: layers differ in their key and value heads")
        return None
    layers = [layer.attention for layer in target.layers]
    rules = [None if each.sinks else ScoreScaling.of(each) for each in layers]
    plain = next((rule for rule in rules if rule and rule == ScoreScaling(rule.scale)), None)
    if others := sum(rule is None or rule != plain for rule in rules):
        text = (
            "prompts attend by the triton kernel in %d of %d layers, which have windows, soft caps or sinks"
        )
        _log.info(text, others, len(rules))
    if plain is None:
        return None
    kind = SideBySideAttention if few else CudnnAttention
    made: Callable[[], PlannedAttention] = partial(kind, shape, plain.scale)
    if name == "flashinfer":
        made = _flashinfer(target.num_heads, shape, plain.scale)
    try:
        return PromptAttention(made(), plain, "rows side by side" if few else name)
    except ConfigError as error:
        _log.warning("prompts attend by the triton kernel: %s", error.message)
        return None


def _flashinfer(heads: int, shape: PoolShape, scale: float) -> Callable[[], PlannedAttention]:
    """The function that begins to build FA3. Raises ConfigError if flashinfer is not installed."""
    try:
        from eyas.engine.attention.flashinfer_backend import Fa3Build, PrefillAttention
    except ImportError as error:
        flag = "prefill-attention-backend"
        raise ConfigError(f"--{flag} flashinfer: it cannot be imported ({error})", param=flag) from None
    return lambda: PrefillAttention(
        heads, shape, scale, Fa3Build(shape.dtype, shape.head_dim, str(shape.device))
    )


def pdl_of(config: EngineConfig) -> bool:
    """Programmatic dependent launch: where there is a GPU (of compute capability 9.0)."""
    return config.device != "cpu"


def _check(loaded: EngineSpec) -> None:
    """Raises ConfigError, by name, for what the exact arithmetic does not cover yet."""
    if why := inexact(loaded.target, loaded.config):
        raise ConfigError(f"--deterministic: {why} (docs/determinism.md)", param="deterministic")


def inexact(target: ModelConfig, config: EngineConfig) -> str:
    """The part of a model, or of how it is served, that has no exact kernels yet; "": none."""
    if config.dtype == "float32":
        return "products of float32 have no fixed order: take --dtype bfloat16"
    if config.kv_cache_dtype != "auto" and target.kv_format.latent:
        return f"there are no exact kernels yet for latents of --kv-cache-dtype {config.kv_cache_dtype}"
    if config.uniform_experts:
        return "chance chooses experts by a row's place: leave --uniform-experts out"
    if target.uneven_heads:
        return "there are no exact kernels yet for layers that differ in their key and value heads"
    if target.centred or target.positions:
        return "there are no exact kernels yet for norms that take off the mean and stored positions"
    for layer in target.layers:
        if layer.attention.centred_heads or layer.parallel:
            return "there are no exact kernels yet for halves of a layer that stand side by side"
        if layer.scaled or layer.token_width or layer.attention.value_norms:
            return "there are no exact kernels yet for norms of values, and numbers that scale a layer"
        if layer.attention.row_norms:
            return "there are no exact kernels yet for norms over whole rows of queries and keys"
        if layer.delta is not None and type(layer.delta) is not DeltaShape:
            return f"there are no exact kernels yet for {layer.delta.kind}"
        if layer.attention.latent and layer.attention.qkv_bias:
            return "there are no exact kernels yet for latent attention with biases"
        mlp = layer.feed_forward
        gate = GATES.get(mlp.activation) if mlp.gated else None
        new = gate is None or gate.clamped
        if mlp.bias or new or (isinstance(mlp, ExpertsSpec) and _is_new(mlp)):
            return "there are no exact kernels yet for this model's feed-forward: biases, activation, scores"
    return ""


def _is_new(spec: ExpertsSpec) -> bool:
    """True if no kernel makes a row's choice of experts from its router's product alone."""
    return spec.router_bias or spec.scores not in KNOWN_SCORES


def _judged(launch: skinny.ProductLaunch, loaded: EngineSpec) -> skinny.ProductLaunch:
    """Enables cuBLAS for products of many rows, if on this machine it adds up as the narrow kernels do."""
    if loaded.config.device == "cpu":  # interpreted
        return launch
    launch, ranks = dataclasses.replace(launch, cublas=True), loaded.config.tensor_parallel_size
    if products := products_of(loaded.target, ranks):
        count = check_tiles(products, launch, TILES.measured(loaded.config.device), loaded.placement.dtype)
        _log.info("arithmetic: exact; %d tiles of grouped products give the same bits here", count)
    scaled = loaded.config.kv_cache_dtype != "auto"
    weights, quantized = weights_of(loaded.target, ranks, scaled=scaled), loaded.target.quantized
    if isinstance(quantized, PackedConfig) and not packed_alike(weights, launch, loaded.placement.dtype):
        _log.warning("arithmetic: exact; packed numbers add up in another order here: they are widened")
        launch = dataclasses.replace(launch, packed=False)
    others = unequal(weights, launch, loaded.placement.dtype)
    if not others:
        _log.info("arithmetic: exact; cuBLAS adds up as the narrow kernels do here, and keeps wide products")
        return launch
    text = "arithmetic: exact; cuBLAS adds up in another order here (%s): a slower kernel has wide products"
    _log.warning(text, ", ".join(map(str, others)))
    return dataclasses.replace(launch, cublas=False)


def _heads(loaded: EngineSpec, group: KvKind) -> tuple[int, int, int]:
    decoder = loaded.share(group)
    return decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
