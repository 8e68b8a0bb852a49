"""The parts that a layer gives to its verbs: weights, and what stands between and behind their products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import torch

from eyas.engine.checkpoint.config import AttentionSpec, ExpertsSpec, LatentSpec
from eyas.engine.formats.projection import ProjectionT
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.experts.grouped_task import GateActivation
from eyas.engine.kernels.experts.route import ChosenExperts
from eyas.engine.kernels.latent.latent_rows import InnerNorms
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products.blocks import NormedRows
from eyas.engine.kernels.products.skinny_tiles import Table
from eyas.engine.layers.activations import Inner
from eyas.engine.parallel.expert_places import ExpertPlaces
from eyas.engine.states.delta import DeltaRule


@dataclass(frozen=True)
class QkvPart(Generic[ProjectionT]):
    """The product of q, k and v, and what they pass until they are stored; how queries then attend.

    `heads`: with the norms of each head, if there are such; without key and value heads it is a product of
    queries alone. `stored`: the heads of its layer in the pool, and their elements (None: as the pool's).
    `row_gains`: of the norms of all heads of q as one row, and of k, [heads, dim] and [kv_heads, dim];
    `centred_gains`: of centred ones of each head; `value_gain` [dim]: of the norm of each head of v. Rotated
    queries are multiplied by `query_gain` [dim], and by the number of their position in `temperatures`
    [positions], float32, if there are such.
    """

    projection: ProjectionT
    spec: AttentionSpec
    heads: row_kernels.HeadLayout
    scores: ScoreScaling
    bias: torch.Tensor | None = None
    row_gains: tuple[torch.Tensor, torch.Tensor] | None = None
    query_gain: torch.Tensor | None = None
    temperatures: torch.Tensor | None = None
    centred_gains: tuple[torch.Tensor, torch.Tensor] | None = None
    value_gain: torch.Tensor | None = None
    stored: tuple[int, int] | None = None

    @property
    def normed_apart(self) -> bool:
        """Whether q, k or v pass norms that `heads` does not have, or there is q alone."""
        gains = self.row_gains, self.centred_gains, self.value_gain
        return not self.heads.kv or any(each is not None for each in gains)


@dataclass(frozen=True)
class DeltaPart(Generic[ProjectionT]):
    """The product of q, k and v of a layer with a state, of the gate behind what its heads read, of the
    shares of corrections, if it corrects, and of the steps; and what becomes of each, by the `rule`.

    Behind a step stands `step_bias`, and the decay's logarithm is its softplus times `rate`: both float32
    [value heads]. `gain`: of the norm of each head before its gate [value size], or behind it of equal groups
    of all heads [values] (None: there is no norm).
    """

    projection: ProjectionT
    rule: DeltaRule
    rate: torch.Tensor
    step_bias: torch.Tensor
    gain: torch.Tensor | None


@dataclass(frozen=True)
class LatentPart:
    """The path behind the product that gives queries, or the row they are made of, and the stored row;
    and the heads that attend to stored rows.

    `norms`: of the inner rows. keys [heads, plain, latent] and values [heads, value, latent]: each head's
    factors, by which its queries go into the latents and what it mixes comes out of them.
    """

    norms: InnerNorms
    spec: LatentSpec
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class GatedPart(Generic[ProjectionT]):
    """The product of gate and up, and the activation behind it; of one feed-forward, or of all experts.

    `activation`: of what the product makes, [m, 2 width], or without a gate [m, width]. `gate`: what kernels
    know of it; None: they do not know it, or there is a bias, which of
    experts alone they add. `fused`: whether this product and the one
    behind it are of numbers themselves, so that kernels may put more into them.
    """

    projection: ProjectionT
    activation: Inner
    gate: GateActivation | None
    fused: bool
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class OutPart(Generic[ProjectionT]):
    """A product whose result is added to the residual, times `scale`; with `post`, the norm of that with this
    gain.

    `gain`: of the norm that reads the sum next, if the weights behind it have not got it. `one_way`: in exact
    arithmetic forwards of few rows are no others, so its bits have no pattern to follow. `to_experts`:
    experts read the sum next, and of one row find its squares themselves. `reader`: the norm that reads the
    sum of experts next, if it rounds.
    """

    projection: ProjectionT
    bias: torch.Tensor | None = None
    post: torch.Tensor | None = None
    scale: float = 1.0
    one_way: bool = False
    gain: torch.Tensor | None = None
    to_experts: bool = False
    reader: row_kernels.NormInput | None = None

    @property
    def bare(self) -> bool:
        """Whether nothing but a bias stands between the product and the residual."""
        return self.post is None and self.scale == 1.0


@dataclass(frozen=True)
class RouterPart:
    """A router's rows and what becomes of its logits, which are float32.

    `weight` [at least experts, hidden], as the machine has it: behind the experts stand a row for the shared
    expert's share, if it is `shared` and takes one, and zeros. `bias`, as wide, and `correction` [experts]:
    float32. `tiles`: of a kernel's product of few rows. `own`: of the experts, if ranks share them out, those
    that are at home here; `places`: where all are, if some may have replicas. `shared`: each row also takes
    the expert behind the others, by its share, or with weight 1. `factors` float32 [experts]: what the
    weights of each expert are multiplied by, if there is something. `updated`: the experts' rows as of
    `Machine.updated`, if adapters may update them.
    """

    spec: ExpertsSpec
    weight: Any
    bias: torch.Tensor | None
    correction: torch.Tensor | None
    tiles: Table
    own: range
    shared: bool
    factors: torch.Tensor | None = None
    places: ExpertPlaces | None = None
    updated: Any = None


@dataclass(frozen=True)
class Routed:
    """Rows, of all ranks if they share experts out, and which experts each of them takes."""

    rows: NormedRows
    chosen: ChosenExperts


@dataclass(frozen=True)
class BesidePart(Generic[ProjectionT]):
    """A feed-forward that every row takes beside its experts. `share`: a matrix as a router's, by the sigmoid
    of whose first row a row's result is multiplied, and the tiles of its product (None: it is taken whole).
    """

    gated: GatedPart[ProjectionT]
    down: ProjectionT
    share: tuple[Any, Table] | None = None


@dataclass(frozen=True)
class ExpertsPart(Generic[ProjectionT]):
    """The experts' products: gate and up [experts, 2 width, hidden] with a bias [experts, 2 width], and back
    [experts, hidden, width] with a bias [experts, hidden], if there are such.

    `per_row`: how many a row takes. `beside`: the feed-forward that every row takes, if there is one that is
    not among them. `weighs_input`: weights multiply what experts read. `latent`: the product that they read
    of a row, and the one behind their sum, if there are such.
    """

    gated: GatedPart[ProjectionT]
    out: OutPart[ProjectionT]
    per_row: int
    beside: BesidePart[ProjectionT] | None = None
    weighs_input: bool = False
    latent: tuple[ProjectionT, ProjectionT] | None = None

    @property
    def _biases(self) -> list[torch.Tensor]:
        return [bias for bias in (self.gated.bias, self.out.bias) if bias is not None]

    def expert(self, place: int) -> list[torch.Tensor]:
        """The tensors of the expert in a place, in an order that is that of all places and ranks."""
        products = (*self.gated.projection.tensors_at(place), *self.out.projection.tensors_at(place))
        return [*products, *(bias[place : place + 1] for bias in self._biases)]

    def put_expert(self, place: int, tensors: list[torch.Tensor]) -> None:
        """Puts what `expert` gave, here or on another rank, into a place."""
        numbers = iter(tensors)
        for projection in (self.gated.projection, self.out.projection):
            projection.put_tensors(place, [next(numbers) for _ in projection.tensors_at(place)])
        for bias in self._biases:
            bias[place : place + 1].copy_(next(numbers))

    @property
    def known(self) -> bool:
        """Whether kernels of one row know all that stands between and behind the products."""
        gate = self.gated.gate
        unclamped = gate is not None and not gate.clamped
        return unclamped and self.gated.bias is None and self.out.bias is None


@dataclass(frozen=True)
class JoinPart:
    """How a draft head joins a token's embedding, of a table [vocab, hidden], with a feature.

    `gains`: of the norms that they pass first, the token's and the feature's; None: there are none. `blank`:
    up to this position an embedding counts as zeros, if there is one. `feature_first`: before the embedding.
    """

    embedding: torch.Tensor
    eps: float
    gains: tuple[torch.Tensor, torch.Tensor] | None = None
    blank: int | None = None
    feature_first: bool = False
