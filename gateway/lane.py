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
from gateway.backend import Lane
from gateway.metrics import Meter, Rhythm
from gateway.parts import Parts
from gateway.text import Bare, TextStream, UsageCounts

TextEvent = Callable[[int, str], bytes]
"""(choice, text): the event that adds text to a choice and says nothing else."""

_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # a text that stands for any other: nothing else in an event is like it


def around(event: TextEvent, choice: int) -> tuple[bytes, bytes]:
    """What is before and after the text, which is JSON, in each event of a choice."""
    before, _, after = event(choice, _MARK).partition(_encode(_MARK))
    return before, after


class TextLane(Lane):
    """The lane of one choice. All bytes of its events but the text's are rendered once."""

    __slots__ = ("_after", "_before", "_parts", "_rhythm", "_show", "_usage")

    def __init__(
        self, show: Bare, usage: UsageCounts, rhythm: Rhythm, around: tuple[bytes, bytes], parts: Parts
    ) -> None:
        """`show`: the text of the next tokens; `around`: what is before and after it in an event."""
        self._show = show
        self._usage = usage
        self._rhythm = rhythm
        self._before, self._after = around
        self._parts = parts

    @classmethod
    def of(cls, text: TextStream, event: TextEvent, meter: Meter, parts: Parts, choice: int) -> Lane | None:
        """The lane of a choice of this response; None: it has none yet."""
        show = text.bare(choice)
        if show is None:
            return None
        return cls(show, text.usage, meter.rhythm(choice), around(event, choice), parts)

    def offer(self, entry: Entry, now: float) -> bool:
        """Shows an entry; False, and nothing has happened: it is the reader's."""
        if entry.finish is not None or entry.logprobs or self._parts.blocked:
            return False
        if entry.timings is not None or entry.prompt is not None:
            return False
        tokens = entry.tokens
        text = self._show.feed(tokens)
        self._usage.completion_tokens += len(tokens)
        if entry.offered:
            self._usage.drafted(entry.accepted, entry.offered, 1)
        self._rhythm.tokens(len(tokens), now)
        if text:
            self._parts.write(self._before + _encode(text) + self._after)
        return True
