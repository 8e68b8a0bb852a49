"""Selects the best choices where more are generated than asked for (OpenAI's `best_of`)."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.text.entries import TextDelta


def likeliest(choices: Sequence[TextDelta], drawn: int, kept: int) -> list[TextDelta]:
    """Of each prompt's `drawn` whole choices the `kept` whose tokens are likeliest in the mean, best first.

    Of equals the earlier one is better.
    """
    prompts = (choices[first : first + drawn] for first in range(0, len(choices), drawn))
    return [choice for drawn_ones in prompts for choice in sorted(drawn_ones, key=_cost)[:kept]]


def _cost(choice: TextDelta) -> float:
    return -sum(scored.logprob for scored in choice.logprobs) / max(len(choice.logprobs), 1)
