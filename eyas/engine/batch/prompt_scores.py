"""What a request asks of its prompt: which rows' next tokens are scored, and what is known of them so far.

Row i scores token i + 1; the prompt's last row scores none. It knows rows and ids; never tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.common.types import GenerationRequest, PromptLogprobs


@dataclass(frozen=True)
class Asked:
    """Rows to be scored: `row` is the first one's place in its prompt, `places` are theirs in the forward.

    `tokens`: the token after each row. `top`: how many of the most probable ids are wanted beside it.
    """

    row: int
    places: range
    tokens: tuple[int, ...]
    top: int


@dataclass
class PromptScores:
    """Of one prompt, until its caller is told: rows from `start` on, gathered chunk by chunk."""

    prompt: tuple[int, ...]
    start: int
    found: PromptLogprobs

    @classmethod
    def of(cls, request: GenerationRequest) -> PromptScores | None:
        """None if nothing is asked."""
        top = request.params.prompt_logprobs
        if top is None:
            return None
        return cls(request.prompt_ids, request.params.prompt_logprobs_start, PromptLogprobs(top))

    @property
    def next(self) -> int | None:
        """The first row without scores: it and those after it must be computed. None: there is none."""
        row = self.start + len(self.found)
        return row if row < len(self.prompt) - 1 else None

    def asked(self, row: int, places: range) -> Asked | None:
        """Of a forward that has the prompt's rows from `row` on at `places`; None: none is asked for."""
        first = max(row, self.start)
        stop = min(row + len(places), len(self.prompt) - 1)
        if first >= stop:
            return None
        here = places[first - row : stop - row]
        return Asked(first, here, self.prompt[first + 1 : stop + 1], self.found.top)

    def add(self, asked: Asked, found: PromptLogprobs) -> None:
        """Rows come in order; some come again if their sequence lost its place meanwhile."""
        self.found = self.found.joined(found, self.start + len(self.found) - asked.row)
