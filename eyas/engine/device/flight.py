"""A device's step between its launch and its landing: what was launched for whom, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from eyas.engine.batch.landed import NOT_FINITE, Landed
from eyas.engine.batch.prompt_scores import Asked
from eyas.engine.batch.sequence import Work
from eyas.engine.batch.tree import Drafts
from eyas.engine.device.certain import Certain
from eyas.engine.device.executor import Event
from eyas.engine.device.special import Told
from eyas.engine.device.step import Placed, StepShape
from eyas.engine.sampling.scores import Scores


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
class Results:
    """`words`: int32 on the host. All is valid once `event` (None on a CPU) has passed."""

    words: torch.Tensor
    event: Event | None
    special: Told
    certain: Certain | None = None


@dataclass
class DeviceFlight:
    """`placed`: `works` in the order of their rows. `finish` launches what follows the forward, once.
    `launched`: monotonic seconds.
    """

    shape: StepShape
    works: SequenceOf[Work]
    placed: Placed
    finish: Callable[[], Results]
    scored: SequenceOf[Scored] = ()
    features: Features | None = None
    depth: int | None = None
    launched: float = field(default_factory=time.monotonic)
    _results: Results | None = field(default=None, init=False)

    @property
    def over(self) -> bool:
        """Has the device done it? Asked without waiting."""
        if self._results is None:
            return False
        return self._results.event is None or self._results.event.query()

    def complete(self) -> None:
        """Launches what follows the forward, if that is not done."""
        if self._results is None:
            self._results = self.finish()

    def land(self) -> list[Landed]:
        """Waits for the device. The result is as `StepShape.result_ends` says.

        The chunks come first here: first tokens are delivered before the next tokens of running sequences.
        """
        assert self._results is not None, "complete first"
        if self._results.event is not None:
            self._results.event.synchronize()
        result, shape, special = self._results.words.numpy(), self.shape, self._results.special
        rounds, singles, ends = shape.result_ends
        landed = self._prompts(result[singles:ends].tolist(), special)
        table, walked = _rows(result[:rounds], shape.batch), _rows(result[ends:], shape.batch)
        for i, (work, row, path) in enumerate(zip(self.placed.rounds, table, walked, strict=False)):
            count, depth, nodes, *tokens = row
            if depth < 0:
                depth, tokens[count - 1] = NOT_FINITE - depth, NOT_FINITE
            place, drafts = i * shape.width, Drafts(count - 1, depth, nodes)
            logprobs, forks = special.logprobs(place, path[:count]), special.firsts(place)
            landed.append(Landed(work, tuple(tokens[:count]), logprobs, drafts, forks))
        first = shape.batch * shape.width
        alone = _rows(result[rounds:singles], shape.singles)
        for place, (work, row) in enumerate(zip(self.placed.singles, alone, strict=False), start=first):
            logprobs, forks = special.logprobs(place, (0,)), special.firsts(place)
            token = row[-1] if row[1] >= 0 else NOT_FINITE
            landed.append(Landed(work, (token,), logprobs, forks=forks))
        certain = self._results.certain
        return landed if certain is None else certain.of(landed, len(self.placed.rounds))

    def _prompts(self, tokens: list[int], special: Told) -> list[Landed]:
        """`tokens`: the first token of each chunk that ends its prompt, in order."""
        found, end = [], 0
        for work in self.placed.chunks:
            if work.sample:
                place = self.shape.round_rows + end
                logprobs, forks = special.logprobs(place, (0,)), special.firsts(place)
                found.append(Landed(work, (tokens[end],), logprobs, forks=forks))
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


def _rows(words: np.ndarray, count: int) -> list[list[int]]:
    """`count` rows of equal length."""
    return words.reshape(count, -1).tolist() if count else []
