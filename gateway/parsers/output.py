"""The output of parsers. White space beside calls and reasoning is the format's, and is dropped.

Templates write that space themselves when the message comes back in a later prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.parsers.events import CallArguments, CallDone, CallStarted, ContentText, Event, ReasoningText


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
    """Text whose white space at either side can be dropped: it is held back until more text follows."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._pending: list[str] = []
        self._begins = False  # what comes next is the first, so its leading space does not count

    def add(self, text: str) -> None:
        if self._begins:
            text = text.lstrip()
            self._begins = not text
        body = text.rstrip()
        if body:
            self._show("".join([*self._pending, body]))
            self._pending = []
        if len(body) < len(text):
            self._pending.append(text[len(body) :])

    def trim(self) -> None:
        """Drops the white space held back, and what follows."""
        self._pending, self._begins = [], True

    def flush(self) -> None:
        """Shows what is held back."""
        if self._pending:
            self._show("".join(self._pending))
            self._pending = []
