"""Feed-forwards, dense or of many experts, of which each row takes a few (DeepSeekMoE, arXiv 2401.06066): how
their tensors are loaded, and their equations over the verbs of `ops`.

Ranks divide the width of a feed-forward and of every expert, or share experts out, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Self

import torch
import torch.nn.functional as F

from eyas.engine.adapters.sites import AdapterSite, SitePart
from eyas.engine.checkpoint.config import ExpertsSpec, FeedForwardSpec, LayerSpec
from eyas.engine.formats.projection import AnyProjection, ProjectionLoader, ProjectionT
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.layers.activations import ACTIVATIONS, PLAIN, Inner, Xielu, behind_a_gate
from eyas.engine.layers.norm import Gain, LayerNorm
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.models.ops.parts import BesidePart, ExpertsPart, GatedPart, OutPart, RouterPart
from eyas.engine.models.refusal import MOST_CHOSEN
from eyas.engine.parallel.expert_plan import NONE

Gains = tuple[Gain | None, torch.Tensor | None]
"""Gains of the norms before and behind a half of a layer; None: there is none."""

Norm = row_kernels.NormInput | LayerNorm | None


GATES = {
    "silu": GateActivation(),
    "gelu_tanh": GateActivation(gelu=True),
    "clamped_swiglu": GateActivation(clamped=True),
}
"""The activations that kernels know."""


def gain_left(norm: Norm) -> torch.Tensor | None:
    """The gain that a norm has because the weights behind it cannot take it; rows rounded in FP8 aside."""
    return norm.gain if isinstance(norm, row_kernels.NormInput) and norm.rounding is None else None


def gate_of(spec: FeedForwardSpec, down: AnyProjection) -> GateActivation | None:
    """The kernels' form of an activation that `down` reads; None: there is none, or no gate. Of dense
    products they know neither a bias nor a clamped gate.
    """
    gate = GATES.get(spec.activation) if spec.gated else None
    if gate is None or ((spec.bias or gate.clamped) and not isinstance(spec, ExpertsSpec)):
        return None
    return replace(gate, rounding=down.rounding)


def activation_of(blocks: Blocks[Any], spec: FeedForwardSpec, prefix: str) -> Inner:
    """The activation between the products of a feed-forward, whose own numbers of it are below `prefix`."""
    if spec.gated:
        return behind_a_gate(ACTIVATIONS[spec.activation])
    if spec.activation != "xielu":
        return PLAIN[spec.activation]
    weights, name = blocks.weights, f"{prefix}.act_fn"
    known = {
        part: weights.take(f"{name}.{part}", (), torch.float32)
        for part in ("beta", "eps")
        if f"{name}.{part}" in weights
    }
    rising, falling = (weights.take(f"{name}.{part}", (1,), torch.float32) for part in ("alpha_p", "alpha_n"))
    return Xielu.of(rising, falling, **known)


class GatedFeedForward(Generic[ProjectionT]):
    """down(activation(gate) * up) of the norm of rows, below `prefix`, between norms of these `gains`.

    A gain goes into the weights where both products are of numbers themselves.
    """

    def __init__(self, blocks: Blocks[ProjectionT], layer: LayerSpec, prefix: str, gains: Gains) -> None:
        spec, config, (gain, post) = layer.feed_forward, blocks.config, gains
        loaders = GatedLoaders.of(blocks.loader, [prefix], gated=spec.gated)
        gate_up, down = loaders.pair(prefix, (config.hidden_size, spec.width))
        self.projections = gate_up, down
        fused = gate_up.matrix is not None and down.matrix is not None
        self.norm: Norm = gain if isinstance(gain, LayerNorm) else None
        if isinstance(gain, torch.Tensor):
            left = gate_up.folded(gain) if fused else gain
            self.norm = row_kernels.NormInput(config.norm_eps, left, gate_up.rounding, gate_up.reads_plain)
        bias, down_bias = (each if each is None else each[0] for each in _biases(blocks, spec, [prefix]))
        activation = activation_of(blocks, spec, prefix)
        self._gated = GatedPart(gate_up, activation, gate_of(spec, down), fused, bias)
        self._down = OutPart(down, down_bias, post, layer.residual_scale)

    def read_by(self, norm: Norm) -> None:
        """Names the norm that reads what `add` gives."""
        self._down = replace(self._down, gain=gain_left(norm))

    def inner(self, residual: Any, ops: Ops[Any, Any, Any]) -> tuple[Any, Any]:
        """The input of its last product, made of the residual; and the residual."""
        read, residual = ops.norm(residual, self.norm)
        return ops.gated(read, self._gated), residual

    def add(self, residual: Any, inner: Any, ops: Ops[Any, Any, Any]) -> Any:
        """The residual with the last product of what `inner` gave added."""
        return ops.add(residual, inner, self._down)


class NoFeedForward:
    """A layer without a feed-forward."""

    projections: tuple[AnyProjection, ...] = ()

    def inner(self, residual: Any, ops: Ops[Any, Any, Any]) -> tuple[None, Any]:
        """Nothing; and the residual."""
        return None, residual

    def add(self, residual: Any, inner: None, ops: Ops[Any, Any, Any]) -> Any:
        """The residual."""
        return residual


class Mixture(Generic[ProjectionT]):
    """The sum of what a row's experts make of its norm, by weight, between norms of these `gains`."""

    def __init__(self, blocks: Blocks[ProjectionT], layer: LayerSpec, prefix: str, gains: Gains) -> None:
        spec, config, (gain, post) = layer.feed_forward, blocks.config, gains
        assert isinstance(spec, ExpertsSpec)
        every, shared = [f"{prefix}.experts.{i}" for i in range(spec.experts)], f"{prefix}.shared_experts"
        # Of those elsewhere too: all read the same rows.
        loaders = GatedLoaders.of(blocks.loader, every, gated=spec.gated)
        joined, share_name = _is_alike(blocks, spec, loaders, shared), f"{shared}.share.weight"
        behind = (share_name,) * (joined and spec.shared_share)
        self.router = _router(blocks, spec, (f"{prefix}.gate", *behind), joined)
        names = [*(every[i] for i in self.router.own), *_spares(self.router, every), *[shared] * joined]
        gate_up, down = _experts((spec.latent or config.hidden_size, spec.width), names, loaders)
        bias, down_bias = _biases(blocks, spec, names)
        activation = activation_of(blocks, spec, prefix)
        gated = GatedPart(gate_up, activation, gate_of(spec, down), False, bias)
        beside = None
        self.projections: tuple[AnyProjection, ...] = (gate_up, down)
        if self.router.updated is not None:
            self.projections += (self.router.updated,)
        if spec.shared_width and not joined:
            shape = (config.hidden_size, spec.shared_width)
            forth, back = GatedLoaders.of(blocks.loader, [shared], gated=spec.gated).pair(shared, shape)
            self.projections += (forth, back)
            plain = FeedForwardSpec(spec.shared_width, spec.activation, gated=spec.gated)
            share = None
            if spec.shared_share:
                share = blocks.machine.router(blocks.weights, [share_name], [1], config.hidden_size)
            beside = BesidePart(GatedPart(forth, gated.activation, gate_of(plain, back), False), back, share)
        out = OutPart(down, down_bias, post, layer.residual_scale)
        latent = _latent(blocks, spec, prefix)
        self.projections += latent or ()
        self.part = ExpertsPart(gated, out, spec.per_row + joined, beside, spec.weighs_input, latent)
        rounding = gate_up.rounding if len(self.router.own) == spec.experts else None
        self.norm: Norm = gain if isinstance(gain, LayerNorm) else None
        if isinstance(gain, torch.Tensor):
            self.norm = row_kernels.NormInput(config.norm_eps, gain, rounding)

    def read_by(self, norm: Norm) -> None:
        """Names the norm that reads what `add` gives."""
        reader = norm if isinstance(norm, row_kernels.NormInput) and norm.rounding is not None else None
        self.part = replace(self.part, out=replace(self.part.out, reader=reader))

    def inner(self, residual: Any, ops: Ops[Any, Any, Any]) -> tuple[Any, Any]:
        """The rows that its experts read, and which take which; and the residual."""
        read, residual = ops.norm(residual, self.norm)
        return ops.chosen(read, self.router, self.part), residual

    def add(self, residual: Any, inner: Any, ops: Ops[Any, Any, Any]) -> Any:
        """The residual with what the experts make of those rows added."""
        rows, routed = inner
        return ops.mix(residual, rows, routed, self.part)


