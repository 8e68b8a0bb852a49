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
from gateway.metrics import Meter, Rhythm
from gateway.parts import Parts
from gateway.text import Bare, TextStream

TextEvent = Callable[[int, str], bytes]
"""(choice, text): the event that adds text to a choice and says nothing else."""

Track = tuple[Bare, Rhythm, bytes, bytes]
"""Of a choice: its text, its pace, and what is before and after the text in its events."""

_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # a text that stands for any other: nothing else in an event is like it


def around(event: TextEvent, choice: int) -> tuple[bytes, bytes]:
    """What is before and after the text, which is JSON, in each event of a choice."""
    before, _, after = event(choice, _MARK).partition(_encode(_MARK))
    return before, after


class Express:
    """The lane of one response. All bytes of its events but the text's are rendered once per choice."""

    __slots__ = ("_event", "_meter", "_parts", "_text", "_tracks", "_usage")

    def __init__(self, text: TextStream, event: TextEvent, meter: Meter, parts: Parts) -> None:
        self._text = text
        self._event = event
        self._meter = meter
        self._parts = parts
        self._usage = text.usage
        self._tracks: dict[int, Track] = {}

    def take(self, entry: Entry, now: float) -> bool:
        """Shows an entry; False, and nothing has happened: it is the reader's."""
        if entry.finish is not None or entry.logprobs or self._parts.blocked:
            return False
        if entry.timings is not None or entry.prompt is not None:
            return False
        choice, tokens = entry.choice, entry.tokens
        track = self._tracks.get(choice) or self._begin(choice)
        if track is None:
            return False
        bare, rhythm, before, after = track
        text = bare(tokens)
        self._usage.completion_tokens += len(tokens)
        if entry.offered:
            self._usage.drafted(entry.accepted, entry.offered, 1)
        rhythm.tokens(len(tokens), now)
        if text:
            self._parts.write(before + _encode(text) + after)
        return True

    def _begin(self, choice: int) -> Track | None:
        bare = self._text.bare(choice)
        if bare is None:
            return None
        self._tracks[choice] = track = (bare, self._meter.rhythm(choice), *around(self._event, choice))
        return track
