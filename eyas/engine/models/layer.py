"""One layer of any decoder: its equation, said once over the verbs of `eyas.engine.models.ops`.

How it is computed, whatever the machine, the number of rows, the arithmetic and the weights' formats, is the
verbs' business. The gain of a norm before a product goes into the product's weight where its format can take
it. Of several ranks each computes with its share of the weights (`eyas.engine.parallel.shards`); residual
rows are the same on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, Generic, Protocol

import torch

from eyas.engine.checkpoint.config import ApartSpec, ExpertsSpec, LatentSpec, LayerSpec
from eyas.engine.formats.projection import AnyProjection, ProjectionT
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.layers.norm import Gain, LayerNorm, load_gain, load_norm
from eyas.engine.models.channel_mixer import ChannelMixer
from eyas.engine.models.convolution_mixer import ConvolutionMixer
from eyas.engine.models.delta_mixer import DeltaMixer
from eyas.engine.models.experts_apart import ExpertsApart
from eyas.engine.models.feed_forward import GatedFeedForward, Mixture, NoFeedForward, gain_left
from eyas.engine.models.heads_attention import HeadsAttention
from eyas.engine.models.latent_attention import LatentMixer
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.models.ops.parts import ExpertsPart, OutPart
from eyas.engine.models.selective_mixer import SelectiveMixer
from eyas.engine.models.token_vectors import TokenHalf
from eyas.engine.states.delta import DeltaRule
from eyas.engine.states.shape import ChannelShape, ConvolutionShape, DeltaShape, SelectiveShape


class Mixer(Protocol):
    """A layer's attention, over the verbs that go with its weights. `norm`: of what it reads, without a gain
    where its weights have that in them; None: it reads rows as they are.
    """

    norm: row_kernels.NormInput | LayerNorm | None

    @property
    def projections(self) -> tuple[AnyProjection, ...]:
        """Its weights."""

    def attend(self, read: Any, layer: int, ops: Any) -> torch.Tensor:
        """Keeps the rows, and mixes -> [m, columns of `out`]."""

    def keep(self, read: Any, layer: int, ops: Any) -> Any:
        """Keeps the rows alone."""


class FeedForward(Protocol):
    """A half of a layer that every row passes by itself."""

    @property
    def projections(self) -> tuple[AnyProjection, ...]:
        """Its weights."""

    def inner(self, residual: Any, ops: Any) -> tuple[Any, Any]:
        """The input of its last product, made of the residual; and the residual, which may be passed on."""

    def add(self, residual: Any, inner: Any, ops: Any) -> Any:
        """The residual with the last product of what `inner` gave added."""


class DecoderLayer(Generic[ProjectionT]):
    """One decoder layer, or a rank's share of it, as `spec` says of the whole.

    `gain`: of the norm that what its attention reads has passed without one; its width is that of the input
    (a draft head joins two rows). None: there is no norm.
    """

    def __init__(self, blocks: Blocks[ProjectionT], spec: LayerSpec, prefix: str, gain: Gain | None) -> None:
        self.spec = spec
        self.number = 0  # among those of its model, whose memory in the pool is by that
        post = _post(blocks, prefix, spec.norms.after_attention)
        self._mixers = [
            (mixer, replace(out, post=post, scale=spec.residual_scale))
            for mixer, out in _mixers(blocks, spec, prefix, gain)
        ]
        before, after = spec.norms.before_feed_forward, spec.norms.after_feed_forward
        gains = _gain(blocks, prefix, before), _post(blocks, prefix, after)
        self._feed_forward: FeedForward
        if not spec.feed_forward.width:
            self._feed_forward = NoFeedForward()
        elif isinstance(spec.feed_forward, ApartSpec):
            self._feed_forward = ExpertsApart(blocks, spec, prefix, gains)
        elif isinstance(spec.feed_forward, ExpertsSpec):
            self._feed_forward = Mixture(blocks, spec, f"{prefix}.mlp", gains)
        else:
            self._feed_forward = GatedFeedForward(blocks, spec, f"{prefix}.mlp", gains)
        self._tokens = TokenHalf(blocks, spec, prefix) if spec.token_width else None
        self._number = blocks.weights.take(f"{prefix}.layer_scalar", (1,)) if spec.scaled else None
        if not spec.parallel:
            self._name_reader()

    def _name_reader(self) -> None:
        """Tells the last product of the mixers which norm reads the residual next."""
        (mixer, out), read = self._mixers[-1], self._feed_forward
        gain = gain_left(read.norm) if isinstance(read, GatedFeedForward) else None
        self._mixers[-1] = mixer, replace(out, gain=gain, to_experts=isinstance(read, Mixture))

    def read_by(self, norm: row_kernels.NormInput | LayerNorm | None) -> None:
        """Names the norm that reads the residual behind this layer, before the layer is called."""
        behind = self._tokens is not None or self._number is not None
        if isinstance(self._feed_forward, GatedFeedForward | Mixture) and not behind:
            self._feed_forward.read_by(norm)

    @property
    def mixing(self) -> tuple[AnyProjection, ...]:
        """The weights of its attention and its state, with the ways back."""
        mixing: list[AnyProjection] = []
        for mixer, out in self._mixers:
            mixing += (*mixer.projections, out.projection)
        return (*mixing, *(() if self._tokens is None else self._tokens.projections))

    @property
    def projections(self) -> tuple[AnyProjection, ...]:
        """All its weights."""
        return (*self.mixing, *self._feed_forward.projections)

    @property
    def formats(self) -> tuple[type[AnyProjection], ...]:
        """The formats of its weights: layers of one specification may differ in that."""
        return tuple(map(type, self.projections))

    @property
    def experts(self) -> ExpertsPart[ProjectionT] | None:
        """The part of its experts, if it has some."""
        mixed = self._feed_forward
        return mixed.part if isinstance(mixed, Mixture | ExpertsApart) else None

    @property
    def rounds_ahead(self) -> bool:
        """True if the sum of its experts is rounded as the next layer's norm says."""
        part = self.experts
        return part is not None and part.out.reader is not None

    @property
    def rule(self) -> DeltaRule | None:
        """The rule of its states, if it has some."""
        return next((mixer.rule for mixer, _ in self._mixers if isinstance(mixer, DeltaMixer)), None)

    @property
    def norm(self) -> row_kernels.NormInput | LayerNorm | None:
        """The norm of what attention reads; None: there is none. What several mixers read they may round in
        several ways.
        """
        (first, _), *others = self._mixers
        if others and isinstance(first.norm, row_kernels.NormInput):
            return replace(first.norm, plain=True)
        return first.norm

    def __call__(
        self,
        read: Any,
        residual: Any,
        layer: int,
        ops: Ops[Any, Any, Any],
        vectors: torch.Tensor | None = None,
        leaving: torch.Tensor | None = None,
    ) -> Any:
        """The residual after this layer, whose attention reads `read` and is over the pool's `layer`-th.
        `vectors` [m, width]: of the rows' tokens for this layer, if it reads some. `leaving` int32 [n]: the
        rows that the residual then has (None: all); nothing but attention sees the others.
        """
        attended = [(mixer.attend(read, layer, ops), out) for mixer, out in self._mixers]
        if leaving is not None:
            attended = [(ops.some(mixed, leaving), out) for mixed, out in attended]
            residual = ops.fewer(residual, leaving)
            vectors = None if vectors is None else vectors.index_select(0, leaving)
        if not self.spec.parallel:
            residual = _added(residual, attended, ops)
        inner, residual = self._feed_forward.inner(residual, ops)
        if self.spec.parallel:
            residual = _added(residual, attended, ops)
        residual = self._feed_forward.add(residual, inner, ops)
        if self._tokens is not None:
            assert vectors is not None
            residual = self._tokens.add(residual, vectors, ops)
        return residual if self._number is None else ops.times(residual, self._number)

    def keep(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> None:
        """The same as far as it writes the rows' KV."""
        for mixer, _ in self._mixers:
            mixer.keep(read, layer, ops)


def load_layers(
    blocks: Blocks[ProjectionT], prefix: str = "model.layers"
) -> Iterator[DecoderLayer[ProjectionT]]:
    """The layers of a target, or of a draft head whose first layer is like the others, each loaded when it
    is taken.
    """
    return _in_turn(load_layer(blocks, i, f"{prefix}.{i}") for i in range(blocks.config.num_layers))


def load_layer(blocks: Blocks[ProjectionT], number: int, prefix: str) -> DecoderLayer[ProjectionT]:
    """The layer of that number, with the norm before it if it has one. Its tensors are below `prefix`."""
    spec = blocks.config.layers[number]
    return DecoderLayer(blocks, spec, prefix, _gain(blocks, prefix, spec.norms.before_attention))


def head_layers(blocks: Blocks[ProjectionT], gain: Gain | None) -> list[DecoderLayer[ProjectionT]]:
    """The layers of a draft head whose first layer reads rows that are given; `gain` as of `DecoderLayer`."""
    first = DecoderLayer(blocks, blocks.config.layers[0], "layers.0", gain)
    rest = (load_layer(blocks, i, f"layers.{i}") for i in range(1, blocks.config.num_layers))
    return list(_in_turn(chain([first], rest)))


def _in_turn(layers: Iterable[DecoderLayer[ProjectionT]]) -> Iterator[DecoderLayer[ProjectionT]]:
    """Layers with their numbers, each of which is read by the next, and comes when that is there."""
    before = None
    for number, layer in enumerate(layers):
        layer.number = number
        if before is not None:
            before.read_by(layer.norm)
            yield before
        before = layer
    if before is not None:
        yield before


def run_layers(
    layers: Sequence[DecoderLayer[Any]],
    ops: Ops[Any, Any, Any],
    residual: Any,
    entering: Callable[[int, torch.Tensor], None] | None = None,
    given: Any = None,
    vectors: torch.Tensor | None = None,
) -> torch.Tensor:
    """The residual's rows [m, hidden] after all layers, or those that are to leave the last one. If none is,
    that one writes the rows' KV, and any rows are returned.

    `entering`: sees the rows that enter each layer, and behind the last those that leave it. `given`: what
    the first layer's attention reads; None: the residual, as the others do. `vectors` [m, layers, width]: of
    the rows' tokens, if layers read some.
    """
    for i, layer in enumerate(layers):
        read, residual = ops.norm(residual, layer.norm) if given is None or i else (given, residual)
        if entering is not None:
            entering(i, ops.leave(residual))
        own = None if vectors is None else vectors[:, layer.number]
        leaving = ops.leaving if i + 1 == len(layers) else None
        if leaving is None or len(leaving):
            residual = layer(read, residual, layer.number, ops, own, leaving)
        else:
            layer.keep(read, layer.number, ops)
    del read  # its memory is free for what leaves the last layer
    x = ops.leave(residual)
    if entering is not None:
        entering(len(layers), x)
    return x


def keep_layers(
    layers: Sequence[DecoderLayer[Any]], ops: Ops[Any, Any, Any], residual: Any, given: Any
) -> None:
    """The same as far as it writes the rows' KV: nothing of the last layer reads it."""
    read = given
    for i, (layer, after) in enumerate(pairwise(layers)):
        residual = layer(read, residual, i, ops)
        read, residual = ops.norm(residual, after.norm)
    del residual  # its memory is free for what the last layer makes
    layers[-1].keep(read, len(layers) - 1, ops)


def _gain(blocks: Blocks[ProjectionT], prefix: str, name: str) -> Gain | None:
    """The gain of the norm `name`, if there is one; a centred one is whole."""
    whole = f"{prefix}.{name}"
    return load_norm(blocks.config, blocks.weights, whole, blocks.config.hidden_size) if name else None


def _post(blocks: Blocks[ProjectionT], prefix: str, name: str) -> torch.Tensor | None:
    """The gain of a norm behind a half, if there is one."""
    whole = f"{prefix}.{name}.weight"
    return load_gain(blocks.config, blocks.weights, whole, blocks.config.hidden_size) if name else None


def _added(residual: Any, attended: list[tuple[torch.Tensor, OutPart[Any]]], ops: Ops[Any, Any, Any]) -> Any:
    """The residual with the last products of what mixers gave added."""
    for mixed, out in attended:
        residual = ops.add(residual, mixed, out)
    return residual


def _mixers(
    blocks: Blocks[ProjectionT], spec: LayerSpec, prefix: str, gain: Gain | None
) -> Iterator[tuple[Mixer, OutPart[ProjectionT]]]:
    """Mixers over other rows, and the ways back."""
    if spec.delta is not None:
        yield _state(blocks, spec.delta, f"{prefix}.linear_attn", gain)
    if spec.attends:
        yield _attention(blocks, spec, f"{prefix}.self_attn", gain)


def _state(
    blocks: Blocks[ProjectionT], shape: DeltaShape, prefix: str, gain: Gain | None
) -> tuple[Mixer, OutPart[ProjectionT]]:
    """The block of this shape, and the way back; their tensors are those below `prefix`."""
    name, columns = f"{prefix}.out_proj.weight", shape.value_heads * shape.value_size
    out = OutPart(blocks.loader([name]).columns(name, (blocks.config.hidden_size, columns)))
    if isinstance(shape, ConvolutionShape):
        return ConvolutionMixer(blocks, shape, prefix, gain), out
    if isinstance(shape, ChannelShape):
        return ChannelMixer(blocks, shape, prefix, gain), out
    if isinstance(shape, SelectiveShape):
        return SelectiveMixer(blocks, shape, prefix, gain), out
    return DeltaMixer(blocks, shape, prefix, gain), out


def _attention(
    blocks: Blocks[ProjectionT], spec: LayerSpec, prefix: str, gain: Gain | None
) -> tuple[Mixer, OutPart[ProjectionT]]:
    """The block of this specification, and the way back; their tensors are those below `prefix`."""
    attention, weights, name = spec.attention, blocks.weights, f"{prefix}.o_proj"
    mixer: LatentMixer[ProjectionT] | HeadsAttention[ProjectionT]
    if isinstance(attention, LatentSpec):
        mixer, each = LatentMixer(blocks, attention, prefix, gain), attention.value_dim
    else:
        mixer, each = HeadsAttention(blocks, attention, prefix, gain), attention.head_dim
    shape, bias = (blocks.config.hidden_size, attention.num_heads * each), None
    if attention.output_bias and weights.placement.rank == 0:  # once in the sum over the ranks
        bias = weights.take(f"{name}.bias", shape[:1])
    back = blocks.loader([f"{name}.weight"]).columns(f"{name}.weight", shape)
    return mixer, OutPart(back, bias, one_way=isinstance(attention, LatentSpec))
