"""Selects the best choices where more are generated than asked for (OpenAI's `best_of`)."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.text.entries import TextDelta


def likeliest(choices: Sequence[TextDelta], drawn: int, count: int) -> list[TextDelta]:
    """Returns the `count` best of each prompt's `drawn` choices, by mean log-probability of their tokens.

    The best comes first; of equal choices the earlier one wins.
    """
    prompts = (choices[first : first + drawn] for first in range(0, len(choices), drawn))
    return [choice for drawn_ones in prompts for choice in sorted(drawn_ones, key=_cost)[:count]]


def _cost(choice: TextDelta) -> float:
    return -sum(scored.logprob for scored in choice.logprobs) / max(len(choice.logprobs), 1)
