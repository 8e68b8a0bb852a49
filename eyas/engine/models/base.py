"""The interface of models and draft heads to the loop, the drafters and the start.

A model is a `DecoderModel`. A head is two things: a `FeatureTap` beside the target, and a `DraftModel`
wherever drafts are made. One feature row per committed token passes between them. The rows of a forward are a
`ForwardBatch` of `eyas.engine.attention.forward` in plain torch, `eyas.engine.batch.rows.ForwardRows` on a
device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from eyas.engine.checkpoint.config import DraftBlock, ModelConfig
from eyas.engine.formats.projection import AnyProjection
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool

RowsT = TypeVar("RowsT", contravariant=True)
FinalNorm = Callable[[torch.Tensor], torch.Tensor]
"""The norm before a target's output head: residual rows [r, hidden] -> [r, hidden]."""


class DecoderModel(Protocol[RowsT]):
    """A target model over a paged pool. It keeps no state between calls, and on a device reads nothing of it:
    its launches can be captured.
    """

    config: ModelConfig

    @property
    def kv_format(self) -> KvFormat:
        """The format of the pool that `forward` takes."""

    def brief(self) -> DecoderModel[RowsT]:
        """A model that launches each kernel that this one does, in as few layers as it can."""

    def may_drop(self, count: int, taps: tuple[int, ...]) -> bool:
        """True if a forward of `count` rows with these taps can leave out rows in its last layer."""

    def forward(
        self, rows: RowsT, pool: KvPool, taps: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs R rows and writes their KV.

        Returns the residual rows, for `logits` (on a device those that are `leaving`), and
        [R, len(taps) * hidden]: the residual rows entering each tapped layer, before any norm (past the last:
        leaving it).
        """

    def logits(
        self,
        residual: torch.Tensor,
        picked: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        adapters: Any = None,
    ) -> torch.Tensor:
        """Rows as `forward` gave them, all or those `picked` (integers [r]; int32 on a device) -> float32
        [r, vocab], in `out` if it is given. `adapters`: of the rows of that forward, as these have them.
        """


class FeatureTap(Protocol):
    """A head's half beside the target. `layers`: the taps that the target's `forward` is given."""

    layers: tuple[int, ...]

    def features(self, tapped: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """tapped [R, len(layers) * hidden], in the order of `layers`, and the tokens [R] of these rows -> one
        feature row each, [R, width].
        """


class Drafted(NamedTuple):
    """The results of a draft model for R rows: `rows` for its `logits`, `features` [R, ...] for the next."""

    rows: torch.Tensor
    features: torch.Tensor


class DraftModel(Protocol[RowsT]):
    """A head's half that drafts, over a pool of its own.

    Draft row i joins the feature of position i and the token of position i + 1, and stands at position i; who
    shifts the tokens is the drafter's business. `token_map`: the target's id of each id that `logits` is
    about, int64 [draft vocab]; None: they are the same. `block`: of a head that drafts all depths in one
    pass; None: it drafts token after token.

    `whole`: it is a model by itself. Its row i is of the token of position i alone: a certain row's is its
    feature, and the row of the root comes before the first draft (`rows.depth` 1).
    """

    token_map: torch.Tensor | None
    block: DraftBlock | None
    whole: bool

    def forward(self, features: torch.Tensor, tokens: torch.Tensor, rows: RowsT, pool: KvPool) -> Drafted:
        """features [R, width] joined with tokens [R], int64 or on a device int32; writes the KV of `rows`.

        Certain rows (`rows.depth` 0) have the target's features, others the `Drafted.features` of the row
        before them on their path.

        The rows of a `block` come in one forward (`rows.depth` 1), each sequence's one after the other, their
        tokens as the block says; `features` [sequences, ...] are then the `Drafted.features` of each one's
        newest certain row. Of a block that is rooted nothing that certain rows give is read.
        """

    def keep(self, features: torch.Tensor, tokens: torch.Tensor, rows: RowsT, pool: KvPool) -> None:
        """Writes the KV of accepted rows, as `forward` does; there is no result."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """`Drafted.rows`, all or some [r, ...] -> float32 [r, draft vocab]."""


class DraftCoupling(Protocol):
    """The scores of one pass's drafts behind those before them. It is asked for draft 0, 1, ... in turn."""

    def __call__(self, logits: torch.Tensor, draft: int, before: torch.Tensor) -> torch.Tensor:
        """logits float32 [B, draft vocab] of a draft of B sequences, and the target's ids of the tokens
        before it, [B], int64 or on a device int32 -> its scores, of the logits' shape.
        """


class AdaptedDraftModel(DraftModel[RowsT], Protocol[RowsT]):
    """A `DraftModel` whose layers' matrices adapters may update, for rows that have one."""

    @property
    def projections(self) -> list[AnyProjection]:
        """The weights of its layers."""


class MaskedDraftModel(DraftModel[RowsT], Protocol[RowsT]):
    """A `DraftModel` whose newest certain row gives the first draft of its block. Rows of the others are as
    certain ones to it, and have the mask token and the feature `masked` [1, width].
    """

    masked: torch.Tensor


class CoupledDraftModel(DraftModel[RowsT], Protocol[RowsT]):
    """A `DraftModel` whose block has a `coupling`."""

    def coupling(self, rows: torch.Tensor) -> DraftCoupling:
        """rows [B, drafts, ...], of which `logits` are made: those of the drafts of B sequences."""
