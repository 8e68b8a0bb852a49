"""The conversion between a step's entries and its message, which is a table: for tokens, the hot path.

Calls per entry and field would cost more than all else that a message needs; a column is read and written by
one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, repeat

import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.types import TokenEntry
from eyas.common.wire import convert
from protos import decode_pb2


def step_to_pb(entries: Sequence[TokenEntry], rename: Callable[[str], str] = str) -> decode_pb2.Step:
    """One message for all `entries`; `rename` gives the receiver's id of a request."""
    counts = [len(entry.tokens) for entry in entries]
    drafted = any(entry.offered or entry.accepted for entry in entries)
    extras = [
        _extra_to_pb(row, entry)
        for row, entry in enumerate(entries)
        if entry.logprobs or (entry.finish, entry.timings, entry.prompt) != (None, None, None)
    ]
    return decode_pb2.Step(
        ids=[rename(entry.id) for entry in entries],
        attempts=[entry.attempt for entry in entries],
        choices=[entry.choice for entry in entries],
        indices=[entry.index for entry in entries],
        counts=counts if counts.count(1) < len(counts) else (),
        tokens=[token for entry in entries for token in entry.tokens],
        accepted=[entry.accepted for entry in entries] if drafted else (),
        offered=[entry.offered for entry in entries] if drafted else (),
        extras=extras,
    )


def step_from_pb(step: decode_pb2.Step) -> tuple[TokenEntry, ...]:
    """The entries. Raises InvalidRequest for columns that do not fit together, and for an unknown finish."""
    none = [0] * len(step.ids)
    # A slice is a plain list, which is quicker to read than the field.
    columns = (step.ids[:], step.attempts[:], step.choices[:], step.indices[:], _tokens(step))
    drafts = (step.accepted[:] or none, step.offered[:] or none)
    if {*map(len, columns), *map(len, drafts)} != {len(none)}:
        raise InvalidRequest("the columns of a step have different lengths", param="step")
    entries = list(
        map(TokenEntry, *columns, repeat(()), repeat(None), *drafts)
    )  # a loop here costs twice as much
    for extra in step.extras:
        if not 0 <= extra.row < len(entries):
            raise InvalidRequest(f"a step has no row {extra.row}", param="extras")
        entries[extra.row] = _with_extra(entries[extra.row], extra)
    return tuple(entries)


def _tokens(step: decode_pb2.Step) -> list[tuple[int, ...]]:
    """Returns the tokens of each row; none at all if the counts do not fit."""
    tokens, counts = step.tokens[:], step.counts[:]
    if not counts:
        return list(zip(tokens, strict=True))
    if min(counts) < 0 or sum(counts) != len(tokens):
        return []
    return [tuple(tokens[a:b]) for a, b in pairwise(accumulate(counts, initial=0))]


def _extra_to_pb(row: int, entry: TokenEntry) -> decode_pb2.Extra:
    return decode_pb2.Extra(
        row=row,
        logprobs=[convert.logprob_to_pb(logprob) for logprob in entry.logprobs],
        finish=convert.finish_to_pb(entry.finish),
        timings=None if entry.timings is None else convert.timings_to_pb(entry.timings),
        prompt=None if entry.prompt is None else convert.prompt_to_pb(entry.prompt),
    )


def _with_extra(entry: TokenEntry, extra: decode_pb2.Extra) -> TokenEntry:
    return msgspec.structs.replace(
        entry,
        logprobs=tuple(map(convert.logprob_from_pb, extra.logprobs)),
        finish=convert.finish_from_pb(extra.finish),
        timings=convert.timings_from_pb(extra.timings) if extra.HasField("timings") else None,
        prompt=convert.prompt_from_pb(extra.prompt) if extra.HasField("prompt") else None,
    )