def _latent(
    blocks: Blocks[ProjectionT], spec: ExpertsSpec, prefix: str
) -> tuple[ProjectionT, ProjectionT] | None:
    """The products before and behind experts that read narrower rows than the router."""
    if not spec.latent:
        return None
    hidden, (into, out) = (
        blocks.config.hidden_size,
        (f"{prefix}.latent_{part}.weight" for part in ("in", "out")),
    )
    return (
        blocks.loader([into]).whole(into, (spec.latent, hidden)),
        blocks.loader([out]).whole(out, (hidden, spec.latent)),
    )


def _router(
    blocks: Blocks[ProjectionT], spec: ExpertsSpec, names: tuple[str, ...], shared: bool
) -> RouterPart:
    """`names`: what stands before those of its tensors, and the tensor of the row behind its own, if any."""
    weights, machine, (prefix, *behind) = blocks.weights, blocks.machine, names
    rows = [spec.experts, *[1] * len(behind)]
    weight, tiles = machine.router(weights, [f"{prefix}.weight", *behind], rows, blocks.config.hidden_size)
    bias = correction = None
    if spec.router_bias:
        taken = weights.take(f"{prefix}.bias", (spec.experts,), torch.float32)
        bias = F.pad(taken, (0, weight.shape[0] - spec.experts))
    if spec.corrected:
        name = f"{prefix}.e_score_correction_bias"
        correction = weights.take(name, (spec.experts,), torch.float32)
    own, spread = machine.own_experts(weights, spec.experts), machine.spread
    places = None if spread is None else spread.of(prefix)
    whole = SitePart(f"{prefix}.weight", (spec.experts, blocks.config.hidden_size))
    updated = machine.updated(weight, AdapterSite((whole,), weights.placement), of_experts=True)
    return RouterPart(spec, weight, bias, correction, tiles, own, shared, places=places, updated=updated)


