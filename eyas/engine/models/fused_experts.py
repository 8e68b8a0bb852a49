"""Experts on a GPU: the equations of `eyas.engine.layers.experts`, whose results are its test.

The router's product, its choice, the order of the experts' rows, two grouped products, and their sum by
weight; launches whose shapes follow from the number of rows alone. Ranks divide the width of every expert, or
share experts, whole (`LayerContext.sharers`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from eyas.engine.checkpoint.config import ExpertsSpec, ModelConfig
from eyas.engine.checkpoint.weights import Weights
from eyas.engine.formats.projection import Projection
from eyas.engine.kernels.experts import combine, route
from eyas.engine.kernels.experts.grouped_task import Gate
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products import single
from eyas.engine.kernels.products.blocks import Normed, StoredWeight
from eyas.engine.kernels.products.skinny import empty_padded
from eyas.engine.kernels.products.skinny_tiles import Table, Tile
from eyas.engine.models.feed_forward import GATES, GatedLoaders
from eyas.engine.models.fused_residual import NarrowRows, ScaledRows, add_over_ranks, normed_rows
from eyas.engine.models.fused_step import Forward, product_float32
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.refusal import MOST_CHOSEN

SIDE = 16
"""Rows of the router are filled up to a multiple of it, as products need."""


class FusedExperts:
    """A layer's feed-forward. The router's rows and weights are of the model's type, its sums float32."""

    def __init__(
        self, config: ModelConfig, spec: ExpertsSpec, weights: Weights, prefix: str, gain: torch.Tensor
    ) -> None:
        self._spec = spec
        stored = weights.take(f"{prefix}.gate.weight", (spec.experts, config.hidden_size))
        self._router = torch.cat([stored, stored.new_zeros(-spec.experts % SIDE, config.hidden_size)])
        self._router_tiles = router_tiles(*self._router.shape)
        self._correction = None
        if spec.corrected:
            name = f"{prefix}.gate.e_score_correction_bias"
            self._correction = weights.take(name, (spec.experts,), torch.float32)
        self._own = weights.placement.own_experts(spec.experts)
        every, shared = [f"{prefix}.experts.{i}" for i in range(spec.experts)], f"{prefix}.shared_experts"
        loaders = GatedLoaders.of(weights, every)  # of those elsewhere too: all read the same rows
        self._joined = _is_alike(spec, weights, loaders, shared)
        names = [*(every[i] for i in self._own), *[shared] * self._joined]
        self._gate_up, self._down = _experts((config.hidden_size, spec.width), names, loaders)
        self._per_row = spec.per_row + self._joined
        self._gate = Gate(GATES[spec.activation], self._down.rounding)
        rounding = self._gate_up.rounding if len(self._own) == spec.experts else None
        self.norm = row_kernels.Norm(config.norm_eps, gain, rounding)
        self._shared = None
        if spec.shared_width and not self._joined:
            shape = (config.hidden_size, spec.shared_width)
            self._shared = GatedLoaders.of(weights, [shared]).pair(shared, shape)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Its weights; the shared expert's last."""
        own = self._gate_up, self._down
        return own if self._shared is None else (*own, *self._shared)

    def __call__(self, residual: Any, ops: Ops[Any, Any]) -> Any:
        """The residual with what it makes of it added."""
        return ops.experts(residual, self)

    def narrow(self, residual: NarrowRows, step: Forward) -> NarrowRows:
        """At most 128 rows, with what it makes of their norm added to them."""
        launch = step.context.launch
        normed = normed_rows(residual.x, self.norm, step)
        if step.context.group.ranks > 1 or step.everyones is not None:
            return add_over_ranks(self.wide(normed, step), residual, step)
        chosen = self._chosen(normed, step)
        if self._is_single(normed, step):
            inner = self._inner_of_one_row(normed, chosen, step)
            return NarrowRows(*single.back_add(inner, self._down.weight, chosen, residual.x, launch.pdl))
        made = self._made(normed, chosen, step)
        return NarrowRows(*combine.combine_add(*made, residual.x, launch.pdl, launch.exact))

    def wide(self, normed: Normed, step: Forward) -> torch.Tensor:
        """-> what is added to the residual, [m, hidden], but for the sum over the ranks."""
        if step.everyones is not None:
            return self._over_sharers(normed, step.everyones, step)
        launch, chosen = step.context.launch, self._chosen(normed, step)
        if self._is_single(normed, step):
            inner = self._inner_of_one_row(normed, chosen, step)
            return single.back(inner, self._down.weight, chosen, launch.pdl)
        return combine.combine(*self._made(normed, chosen, step), launch.pdl, launch.exact)

    def _over_sharers(self, normed: Normed, kv_rows: torch.Tensor, step: Forward) -> torch.Tensor:
        """As `wide`: every sharer's rows come together, each computes what its own experts make of them, and
        the sums go back to the rows' owners.
        """
        sharers, launch, (m, hidden) = step.context.sharers, step.context.launch, normed.plain.shape
        everyone = empty_padded(m * sharers.ranks, hidden, like=normed.plain)
        sharers.gather(normed.plain, everyone)
        rows = Normed(everyone)
        held = route.Held(self._own, range(m * sharers.rank, m * (sharers.rank + 1)), kv_rows)
        router = (self._spec, self._correction, self._joined)
        uniform = step.context.uniform_experts
        chosen = route.choose_held(self._logits(rows, step), router, held, uniform=uniform, pdl=launch.pdl)
        made = self._made_by_own(rows, chosen, step)
        sums = combine.combine_held(made, chosen.weights, chosen.experts, launch.pdl)
        added = sharers.sum_for_owners(sums, empty_padded(m, hidden, like=sums))
        beside = self._beside(normed, step)
        return added if beside is None else added.add_(beside)

    def exact_wide(self, residual: ScaledRows, step: Forward) -> ScaledRows:
        """As `narrow`, of any number of rows."""
        normed = normed_rows(residual.x, self.norm, step)
        return residual.plus(self.wide(normed, step), None, self.norm.eps, step)

    def _chosen(self, normed: Normed, step: Forward) -> route.Chosen:
        """What each row takes."""
        uniform, pdl = step.context.uniform_experts, step.context.launch.pdl
        logits = self._logits(normed, step)
        return route.choose(
            logits, self._spec, self._correction, shared=self._joined, uniform=uniform, pdl=pdl
        )

    def _logits(self, normed: Normed, step: Forward) -> torch.Tensor:
        """The router's product, float32 [m, at least experts]."""
        context, rows = step.context, normed.plain
        router = StoredWeight(self._router)
        if single.can_take(rows, router) and not context.launch.exact:
            logits = single.dense(rows, router, context.launch.pdl, torch.float32)
        else:
            logits = rows.new_empty(rows.shape[0], self._router.shape[0], dtype=torch.float32)
            product_float32(rows, self._router, logits, replace(context.launch, tiles=self._router_tiles))
        return logits

    def _is_single(self, normed: Normed, step: Forward) -> bool:
        """Whether there is one row, for which weights can wait; a shared expert must be one of the others."""
        if self._shared is not None or not single.can_round(self._down.weight):
            return False
        products, read = step.context.products, normed.read_by(self._gate_up.rounding)
        forth, back = self._gate_up.weight, self._down.weight
        return products.is_single(read, forth) and products.is_single(read, back, self._per_row)

    def _inner_of_one_row(self, normed: Normed, chosen: route.Chosen, step: Forward) -> torch.Tensor:
        """What the gates of its experts pass, [experts of a row, width]."""
        weight, pdl = self._gate_up.weight, step.context.launch.pdl
        read = weight.read(normed.read_by(weight.rounding), pdl)
        return single.gated(read, weight, chosen.experts, self._gate.gelu, pdl)

    def _made(
        self, normed: Normed, chosen: route.Chosen, step: Forward
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What each row's experts make of it [m * those of a row, hidden], and their weights; what the shared
        one does, if it is not among them.
        """
        made = self._made_by_own(normed, chosen, step)
        return made, chosen.weights, self._beside(normed, step)

    def _beside(self, normed: Normed, step: Forward) -> torch.Tensor | None:
        """What the shared expert makes of rows, if it is not among the others."""
        if self._shared is None:
            return None
        gate_up, down = self._shared
        gate = Gate(self._gate.gelu, down.rounding)
        inner = gate_up.gated(normed.read_by(gate_up.rounding), step.context.products, gate)
        return step.product(inner, down)

    def _made_by_own(self, normed: Normed, chosen: route.Chosen, step: Forward) -> torch.Tensor:
        """[m * those of a row, hidden]; nothing where a choice is of none."""
        products = step.context.products
        gate_up, down = self._gate_up.weight, self._down.weight
        order = products.group(chosen.experts, (gate_up, down))
        inner = products.gate_up(normed.read_by(gate_up.rounding), gate_up, order, self._per_row, self._gate)
        return products.down(inner, down, order)


def router_tiles(rows: int, hidden: int) -> Table:
    """For `skinny.Launch`. A router has few rows: its programs take few of them, and share k."""
    split = next(split for split in (8, 4, 2, 1) if hidden % (split * SIDE) == 0)
    tile = Tile(columns=SIDE, depth=128, warps=4, stages=6, split=split)
    return {("linear", padded, rows, hidden): tile for padded in (16, 32, 64, 128)}


def _is_alike(spec: ExpertsSpec, weights: Weights, loaders: GatedLoaders, shared: str) -> bool:
    """Is there a shared expert that grouped products can take with those of these loaders?"""
    if spec.shared_width != spec.width or spec.per_row == MOST_CHOSEN:
        return False
    return GatedLoaders.of(weights, [shared]) == loaders


def _experts(down: tuple[int, int], names: list[str], loaders: GatedLoaders) -> tuple[Projection, Projection]:
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
