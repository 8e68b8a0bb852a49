"""DSpark heads: DFlash's block, and drafts that know the draft before them.

A Markov head adds to the logits of each draft what the token before it makes likely, by a product of low rank
(DSpark, arXiv 2607.05147; docs/draft-heads.md). `DraftConfig.variants` names its type: "vanilla", "gated" by
the row, or "rnn", which remembers all drafts before. The confidence head is not read: it says how much of a
block is worth verifying, which running acceptance says here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import DraftConfig, ModelConfig
from eyas.engine.checkpoint.values import Raw
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.formats.projection import ProjectionT
from eyas.engine.models import dflash
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.heads import NO_SHAPE, flat, stored_shapes
from eyas.engine.models.keys import MOST_COLUMNS, Fit
from eyas.engine.models.ops.machine import Machine

NAME = "a DSpark head"
TYPES = ("vanilla", "gated", "rnn")
RANKS = 16

_EMBEDDING = "markov_head.markov_w1.weight"


def describe_head(raw: Raw, folder: Path, target: ModelConfig, load_format: str) -> DraftConfig | None:
    """The head of these tensors; None if they are another kind's. ConfigError if it does not fit `target`.

    A "dummy" one has no tensors yet: its config.json says that it is one.
    """
    own = flat(raw)
    rank = values.whole(own, "markov_rank", 0, most=MOST_COLUMNS)
    if load_format != "dummy":
        rank = stored_shapes(own, folder, spelling).get(_EMBEDDING, NO_SHAPE)[1]
    if not rank:
        return None
    config = dflash.describe_head({"sample_from_anchor": True, **raw}, folder, target, load_format)
    if config is None or config.block is None:
        return None
    kind, fit = own.get("markov_head_type") or TYPES[0], Fit(folder)
    fit.wants(kind in TYPES, f"its markov_head_type {values.said(kind)} is not supported")
    fit.wants(rank % RANKS == 0, f"its markov_rank is {rank}: products take a multiple of {RANKS}")
    fit.settle()
    return dataclasses.replace(
        config,
        algorithm="dspark",
        variants=frozenset({kind}),
        own_outputs=True,  # W2 knows which ids they are about
        block=dataclasses.replace(config.block, coupling=rank),
    )


spelling, load_tap = dflash.spelling, dflash.load_tap


class DSparkDraft(dflash.DFlashDraft[ProjectionT]):
    """The `CoupledDraftModel`."""

    def __init__(
        self, config: DraftConfig, weights: WeightSource, ends: ModelEnds, machine: Machine[ProjectionT]
    ) -> None:
        super().__init__(config, weights, ends, machine)
        self._markov = MarkovHead(config, weights, machine)

    def coupling(self, rows: torch.Tensor) -> MarkovChain:
        """rows [B, drafts, hidden], which `logits` are made of."""
        return MarkovChain(self._markov, rows)


class MarkovHead:
    """W1 [vocab, rank] of the token before a draft, W2 [draft vocab, rank], and for some types a product
    between them, with a bias.
    """

    def __init__(self, config: DraftConfig, weights: WeightSource, machine: Machine[Any]) -> None:
        assert config.block is not None
        rank, hidden = config.block.coupling, config.decoder.hidden_size
        self.machine, [self.kind] = machine, config.variants
        self.first = weights.take(_EMBEDDING, (config.decoder.vocab_size, rank))
        shape = (config.draft_vocab_size, rank)
        self.last = machine.matrix(weights.take_rows("markov_head.markov_w2.weight", shape))
        self.between: tuple[Any, torch.Tensor] | None = None
        if self.kind != "vanilla":
            name, own = ("gate_proj", 1) if self.kind == "gated" else ("joint_proj", 3)
            shape = own * rank, hidden + (rank if self.kind == "gated" else 2 * rank)
            matrix = machine.matrix(weights.take(f"markov_head.{name}.weight", shape))
            self.between = matrix, weights.take(f"markov_head.{name}.bias", shape[:1])


class MarkovChain:
    """The `DraftCoupling` of one pass, whose rows are [B, drafts, hidden]."""

    def __init__(self, head: MarkovHead, rows: torch.Tensor) -> None:
        self._head, self._rows = head, rows
        self._state = rows.new_zeros(rows.shape[0], head.first.shape[1])

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, draft: int, before: torch.Tensor) -> torch.Tensor:
        """logits + W2 of what the token before gives."""
        head, row = self._head, self._rows[:, draft]
        latent = head.first.index_select(0, before)
        if head.kind == "gated":
            latent = latent * self._mixed(row, latent).sigmoid()
        elif head.kind == "rnn":
            gate, candidate, out = self._mixed(self._state, latent, row).chunk(3, 1)
            gate, latent = gate.sigmoid(), out.tanh()
            self._state = gate * self._state + (1 - gate) * candidate.tanh()
        return logits + head.machine.logits(latent, head.last)

    def _mixed(self, *parts: torch.Tensor) -> torch.Tensor:
        """The product between, of these side by side."""
        assert self._head.between is not None
        return self._head.machine.product(torch.cat(parts, 1), *self._head.between)


load_draft = DSparkDraft
