"""The short way of most tokens: from a worker's message to the client's connection, without waking a task.

An entry that only adds tokens to a choice is shown at once, by one chain of calls, while the stream's reader
waits. All other entries go through the reader (`TextStream.take`, `Format.event`, `Reply.write`), and so does
everything while the client reads slowly. That way says what is right: here, the same bytes leave sooner.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

import msgspec

from eyas.common.types import TokenEntry
from gateway.backends.base import FastPath
from gateway.http.parts import BodyParts
from gateway.observe.metrics import CallMeter, TokenRhythm
from gateway.text.entries import BareText, TextDelta, TextStream, UsageCounts

TextEvent = Callable[[int, str], bytes]
"""(choice, text): the event that adds text to a choice and says nothing else."""

_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # a text that stands for any other: nothing else in an event is like it


class EventFormat(Protocol):
    """How one answer is written.

    `text_event`: writes the event of a delta that holds text alone; None if events say more, or if such
    deltas have no event of their own.
    """

    text_event: TextEvent | None

    def event(self, delta: TextDelta) -> bytes:
        """The events of one delta; empty if it holds nothing to show yet."""
        ...


def around(event: TextEvent, choice: int) -> tuple[bytes, bytes]:
    """Returns the bytes before and after the text (JSON) in each event of a choice."""
    before, _, after = event(choice, _MARK).partition(_encode(_MARK))
    return before, after


def lane_of(
    text: TextStream, events: EventFormat, meter: CallMeter, parts: BodyParts, choice: int
) -> FastPath | None:
    """The lane of a choice of this response; None: it has none yet."""
    show = text.bare(choice)
    if show is None:
        return None
    rhythm, event = meter.rhythm(choice), events.text_event
    if event is None:
        return DeltaLane(show, text.usage, rhythm, events, parts)
    return TextLane(show, text.usage, rhythm, around(event, choice), parts)


class EntryLane(FastPath):
    """The lane of one choice."""

    __slots__ = ("_parts", "_rhythm")

    def __init__(self, rhythm: TokenRhythm, parts: BodyParts) -> None:
        self._rhythm = rhythm
        self._parts = parts

    def offer(self, entry: TokenEntry, now: float) -> bool:
        """Shows an entry; False, and nothing has happened: it is the reader's."""
        if entry.finish is not None or entry.logprobs or self._parts.blocked:
            return False
        if entry.timings is not None or entry.prompt is not None:
            return False
        self._rhythm.tokens(len(entry.tokens), now)
        if event := self._event(entry):
            self._parts.write(event)
        return True

    @abstractmethod
    def _event(self, entry: TokenEntry) -> bytes:
        """The event of an entry, which it counts; empty if there is none."""


class TextLane(EntryLane):
    """All bytes of its events but the text's are rendered once."""

    __slots__ = ("_after", "_before", "_show", "_usage")

    def __init__(
        self,
        show: BareText,
        usage: UsageCounts,
        rhythm: TokenRhythm,
        around: tuple[bytes, bytes],
        parts: BodyParts,
    ) -> None:
        """`show`: the text of the next tokens; `around`: what is before and after it in an event."""
        super().__init__(rhythm, parts)
        self._show = show
        self._usage = usage
        self._before, self._after = around

    def _event(self, entry: TokenEntry) -> bytes:
        tokens = entry.tokens
        text = self._show.feed(tokens)
        self._usage.completion_tokens += len(tokens)
        if entry.offered:
            self._usage.drafted(entry.accepted, entry.offered, 1)
        return self._before + _encode(text) + self._after if text else b""


class DeltaLane(EntryLane):
    """A lane whose events are rendered as the reader would: they say more than the text."""

    __slots__ = ("_events", "_show", "_usage")

    def __init__(
        self, show: BareText, usage: UsageCounts, rhythm: TokenRhythm, events: EventFormat, parts: BodyParts
    ) -> None:
        super().__init__(rhythm, parts)
        self._show = show
        self._usage = usage
        self._events = events

    def _event(self, entry: TokenEntry) -> bytes:
        delta = TextDelta(
            choice=entry.choice,
            text=self._show.feed(entry.tokens),
            tokens=entry.tokens,
            accepted=entry.accepted,
            offered=entry.offered,
            verify_steps=int(entry.offered > 0),
        )
        self._usage.add(delta)
        return self._events.event(delta)
