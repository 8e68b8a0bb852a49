"""When a generation ends: end-of-turn ids, stop ids and length limits. The gateway handles stop strings.

`output_len` is always the number of tokens that a choice has emitted before the token in question. The first
`min_tokens` tokens cannot end a generation: ending ids are banned there, and ignored if one appears.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from eyas.common.params import SamplingParams
from eyas.common.types import Finish


def banned_ids(params: SamplingParams, eos_ids: Collection[int], output_len: int) -> tuple[int, ...]:
    """Ids that must not be sampled as the next token: those that would end the output too early."""
    return _ending_ids(params, eos_ids) if output_len < params.min_tokens else ()


def finish(
    params: SamplingParams, eos_ids: Collection[int], output_len: int, tokens: Sequence[int]
) -> tuple[tuple[int, ...], Finish | None]:
    """Which of a round's `tokens` are emitted, and why the output ends with them (None: it goes on).

    The token that ends the output is emitted; the tokens after it are dropped. `output_len` counts the
    tokens before tokens[0].
    """
    ending, room = _ending_ids(params, eos_ids), params.max_tokens - output_len
    for count, token in enumerate(tokens[:room], start=1):
        if token in ending and output_len + count > params.min_tokens:
            return tuple(tokens[:count]), Finish.STOP
    return tuple(tokens[:room]), Finish.LENGTH if len(tokens) >= room else None


def _ending_ids(params: SamplingParams, eos_ids: Collection[int]) -> tuple[int, ...]:
    return params.stop_token_ids if params.ignore_eos else (*eos_ids, *params.stop_token_ids)
