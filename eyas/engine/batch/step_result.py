"""What a step gave one sequence, whichever runner made the step.

It knows ids and counts; features are whatever tensors the runner has, and only their rows count here.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

from eyas.common.types import PromptTokenLogprobs, TokenLogprob
from eyas.engine.batch.prompt_scores import Asked
from eyas.engine.batch.sequence import Work
from eyas.engine.batch.tree import NO_DRAFTS, Drafts

NOT_FINITE = -1
"""Or any number below 0: in place of a token whose row's logits hold NaN or infinity."""

NO_FORKS: Mapping[int, tuple[int, TokenLogprob | None]] = {}


class StepResult(NamedTuple):
    """The result of one `Work`, its verdict done and its rows where they belong.

    `tokens`: what the model says next, in order; none for a chunk that ends before its prompt does.
    `logprobs`: of those tokens, as far as they were asked for. `forks`: by choice, the first token of each
    that starts from this prompt. `features`: [k, head width] of the last k rows that are certain now: all of
    them for a drafter outside the step, the last one where it is handed on, None where nothing is; or
    `KeptRows`, where they have stayed on the device. `ringed`: the generation as which they are in that
    drafter's GPU already; 0: they are not.
    """

    work: Work
    tokens: SequenceOf[int] = ()
    logprobs: SequenceOf[TokenLogprob | None] = ()
    drafts: Drafts = NO_DRAFTS
    forks: Mapping[int, tuple[int, TokenLogprob | None]] = NO_FORKS
    scores: tuple[Asked, PromptTokenLogprobs] | None = None
    features: Any = None
    ringed: int = 0

    @property
    def finite(self) -> bool:
        """Were all its logits numbers? Else what they gave is no answer."""
        firsts = (token for token, _ in self.forks.values())
        return min(*self.tokens, *firsts, 0, 0) >= 0

    @property
    def rows(self) -> int:
        """How many rows are certain now: of a round the root's and those of the drafts that were accepted."""
        return len(self.tokens) if self.work.round else len(self.work.tokens)
