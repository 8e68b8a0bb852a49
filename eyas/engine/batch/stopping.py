"""The end of a generation: end-of-turn ids, stop ids and length limits. The gateway handles stop strings.

`output_len` is always the number of tokens that a choice has emitted before the token in question. The first
`min_tokens` tokens cannot end a generation: ending ids are banned there, and ignored if one appears. With a
grammar, masks say where an ending id may stand, so wherever one stands it ends the output.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from eyas.common.params import SamplingParams
from eyas.common.types import FinishCause


def banned_ids(params: SamplingParams, eos_ids: Collection[int], output_len: int) -> tuple[int, ...]:
    """Ids that must not be sampled as the next token: those that would end the output too early."""
    early = output_len < params.min_tokens and params.grammar is None
    return ending_ids(params, eos_ids) if early else ()


def finish(
    params: SamplingParams, eos_ids: Collection[int], output_len: int, tokens: Sequence[int]
) -> tuple[tuple[int, ...], FinishCause | None]:
    """Cuts a round's `tokens` at the end of the output; gives those emitted and why it ends (None: it goes
    on).

    The token that ends the output is emitted; the tokens after it are dropped. `output_len` counts the
    tokens before tokens[0].
    """
    ending, room = ending_ids(params, eos_ids), params.max_tokens - output_len
    least = 0 if params.grammar is not None else params.min_tokens
    for count, token in enumerate(tokens[:room], start=1):
        if token in ending and output_len + count > least:
            return tuple(tokens[:count]), FinishCause.STOP
    return tuple(tokens[:room]), FinishCause.LENGTH if len(tokens) >= room else None


def ending_ids(params: SamplingParams, eos_ids: Collection[int]) -> tuple[int, ...]:
    """Ids that end an output once it has `min_tokens` tokens."""
    ignored = params.ignore_eos and params.grammar is None
    return params.stop_token_ids if ignored else (*eos_ids, *params.stop_token_ids)