def _spares(router: RouterPart, every: list[str]) -> list[str | None]:
    """The prefixes of the tensors of the experts in this rank's spare slots; None: one is empty."""
    if router.places is None:
        return []
    return [None if expert == NONE else every[expert] for expert in router.places.spares]


def _biases(
    blocks: Blocks[ProjectionT], spec: FeedForwardSpec, places: Sequence[str | None]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """This rank's biases of gate and up [places, 2 width], and of down [places, hidden], if there are such.
    A place without a name is empty.
    """
    if not spec.bias:
        return None, None
    weights, names = blocks.weights, [name for name in places if name is not None]
    forth = [
        torch.cat([weights.take_rows(f"{each}.bias", (spec.width,)) for each in _gate_up(name, spec.gated)])
        for name in names
    ]
    if weights.placement.rank:  # once in the sum over the ranks
        return _in_places(forth, places), None
    back = [weights.take(f"{name}.down_proj.bias", (blocks.config.hidden_size,)) for name in names]
    return _in_places(forth, places), _in_places(back, places)


def _in_places(biases: list[torch.Tensor], places: Sequence[str | None]) -> torch.Tensor:
    """The biases of the places with a name, and any in the others."""
    each = iter(biases)
    return torch.stack([biases[0] if name is None else next(each) for name in places])


def _is_alike(
    blocks: Blocks[ProjectionT], spec: ExpertsSpec, loaders: GatedLoaders[ProjectionT], shared: str
) -> bool:
    """Is there a shared expert that grouped products can take with those of these loaders? A share is then
    the weight of its choice.
    """
    if (
        not blocks.machine.groups_experts
        or spec.shared_width != spec.width
        or spec.per_row == MOST_CHOSEN
        or spec.bias
        or not spec.gated
        or spec.weighs_input
        or spec.latent
    ):
        return False
    return GatedLoaders.of(blocks.loader, [shared]) == loaders


def _experts(
    down: tuple[int, int], names: Sequence[str | None], loaders: GatedLoaders[ProjectionT]
) -> tuple[ProjectionT, ProjectionT]:
    """This rank's part of all of them: gate and up [experts, 2 width, hidden], down [experts, hidden, width].
    A place without a name has room alone.

    They are put in their place one by one: no more than one is there twice. They read the same rows: if one
    is not in FP8, none is.
    """
    whole: tuple[ProjectionT, ...] = ()
    for i, name in enumerate(names):
        if name is None:
            continue
        pair = loaders.pair(name, down)
        whole = whole or tuple(part.room(len(names)) for part in pair)
        for to, part in zip(whole, pair, strict=True):
            to.put(i, part)
    gate_up, back = whole
    return gate_up, back


@dataclass(frozen=True)
class GatedLoaders(Generic[ProjectionT]):
    """The loaders of gate and up, and of down, of all feed-forwards that read the same rows."""

    gate_up: ProjectionLoader[ProjectionT]
    down: ProjectionLoader[ProjectionT]
    gated: bool

    @classmethod
    def of(
        cls,
        loader: Callable[[list[str]], ProjectionLoader[ProjectionT]],
        prefixes: list[str],
        *,
        gated: bool = True,
    ) -> Self:
        """Loaders of all feed-forwards below these prefixes alike; `loader`: of products that read the same
        rows. `gated`: whether they have gates."""
        gate_up = [f"{name}.weight" for prefix in prefixes for name in _gate_up(prefix, gated)]
        return cls(loader(gate_up), loader([_down(each) for each in prefixes]), gated)

    def pair(self, prefix: str, down: tuple[int, int]) -> tuple[ProjectionT, ProjectionT]:
        """This rank's gate and up, stacked; and down, whose whole shape is `down` [hidden, width]."""
        hidden, width = down
        names = [f"{name}.weight" for name in _gate_up(prefix, self.gated)]
        gate_up = self.gate_up.rows(names, [width] * len(names), hidden)
        return gate_up, self.down.columns(_down(prefix), down)


def _gate_up(prefix: str, gated: bool) -> list[str]:
    """The products of gate and up, or of up alone."""
    return [f"{prefix}.{part}_proj" for part in (("gate", "up") if gated else ("up",))]


def _down(prefix: str) -> str:
    """The tensor of down."""
    return f"{prefix}.down_proj.weight"
