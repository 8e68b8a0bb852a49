"""Estimates the bytes of a model's weights and KV pages before any is read, by config.json and file headers.

The numbers are the least: a process also needs vectors, tables and room for its steps. No torch is loaded.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from eyas.common.config import EngineConfig
from eyas.engine.checkpoint.config import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.folder import stored_tensors
from eyas.engine.checkpoint.packed import PackedConfig
from eyas.engine.checkpoint.quantized import Fp8Config
from eyas.engine.kv.groups import KvGroups, one_group, page_layers
from eyas.engine.states.shape import ring_rows

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}
_FP8 = "F8_E4M3"
_KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", _FP8: "fp8_e4m3"}
"""What safetensors files call the dtypes of weights."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ENDS = ("model.embed_tokens", "model.norm.", "model.per_layer_")


@dataclass(frozen=True)
class WeightBytes:
    """`experts`: of all layers' experts; `rest`: of all else. `as_stored`: of both, what files hold in the
    dtype that is computed with: processes of one machine may share it.
    """

    experts: int
    rest: int
    as_stored: int = 0

    @property
    def total(self) -> int:
        """Bytes of all weights."""
        return self.experts + self.rest

    def of_rank(self, ranks: int, sharers: int, replicas: float = 0.0) -> int:
        """The part of one of `ranks` that share everything, or of `sharers` that share the experts alone and
        have room for `replicas` of others', as a part of all.
        """
        return self.experts // (ranks * sharers) + int(self.experts * replicas) + self.rest // ranks


def weight_bytes(model: ModelConfig, dtype: str, device: str, exact: bool = False) -> WeightBytes:
    """Bytes of the weights that a decoder reads, in `dtype`; those stored in FP8 stay so, packed ones
    are widened, but on a GPU those that products read as they are. `exact`: these are whole numbers of four
    bits alone, and no experts.
    """
    if model.foreign is not None:
        return WeightBytes(0, ITEMSIZE[dtype] * model.foreign.elements)
    packed = model.quantized if isinstance(model.quantized, PackedConfig) and device != "cpu" else None
    of_32 = dict.fromkeys((True, False), 32 * ITEMSIZE[dtype])  # of experts, and of the rest
    if packed is not None:
        of_32 = {each: packed.bytes_of_32(each, exact) or wide for each, wide in of_32.items()}
    if model.load_format == "dummy" or not any(model.folder.glob("*.safetensors")):
        matrices, one = parameters(model), isinstance(model.quantized, Fp8Config)
        experts, layers = matrices.experts, matrices.rest - matrices.as_stored
        if not one:
            experts, layers = experts * of_32[True] // 32, layers * of_32[False] // 32
        return WeightBytes(experts, (1 if one else ITEMSIZE[dtype]) * matrices.as_stored + layers)
    experts = rest = as_stored = 0
    quantized = model.quantized.kind if model.quantized is not None else None  # "" of packed ones
    for stored, (kind, shape) in stored_tensors(model.folder, model.quantized).items():
        name = model.spelling(stored)
        if (kind not in _KINDS and kind != quantized) or not _is_read(model, name):
            continue
        is_expert = ".experts." in name
        size = math.prod(shape) * (1 if kind == _FP8 else ITEMSIZE[dtype])
        if packed is not None and not kind:
            size = math.prod(shape) * of_32[is_expert] // 32
        experts += size if is_expert else 0
        rest += 0 if is_expert else size
        as_stored += size if _KINDS.get(kind) == dtype else 0
    return WeightBytes(experts, rest, as_stored)


def replica_share(model: ModelConfig, config: EngineConfig) -> float:
    """A rank's room for replicas, as a part of all experts."""
    return config.expert_replicas / max((part.experts for part in model.experts), default=1)


def parameters(model: ModelConfig) -> WeightBytes:
    """Elements of a decoder's matrices; what vectors add does not count.

    `as_stored`: of the embedding and the output head.
    """
    ends = model.vocab_size * model.hidden_size * (1 if model.tied_head else 2)
    vectors = sum(layer.token_width for layer in model.layers)
    ends += vectors * (model.token_rows + model.hidden_size)
    each = [_layer(layer, model.hidden_size) for layer in model.layers]
    experts, rest = (sum(part) for part in zip(*((layer.experts, layer.rest) for layer in each), strict=True))
    return WeightBytes(experts, ends + rest, ends)


def groups_of(model: ModelConfig, config: EngineConfig) -> KvGroups:
    """The groups of a target's layers that have pages of their own in an engine: one, where none is freed."""
    apart = config.dp_attention == 1 and not config.host_cache_gb
    return model.kv_groups if apart or model.delta is not None else one_group(model.kv_format.layers)


def page_bytes(
    model: ModelConfig, page_size: int, dtype: str, ranks: int = 1, groups: KvGroups | None = None
) -> int:
    """One rank's part of a page of KV in each of the `groups` (None: the model's), with elements of `dtype`.

    Raises ConfigError if the ranks cannot divide its heads.
    """
    groups = groups or model.kv_groups
    each = dataclasses.replace(model.kv_format.of_rank(ranks), layers=page_layers(groups))
    return len(groups) * each.page_bytes(page_size, ITEMSIZE[dtype])


def state_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """One rank's slots of states, as many as it must have; 0: the model has none."""
    return config.fewest_slots * slot_bytes(model, config)


def slot_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """One rank's slot of states, and what a GPU keeps of its rows beside it; 0: the model has none."""
    if model.delta is None:
        return 0
    shape, ring = model.delta.of_rank(config.tensor_parallel_size), ring_rows(config.round_width)
    each = shape.slot_bytes(ring, ITEMSIZE[config.dtype])
    if config.device != "cpu":
        each += shape.solved_bytes(ring, ITEMSIZE[config.dtype])
    return len(model.state_layers) * each


def _is_read(model: ModelConfig, name: str) -> bool:
    """True if a decoder reads the tensor of that name: behind its last layer are a draft head's."""
    if match := _LAYER.match(name):
        return int(match[1]) < model.num_layers
    return name.startswith(_ENDS) or (name.startswith("lm_head.") and not model.tied_head)


def _layer(layer: LayerSpec, hidden: int) -> WeightBytes:
    part, attention = layer.feed_forward, mixer_elements(layer, hidden)
    attention, matrices = attention + 2 * hidden * layer.token_width, 3 if part.gated else 2
    if isinstance(part, ExpertsSpec):
        router, read = hidden * part.experts, part.latent or hidden
        beside = router + matrices * hidden * part.shared_width + 2 * hidden * part.latent
        return WeightBytes(matrices * read * part.width * part.experts, attention + beside)
    return WeightBytes(0, attention + matrices * hidden * part.width)


def mixer_elements(layer: LayerSpec, hidden: int) -> int:
    """Elements of the matrices of a layer's attention and state."""
    attention = _attention(layer.attention, hidden) if layer.attends else 0
    return attention if layer.delta is None else attention + layer.delta.weights(hidden)


def _attention(spec: AttentionSpec, hidden: int) -> int:
    if not isinstance(spec, LatentSpec):
        own = spec.num_kv_heads if spec.shared_from is None else 0
        gates = spec.num_heads * spec.gated
        return hidden * spec.head_dim * (2 * (spec.num_heads + own) + gates)  # q and o; k and v
    query = spec.num_heads * (spec.plain_dim + spec.rotated_dim)
    queries = spec.query_rank * (hidden + query) if spec.query_rank else hidden * query
    heads = spec.num_heads * (spec.kv_rank * (spec.plain_dim + spec.value_dim) + spec.value_dim * hidden)
    return queries + hidden * spec.head_dim + heads
