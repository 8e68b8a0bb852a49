"""A feed-forward of many experts, of which each row takes a few (DeepSeekMoE, arXiv 2401.06066).

The plain loop over experts, to which grouped products are held. A row's bits depend on that row alone: an
expert's products have one shape, and what a row's experts give is added in the order in which it chose them.
So it does not matter either which rank an expert is on.
"""

from __future__ import annotations

import torch

from eyas.engine.checkpoint.config import ExpertsSpec, FeedForwardSpec
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.layers.linear import Linear, in_blocks
from eyas.engine.layers.mlp import GatedMlp, GatedRoundings
from eyas.engine.layers.routing import SCORES, Routes, choose, in_order
from eyas.engine.parallel.expert_ranks import ExpertRanks


class Router:
    """Which experts a row takes, and how much of each. All of it is float32: near ties decide much."""

    def __init__(self, spec: ExpertsSpec, weights: WeightSource, prefix: str, hidden: int) -> None:
        self._spec = spec
        stored = weights.take(f"{prefix}.weight", (spec.experts, hidden), torch.float32)
        self._bias = self._correction = None
        if spec.router_bias:
            self._bias = weights.take(f"{prefix}.bias", (spec.experts,), torch.float32)
        if spec.corrected:
            name = f"{prefix}.e_score_correction_bias"
            self._correction = weights.take(name, (spec.experts,), torch.float32)
        self._logits = Linear(stored)

    def __call__(self, x: torch.Tensor) -> Routes:
        """x [R, hidden] -> the routes of its rows; of experts that are equally good, the first."""
        scores = SCORES[self._spec.scores]
        return choose(
            in_blocks(lambda rows: scores(self._logits(rows, self._bias)), x.float()),
            self._spec,
            self._correction,
        )


class Experts:
    """The sum of what a row's experts make of it, by weight, and of what the shared one does.

    `ranks`: over which the experts are spread, whole; None: all are here. Router and shared expert are here.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        weights: WeightSource,
        prefix: str,
        hidden: int,
        ranks: ExpertRanks | None = None,
    ) -> None:
        self._router = Router(spec, weights, f"{prefix}.gate", hidden)
        names = [f"{prefix}.experts.{i}" for i in range(spec.experts)]
        alike = GatedRoundings.of(weights, names)
        here = range(spec.experts) if ranks is None else ranks.own
        self._experts = {i: GatedMlp(spec, weights, names[i], hidden, alike) for i in here}
        self._ranks = ranks
        self._nothing = torch.empty(0, hidden, dtype=weights.placement.dtype, device=weights.placement.device)
        self._per_row = spec.per_row
        self._shared = None
        if spec.shared_width:
            shared = FeedForwardSpec(spec.shared_width, spec.activation)
            self._shared = GatedMlp(shared, weights, f"{prefix}.shared_experts", hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, hidden] -> [R, hidden]."""
        routes = self._router(x)
        if self._ranks is None:
            made = self._made(x, routes.experts)
        else:
            made = self._ranks.made(x, routes.experts, self._made)
        mixed = in_order((made.float() * routes.weights[..., None]).unbind(1)).to(x.dtype)
        return mixed if self._shared is None else mixed.add_(self._shared(x))

    def serve_others(self) -> None:
        """Where this rank has no rows in a step: its experts take those of the other ranks."""
        if self._ranks is not None:
            chosen = torch.empty(0, self._per_row, dtype=torch.int64, device=self._nothing.device)
            self._ranks.made(self._nothing, chosen, self._made)

    def _made(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What the experts make of rows: x [R, hidden], chosen int64 [R, n] -> [R, n, hidden]."""
        made = x.new_empty(*chosen.shape, x.shape[1])
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            made[rows, places] = self._experts[expert](x[rows])
        return made
