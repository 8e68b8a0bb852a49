"""The short way of most tokens: from a worker's message to the client's connection, without waking a task.

An entry that only adds tokens to a choice is shown at once, by one chain of calls, while the stream's reader
waits. All other entries go through the reader (`TextStream.take`, `Format.event`, `Reply.write`), and so does
everything while the client reads slowly. That way says what is right: here, the same bytes leave sooner. This
file knows what makes an entry fit; it refuses to know how text is made and written.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from eyas.common.types import Entry
from gateway.metrics import Meter
from gateway.parts import Parts
from gateway.text import TextStream

TextEvent = Callable[[int, str], bytes]
"""(choice, text): the event that adds text to a choice and says nothing else."""

_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # a text that stands for any other: nothing else in an event is like it


class TextEvents:
    """Events that add text to a choice and say nothing else: most of them.

    `render(choice, text)` is the plain way to write one. All of its bytes but the text's are rendered once
    per choice.
    """

    def __init__(self, render: Callable[[int, str], bytes]) -> None:
        self._render = render
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, choice: int, text: str) -> bytes:
        """The event, byte by byte as `render` writes it."""
        if choice not in self._around:
            before, _, after = self._render(choice, _MARK).partition(_encode(_MARK))
            self._around[choice] = before, after
        before, after = self._around[choice]
        return before + _encode(text) + after


class Express:
    """The lane of one response."""

    def __init__(self, text: TextStream, event: TextEvent, meter: Meter, parts: Parts) -> None:
        self._text = text
        self._event = event
        self._meter = meter
        self._parts = parts

    def take(self, entry: Entry) -> bool:
        """Shows an entry; False, and nothing has happened: it is the reader's."""
        if self._parts.blocked:
            return False
        text = self._text.bare(entry)
        if text is None:
            return False
        self._meter.tokens(entry.choice, len(entry.tokens))
        if text:
            self._parts.write(self._event(entry.choice, text))
        return True
