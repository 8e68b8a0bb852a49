"""A device's step between its launch and its landing: what was launched for whom, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from eyas.common.types import TokenLogprob
from eyas.engine.batch.landed import NO_FORKS, Landed
from eyas.engine.batch.prompt_scores import Asked
from eyas.engine.batch.sequence import Work
from eyas.engine.batch.tree import NO_DRAFTS, Drafts
from eyas.engine.device.executor import Event
from eyas.engine.device.step import StepShape
from eyas.engine.kernels.rounds import FACTS
from eyas.engine.sampling.scores import Scores


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
    """Prompt rows of `work` that were asked for; `scores` are valid once the step has landed."""

    work: Work
    asked: Asked
    scores: Scores


@dataclass(frozen=True)
class Features:
    """Float32 [len(works), head width], of the last row of each; valid once the step has landed."""

    works: SequenceOf[Work]
    rows: torch.Tensor


@dataclass(frozen=True)
class DeviceFlight:
    """`rounds` and `chunks`: `works` in the order of their rows. `result`: int32 on the host, valid once
    `event` (None on a CPU) has passed. `launched`: monotonic seconds.
    """

    shape: StepShape
    works: SequenceOf[Work]
    rounds: SequenceOf[Work]
    chunks: SequenceOf[Work]
    result: torch.Tensor
    event: Event | None
    sampling: Sampling | None = None
    scored: SequenceOf[Scored] = ()
    features: Features | None = None
    launched: float = field(default_factory=time.monotonic)

    def land(self) -> list[Landed]:
        """Waits for the device. The result: `kernels.rounds.Verdicts.result`, then the ends' tokens.

        The chunks come first here: those who wait for a first token hear of it before the others of theirs.
        """
        if self.event is not None:
            self.event.synchronize()
        result, shape = self.result.numpy(), self.shape
        words = FACTS + shape.width
        split = shape.batch * words
        landed = self._prompts(result[split:].tolist())
        table = result[:split].reshape(shape.batch, words).tolist()
        for i, (work, row) in enumerate(zip(self.rounds, table, strict=False)):
            count, depth, nodes, *tokens = row
            landed.append(
                self._landed(work, tuple(tokens[:count]), i * shape.width, Drafts(count - 1, depth, nodes))
            )
        return landed

    def _prompts(self, tokens: list[int]) -> list[Landed]:
        """`tokens`: the first token of each chunk that ends its prompt, in order."""
        found, end = [], 0
        for work in self.chunks:
            if work.sample:
                found.append(self._landed(work, (tokens[end],), self.shape.round_rows + end))
                end += 1
            else:
                found.append(Landed(work))
        scores = {id(one.work): (one.asked, one.scores.packed()) for one in self.scored}
        features = self._features()
        if not scores and not features:
            return found
        return [
            one._replace(scores=scores.get(id(one.work)), features=features.get(id(one.work)))
            for one in found
        ]

    def _features(self) -> dict[int, torch.Tensor]:
        if self.features is None:
            return {}
        return {
            id(work): row[None] for work, row in zip(self.features.works, self.features.rows, strict=True)
        }

    def _landed(self, work: Work, tokens: tuple[int, ...], row: int, drafts: Drafts = NO_DRAFTS) -> Landed:
        if self.sampling is None:
            return Landed(work, tokens, (), drafts)
        forks = NO_FORKS
        if row in self.sampling.extra:
            forks = dict(zip(work.seq.forks, self.sampling.extra[row], strict=True))
        return Landed(work, tokens, self.sampling.logprobs.get(row, ()), drafts, forks)
