"""Where a model or a draft head runs: what its weights become there, and what it computes beside its layers.

`torch_ops` has a CPU's, which is the specification, and `device_machine` a GPU's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch

from eyas.engine.adapters.sites import AdapterSite
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import AnyProjection, ProjectionLoader, ProjectionT
from eyas.engine.kernels.products import rows as row_kernels
from eyas.engine.kernels.products.skinny_tiles import Table
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.norm import Gain, LayerNorm
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.parts import JoinPart
from eyas.engine.parallel.expert_places import SpreadExperts


class MtpStates(Protocol):
    """The results of each page's newest certain row at the stages of a draft head, stored in the page itself.

    Of such a head the row before is needed to make the next: it may be one of an earlier step, of a prefix
    that was cached, or of a prompt that another worker sent. Stored with the page, it is wherever the row's
    KV is.
    """

    def before(self, gave: torch.Tensor, stage: int) -> torch.Tensor:
        """gave [R, width]: what the rows gave at a stage -> what the row before each did; zeros: none."""

    def keep(self, gave: torch.Tensor) -> None:
        """Stores what the rows gave at all stages, [R, stages, width]."""


class Machine(ABC, Generic[ProjectionT]):
    """Loads and computes a model with its layers, or a draft head.

    Matrices, as `product` and `logits` take them, are of the machine's own kind. `groups_experts`: whether a
    shared expert as wide as the others is one more of them. `spread`: the places of experts, if some may have
    replicas on other ranks.
    """

    groups_experts: bool
    spread: SpreadExperts | None = None

    @abstractmethod
    def loader(self, weights: WeightSource, names: list[str]) -> ProjectionLoader[ProjectionT]:
        """The loader of the tensors of products that read the same rows."""

    @abstractmethod
    def router(
        self, weights: WeightSource, names: Sequence[str], rows: Sequence[int], hidden: int
    ) -> tuple[Any, Table]:
        """A router's rows [at least `rows`, hidden], of several tensors one below the other, and the tiles of
        their product, as of `RouterPart`.
        """

    @abstractmethod
    def own_experts(self, weights: WeightSource, experts: int) -> range:
        """The numbers of a layer's `experts` that are here, if ranks share them out."""

    @abstractmethod
    def matrix(self, rows: torch.Tensor) -> Any:
        """A matrix of these rows [n, k]."""

    @abstractmethod
    def own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """A rank's share of rows that every rank has."""

    @abstractmethod
    def some_rows(self, matrix: Any, ids: tuple[int, ...]) -> Any:
        """A rank's share of some rows of a matrix of which each rank has as many, in this order."""

    @abstractmethod
    def joining(self, stored: torch.Tensor, part: JoinPart) -> Any:
        """The matrix [hidden, 2 * hidden] behind `join`, as `Ops.joined` takes it."""

    @abstractmethod
    def most_rows(self, layers: Sequence[Any]) -> int:
        """The most rows of which a forward goes through these `DecoderLayer`s by verbs of their own."""

    @abstractmethod
    def ops(
        self, rows: Any, pool: KvPool, eps: float, few_rows: int = 0, *, whole: bool = True
    ) -> Ops[Any, Any, Any]:
        """The verbs of a forward. `few_rows`: as `most_rows` of its layers. `whole`: whether it goes beyond
        the attention of its last layer.
        """

    @abstractmethod
    def bounded(self, rows: Any, unseen: int) -> Any:
        """The rows for a layer that has none below `unseen`."""

    @abstractmethod
    def join(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, part: JoinPart
    ) -> torch.Tensor:
        """features [R, hidden] and the embeddings of tokens [R], side by side, [R, 2 * hidden]."""

    @abstractmethod
    def norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """Rows x [R, n] over their root mean square, times gain [n]."""

    @abstractmethod
    def norms(self, x: torch.Tensor, gains: Sequence[torch.Tensor], eps: float) -> torch.Tensor:
        """Rows x [R, n] in equal parts, each with a norm of its own."""

    @abstractmethod
    def product(self, x: torch.Tensor, matrix: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [R, k] times a matrix [n, k] transposed, plus bias [n]: [R, n]."""

    @abstractmethod
    def picked(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Some rows of x, by their numbers [r]."""

    @abstractmethod
    def logits(self, x: torch.Tensor, head: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [r, hidden], a rank's rows of an output head -> float32 [r, vocab], the same on every rank.

        `out`: where that is put, if it is given.
        """

    @abstractmethod
    def updated(self, matrix: Any, site: AdapterSite, *, of_experts: bool = False) -> AnyProjection | None:
        """A matrix, or a rank's rows of one, whose product adapters update as a whole; None: they do not."""

    @abstractmethod
    def picked_adapters(self, adapters: Any, picked: torch.Tensor | None) -> Any:
        """The adapters of some of a forward's rows, by their numbers [r]; None: of all, in their order."""

    @abstractmethod
    def update_logits(self, logits: torch.Tensor, x: torch.Tensor, head: Any, adapters: Any) -> None:
        """Adds what adapters add to the logits [r, vocab] of rows x [r, hidden]. `head`: as of `updated`."""

    @abstractmethod
    def capped(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(logits / cap), in place."""

    @abstractmethod
    def mtp_states(self, rows: Any, pool: KvPool, stages: int, width: int) -> MtpStates:
        """The stored states, for a forward of accepted rows: `stages` per page, `width` numbers each."""


@dataclass(frozen=True)
class Blocks(Generic[ProjectionT]):
    """The material of a decoder's layers: the whole decoder's `config`, its tensors, and where
    it runs.
    """

    config: ModelConfig
    weights: WeightSource
    machine: Machine[ProjectionT]

    def loader(self, names: list[str]) -> ProjectionLoader[ProjectionT]:
        """The loader of the tensors of products that read the same rows."""
        return self.machine.loader(self.weights, names)

    def norm_before(self, gain: Gain, weight: AnyProjection) -> row_kernels.NormInput | LayerNorm:
        """The norm of what `weight` multiplies, which takes the gain into itself if its format can."""
        if isinstance(gain, LayerNorm):
            return gain
        left = weight.folded(gain)
        return row_kernels.NormInput(self.config.norm_eps, left, weight.rounding, weight.reads_plain)
