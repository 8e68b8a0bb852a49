"""A step between its launch and its landing: what was launched for whom, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from eyas.common.types import TokenLogprob
from eyas.engine.batch.prompt_scores import Asked
from eyas.engine.batch.sequence import Generation, Sequence, Work
from eyas.engine.batch.tree import NO_DRAFTS, Drafts
from eyas.engine.device.executor import Event
from eyas.engine.device.step import StepShape
from eyas.engine.kernels.rounds import FACTS
from eyas.engine.sampling.scores import Scores


@dataclass(frozen=True)
class Landed:
    """What a step gave one sequence that it sampled for.

    `tokens`: committed by this step, in order. `extra`: first tokens of the sequence's forks. `occupancy`:
    where it sat at launch; if it has another seat now, its KV is gone.
    """

    seq: Sequence
    occupancy: int
    tokens: tuple[int, ...]
    logprobs: SequenceOf[TokenLogprob | None]
    drafts: Drafts = NO_DRAFTS
    extra: SequenceOf[tuple[int, TokenLogprob | None]] = ()


@dataclass(frozen=True)
class Sampling:
    """What the host chose, for a step that is sampled there.

    `tokens`: int32, one for each of `StepShape.sampled`. The others by the row of a round's root, or of a
    chunk's end, among those: the logprobs of the tokens that this round commits, and the forks' first tokens.
    """

    tokens: np.ndarray
    logprobs: dict[int, list[TokenLogprob | None]]
    extra: dict[int, list[tuple[int, TokenLogprob | None]]]


@dataclass(frozen=True)
class Scored:
    """Prompt rows that `generation` asked for; `scores` are valid once the step has landed."""

    generation: Generation
    asked: Asked
    scores: Scores


@dataclass(frozen=True)
class Flight:
    """`result`: int32 on the host, valid once `event` (None on a CPU) has passed. `launched`: monotonic
    seconds.
    """

    shape: StepShape
    works: SequenceOf[Work]
    rounds: SequenceOf[tuple[Sequence, int]]  # with their seats
    ends: SequenceOf[tuple[Sequence, int]]
    result: torch.Tensor
    event: Event | None
    sampling: Sampling | None = None
    scored: SequenceOf[Scored] = ()
    launched: float = field(default_factory=time.monotonic)

    def land(self) -> list[Landed]:
        """Waits for the device. The result: `kernels.rounds.Verdicts.result`, then the ends' tokens.

        The ends come first here: those who wait for a first token hear of it before the others of theirs.
        What was asked of prompts is added to what is known of them.
        """
        if self.event is not None:
            self.event.synchronize()
        for one in self.scored:
            one.generation.scored(one.asked, one.scores.packed())
        result, shape = self.result.numpy(), self.shape
        words = FACTS + shape.width
        split = shape.batch * words
        landed = []
        for i, ((seq, occupancy), token) in enumerate(zip(self.ends, result[split:].tolist(), strict=False)):
            landed.append(self._landed(seq, occupancy, (token,), shape.round_rows + i))
        table = result[:split].reshape(shape.batch, words).tolist()
        for i, ((seq, occupancy), row) in enumerate(zip(self.rounds, table, strict=False)):
            count, depth, nodes, *tokens = row
            drafts = Drafts(count - 1, depth, nodes)
            landed.append(self._landed(seq, occupancy, tuple(tokens[:count]), i * shape.width, drafts))
        return landed

    def _landed(
        self, seq: Sequence, occupancy: int, tokens: tuple[int, ...], row: int, drafts: Drafts = NO_DRAFTS
    ) -> Landed:
        if self.sampling is None:
            return Landed(seq, occupancy, tokens, (), drafts)
        logprobs, extra = self.sampling.logprobs.get(row, ()), self.sampling.extra.get(row, ())
        return Landed(seq, occupancy, tokens, logprobs, drafts, extra)
