"""A step between its launch and its landing: what was launched for whom, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from eyas.common.types import TokenLogprob
from eyas.engine.batch.prompt_scores import Asked
from eyas.engine.batch.sequence import Generation, Sequence, Work
from eyas.engine.batch.tree import NO_DRAFTS, Drafts
from eyas.engine.device.executor import Event
from eyas.engine.device.special import First, Told
from eyas.engine.device.step import StepShape
from eyas.engine.kernels.rounds import FACTS
from eyas.engine.sampling.scores import Scores


@dataclass(frozen=True)
class Landed:
    """What a step gave one sequence that it sampled for.

    `tokens`: committed by this step, in order. `extra`: first tokens of the forks that the sequence had at
    launch. `occupancy`: where it sat at launch; if it has another seat now, its KV is gone.
    """

    seq: Sequence
    occupancy: int
    tokens: tuple[int, ...]
    logprobs: SequenceOf[TokenLogprob | None]
    drafts: Drafts = NO_DRAFTS
    extra: SequenceOf[First] = ()


@dataclass(frozen=True)
class Scored:
    """Prompt rows that `generation` asked for; `scores` are valid once the step has landed."""

    generation: Generation
    asked: Asked
    scores: Scores


@dataclass(frozen=True)
class Flight:
    """`result`, int32 on the host, and `special` are valid once `event` (None on a CPU) has passed."""

    shape: StepShape
    works: SequenceOf[Work]
    rounds: SequenceOf[tuple[Sequence, int]]  # with their seats
    ends: SequenceOf[tuple[Sequence, int]]
    result: torch.Tensor
    event: Event | None
    special: Told
    scored: SequenceOf[Scored] = ()

    def land(self) -> list[Landed]:
        """Waits for the device. The result: `kernels.rounds.Verdicts.result`, the ends' tokens, the paths.

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
        paths = split + shape.ends
        landed = []
        for i, ((seq, occupancy), token) in enumerate(
            zip(self.ends, result[split:paths].tolist(), strict=False)
        ):
            place = shape.round_rows + i
            logprobs, extra = self.special.logprobs(place, (0,)), self.special.firsts(place)
            landed.append(Landed(seq, occupancy, (token,), logprobs, extra=extra))
        table = result[:split].reshape(shape.batch, words).tolist()
        walked = result[paths:].reshape(shape.batch, -1).tolist() if shape.batch else []
        for i, ((seq, occupancy), row) in enumerate(zip(self.rounds, table, strict=False)):
            count, depth, nodes, *tokens = row
            place, drafts = i * shape.width, Drafts(count - 1, depth, nodes)
            logprobs, extra = self.special.logprobs(place, walked[i][:count]), self.special.firsts(place)
            landed.append(Landed(seq, occupancy, tuple(tokens[:count]), logprobs, drafts, extra))
        return landed
