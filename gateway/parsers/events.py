"""The events of a parser: reasoning, content and calls of tools, piece by piece.

Data only. Pieces of one kind that follow one another belong together; how they are cut means nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec


class ReasoningText(msgspec.Struct, frozen=True):
    """Another piece of the reasoning before the answer."""

    text: str


class ContentText(msgspec.Struct, frozen=True):
    """Another piece of the answer."""

    text: str


class CallStarted(msgspec.Struct, frozen=True):
    """A call of the tool `name`; `index` counts the answer's calls from 0. The call before it is over."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """Another piece of a call's arguments: the text of a JSON object, as far as the model keeps to JSON."""

    index: int
    text: str


class CallDone(msgspec.Struct, frozen=True):
    """A call is complete. One that the end of the answer cuts has no such event."""

    index: int


Event = ReasoningText | ContentText | CallStarted | CallArguments | CallDone


def merged(events: Iterable[Event]) -> list[Event]:
    """Joins neighbouring pieces of the same kind."""
    return [_joined(list(group)) for _, group in itertools.groupby(events, key=_kind)]


def _kind(event: Event) -> tuple[type[Event], int]:
    return type(event), getattr(event, "index", -1)


def _joined(events: list[Event]) -> Event:
    """One event of several of a kind."""
    first = events[0]
    if len(events) == 1 or isinstance(first, CallStarted | CallDone):
        return first
    text = "".join(event.text for event in events if not isinstance(event, CallStarted | CallDone))
    return msgspec.structs.replace(first, text=text)
