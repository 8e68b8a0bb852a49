"""The output of parsers: events of reasoning, content and calls of tools, piece by piece.

Pieces of one kind that follow one another belong together; how they are cut means nothing. White space beside
calls and reasoning is the format's, and is dropped: templates write that space themselves when the message
comes back in a later prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

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


class ParsedOutput:
    """The events of one answer. `most_calls`: later calls are dropped; None: none is.

    `is_open`: whether a call has begun that is not complete. `thinks_on`: whether the reasoning has not
    ended, so that what is no call is more of it. `reasoning_end`: where the reasoning ends, in characters of
    the answer, 0 without any; None: that is not known.
    """

    def __init__(self, most_calls: int | None = None) -> None:
        self.is_open = False
        self.reasoning_end: int | None = None
        self._events: list[Event] = []
        self._most = most_calls
        self._calls = 0
        self._has_arguments = False
        self.thinks_on = False
        self._content = _TrimmedText(lambda text: self._events.append(ContentText(text)))
        self._reasoning = _TrimmedText(lambda text: self._events.append(ReasoningText(text)))
        self._reasoning.trim()

    def drain(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def reasoning(self, text: str) -> None:
        """Adds reasoning."""
        self._reasoning.add(text)

    def reasoned(self) -> None:
        """The reasoning is over."""
        self._reasoning.trim()
        self._content.trim()

    def think_on(self) -> None:
        """Takes all text as reasoning until a call begins."""
        self.thinks_on = True

    def content(self, text: str) -> None:
        """Adds content."""
        (self._reasoning if self.thinks_on else self._content).add(text)

    def cut(self, text: str) -> None:
        """Adds what the end of the answer cut, so that it is no call: content, unless it stands right behind
        a call. There it is the format's own words, such as half the tag that would have come.
        """
        if not (self._calls and self._content.begins):
            self.content(text)

    def begin(self, name: str) -> None:
        """A call begins."""
        if self.thinks_on:
            self.thinks_on = False
            self.reasoned()
        self._content.trim()
        self._calls += 1
        self.is_open, self._has_arguments = True, False
        if not self._drops:
            self._events.append(CallStarted(self._calls - 1, name))

    def arguments(self, text: str) -> None:
        """Adds arguments of the open call."""
        if text:
            self._has_arguments = True
            if not self._drops:
                self._events.append(CallArguments(self._calls - 1, text))

    def done(self) -> None:
        """The call is complete. One without arguments gets an empty object."""
        if not self._has_arguments:
            self.arguments("{}")
        self.is_open = False
        if not self._drops:
            self._events.append(CallDone(self._calls - 1))

    def end(self) -> None:
        """The text is over: white space that was held back is the answer's own."""
        self._reasoning.flush()
        self._content.flush()

    @property
    def _drops(self) -> bool:
        """Whether the call at hand is one too many."""
        return self._most is not None and self._calls > self._most


class _TrimmedText:
    """Text whose white space at either side can be dropped: it is held back until more text follows.

    `begins`: what comes next is the first, so its leading space does not count.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._pending: list[str] = []
        self.begins = False

    def add(self, text: str) -> None:
        if self.begins:
            text = text.lstrip()
            self.begins = not text
        body = text.rstrip()
        if body:
            self._show("".join([*self._pending, body]))
            self._pending = []
        if len(body) < len(text):
            self._pending.append(text[len(body) :])

    def trim(self) -> None:
        """Drops the white space held back, and what follows."""
        self._pending, self.begins = [], True

    def flush(self) -> None:
        """Shows what is held back."""
        if self._pending:
            self._show("".join(self._pending))
            self._pending = []
