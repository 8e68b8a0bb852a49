"""The result of a step for one sequence, the same for every runner."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

from eyas.common.types import PromptTokenLogprobs, TokenLogprob
from eyas.engine.batch.prompt_scores import ScoreRequest
from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.batch.tree import NO_DRAFTS, DraftCounts

NOT_FINITE = -1
"""Or any number below 0: in place of a token whose row's logits hold NaN or infinity."""

NO_FORKS: Mapping[int, tuple[int, TokenLogprob | None]] = {}


class StepResult(NamedTuple):
    """The result of one `SequenceWork`, its verdict done and its rows where they belong.

    `tokens`: what the model says next, in order; none for a chunk that ends before its prompt does.
    `logprobs`: of those tokens, as far as they were asked for. `forks`: by choice, the first token of each
    that starts from this prompt. `features`: [k, head width] of the last k rows that are certain now: all of
    them for a drafter outside the step, the last one where it is handed on, None where nothing is; or
    `DeviceRows`, where they have stayed on the device. `ringed`: the generation as which they are in that
    drafter's GPU already; 0: they are not.
    """

    work: SequenceWork
    tokens: SequenceOf[int] = ()
    logprobs: SequenceOf[TokenLogprob | None] = ()
    drafts: DraftCounts = NO_DRAFTS
    forks: Mapping[int, tuple[int, TokenLogprob | None]] = NO_FORKS
    scores: tuple[ScoreRequest, PromptTokenLogprobs] | None = None
    features: Any = None
    ringed: int = 0

    @property
    def finite(self) -> bool:
        """True if all its logits were finite; else its tokens are no answer."""
        firsts = (token for token, _ in self.forks.values())
        return min(*self.tokens, *firsts, 0, 0) >= 0

    @property
    def rows(self) -> int:
        """The number of rows accepted now: of a round the root's and those of the drafts that were
        accepted.
        """
        return len(self.tokens) if self.work.round else len(self.work.tokens)
