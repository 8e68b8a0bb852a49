"""Prompt log-probabilities: which rows of a prompt are scored, and the scores so far.

Row i scores token i + 1; the prompt's last row scores none.
"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.common.types import GenerationRequest, PromptIds, PromptTokenLogprobs


@dataclass(frozen=True)
class ScoreRequest:
    """Rows to be scored. `row`: the first one's index in its prompt. `places`: their rows in the forward.

    `tokens`: the token after each row. `top`: how many of the most probable ids are wanted as well.
    """

    row: int
    places: range
    tokens: PromptIds
    top: int
    experts: bool = False  # the experts of the rows are returned too


@dataclass
class PromptScores:
    """The scores of one prompt from row `start` on, gathered chunk by chunk until they are sent."""

    prompt: PromptIds
    start: int
    logprobs: PromptTokenLogprobs
    experts: bool = False

    @classmethod
    def of(cls, request: GenerationRequest) -> PromptScores | None:
        """Empty scores for a request; None if it asks for none."""
        params = request.params
        if params.prompt_logprobs is None:
            return None
        known = PromptTokenLogprobs(params.prompt_logprobs)
        return cls(request.prompt_ids, params.prompt_logprobs_start, known, params.prompt_experts)

    @property
    def next(self) -> int | None:
        """The first row without a score: this row and all later ones must be computed. None: all have one."""
        row = self.start + len(self.logprobs)
        return row if row < len(self.prompt) - 1 else None

    def score_request(self, row: int, places: range) -> ScoreRequest | None:
        """The rows to score in a forward that has the prompt's rows from `row` on at `places`; None: none."""
        first = max(row, self.start)
        stop = min(row + len(places), len(self.prompt) - 1)
        if first >= stop:
            return None
        here = places[first - row : stop - row]
        return ScoreRequest(first, here, self.prompt[first + 1 : stop + 1], self.logprobs.top, self.experts)

    def add(self, request: ScoreRequest, logprobs: PromptTokenLogprobs) -> None:
        """Adds scores. Rows come in order; some are repeated if their sequence was preempted meanwhile."""
        self.logprobs = self.logprobs.joined(logprobs, self.start + len(self.logprobs) - request.row)
