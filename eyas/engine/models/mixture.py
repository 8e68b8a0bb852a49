"""A feed-forward of experts on a GPU: the equation of `eyas.engine.layers.experts`, over the verbs of `ops`.

Ranks divide the width of every expert, or share experts out, whole (`LayerContext.sharers`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from eyas.engine.checkpoint.config import ExpertsSpec, FeedForwardSpec, ModelConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import Projection
from eyas.engine.formats.table import loader_of
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products.skinny_tiles import ProductTile, Table
from eyas.engine.layers.activations import ACTIVATIONS
from eyas.engine.models.blocks import Gains
from eyas.engine.models.feed_forward import GatedLoaders, gate_of
from eyas.engine.models.ops.device import DeviceOps
from eyas.engine.models.ops.parts import ExpertsPart, GatedPart, OutPart, RouterPart
from eyas.engine.models.refusal import MOST_CHOSEN

SIDE = 16
"""Rows of the router are filled up to a multiple of it, as products need."""


class MixtureFeedForward:
    """What a row's experts make of its norm, by weight. The router's rows and weights are of the model's
    type, its sums float32.

    `gains`: of the norm before it, and of the one behind it; None: there is none.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: ExpertsSpec,
        weights: WeightSource,
        prefix: str,
        gains: Gains,
    ) -> None:
        (gain, post), loader = gains, partial(loader_of, weights)
        every, shared = [f"{prefix}.experts.{i}" for i in range(spec.experts)], f"{prefix}.shared_experts"
        loaders = GatedLoaders.of(loader, every)  # of those elsewhere too: all read the same rows
        joined = _is_alike(spec, weights, loaders, shared)
        self._router = _router(config, spec, weights, f"{prefix}.gate", joined)
        names = [*(every[i] for i in self._router.own), *[shared] * joined]
        gate_up, down = _experts((config.hidden_size, spec.width), names, loaders)
        bias, down_bias = _biases(config, spec, weights, names)
        gated = GatedPart(gate_up, ACTIVATIONS[spec.activation], gate_of(spec, down), False, bias)
        beside = None
        self.projections: tuple[Projection, ...] = (gate_up, down)
        if spec.shared_width and not joined:
            shape = (config.hidden_size, spec.shared_width)
            forth, back = GatedLoaders.of(loader, [shared]).pair(shared, shape)
            self.projections += (forth, back)
            plain = FeedForwardSpec(spec.shared_width, spec.activation)
            beside = GatedPart(forth, gated.activation, gate_of(plain, back), False), back
        self._part = ExpertsPart(gated, OutPart(down, down_bias, post), spec.per_row + joined, beside)
        rounding = gate_up.rounding if len(self._router.own) == spec.experts else None
        self.norm = None if gain is None else row_kernels.NormInput(config.norm_eps, gain, rounding)

    def __call__(self, residual: Any, ops: DeviceOps[Any, Any]) -> Any:
        """The residual with what it makes of it added."""
        read, residual = ops.norm(residual, self.norm)
        rows = ops.normed(read)
        return ops.mix(residual, rows, ops.route(rows, self._router), self._part)


def _router(
    config: ModelConfig, spec: ExpertsSpec, weights: WeightSource, prefix: str, shared: bool
) -> RouterPart:
    stored = weights.take(f"{prefix}.weight", (spec.experts, config.hidden_size))
    weight = torch.cat([stored, stored.new_zeros(-spec.experts % SIDE, config.hidden_size)])
    bias = correction = None
    if spec.router_bias:
        taken = weights.take(f"{prefix}.bias", (spec.experts,), torch.float32)
        bias = torch.cat([taken, taken.new_zeros(-spec.experts % SIDE)])
    if spec.corrected:
        name = f"{prefix}.e_score_correction_bias"
        correction = weights.take(name, (spec.experts,), torch.float32)
    own = weights.placement.own_experts(spec.experts)
    return RouterPart(spec, weight, bias, correction, router_tiles(*weight.shape), own, shared)


def _biases(
    config: ModelConfig, spec: ExpertsSpec, weights: WeightSource, names: list[str]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of this rank's gate and up [experts, 2 width], and of down [experts, hidden], if there are such."""
    if not spec.bias:
        return None, None
    forth = [
        torch.cat([weights.take_rows(f"{name}.{part}_proj.bias", (spec.width,)) for part in ("gate", "up")])
        for name in names
    ]
    if weights.placement.rank:  # once in the sum over the ranks
        return torch.stack(forth), None
    back = [weights.take(f"{name}.down_proj.bias", (config.hidden_size,)) for name in names]
    return torch.stack(forth), torch.stack(back)


def router_tiles(rows: int, hidden: int) -> Table:
    """For `skinny.ProductLaunch`. A router has few rows: its programs take few of them, and share k."""
    split = next(split for split in (8, 4, 2, 1) if hidden % (split * SIDE) == 0)
    tile = ProductTile(columns=SIDE, depth=128, warps=4, stages=6, split=split)
    return {("linear", padded, rows, hidden): tile for padded in (16, 32, 64, 128)}


def _is_alike(
    spec: ExpertsSpec, weights: WeightSource, loaders: GatedLoaders[Projection], shared: str
) -> bool:
    """Is there a shared expert that grouped products can take with those of these loaders?"""
    if spec.shared_width != spec.width or spec.per_row == MOST_CHOSEN or spec.bias:
        return False
    return GatedLoaders.of(partial(loader_of, weights), [shared]) == loaders


def _experts(
    down: tuple[int, int], names: list[str], loaders: GatedLoaders[Projection]
) -> tuple[Projection, Projection]:
    """This rank's part of all of them: gate and up [experts, 2 width, hidden], down [experts, hidden, width].

    They are put in their place one by one: no more than one is held twice. They read the same rows: if one
    is not in FP8, none is.
    """
    whole: tuple[Projection, ...] = ()
    for i, name in enumerate(names):
        pair = loaders.pair(name, down)
        whole = whole or tuple(part.room(len(names)) for part in pair)
        for to, part in zip(whole, pair, strict=True):
            to.put(i, part)
    gate_up, back = whole
    return gate_up, back
