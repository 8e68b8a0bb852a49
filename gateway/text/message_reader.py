"""Parses one choice of a chat into events, and determines the length of its reasoning and its finish
reason.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Sequence

from eyas.common.types import FinishCause
from gateway.parsers.message import MessageParser, MessageReading
from gateway.parsers.output import CallStarted, Event, merged
from gateway.parsers.table import CallIds, counted_id
from gateway.text.entries import TextDelta

CALLS = "tool_calls"  # why a choice ended, in OpenAI's words


class MessageReader:
    """Parses the deltas of one choice. `reasoning_tokens`: the tokens to the end of the reasoning, with its
    tags.

    `call_ids`: the ids of the calls that have begun.
    """

    def __init__(self, reading: MessageReading) -> None:
        self.call_ids: list[str] = []
        self.reasoning_tokens = 0
        self._parser = MessageParser(reading)
        self._ids = CallIds.FREE if reading.calls is None else reading.calls.ids
        self._calls_before = reading.calls_before
        self._is_named = reading.is_named
        self._offsets: list[int] | None = [] if reading.reasoning is not None else None

    def read(self, delta: TextDelta) -> list[Event]:
        """Returns the events that the delta adds."""
        events = self._parser.feed(delta.text)
        if delta.finish is not None:
            events += self._parser.end()
        self.call_ids += [self._new_id(event) for event in events if isinstance(event, CallStarted)]
        self._count(delta.offsets)
        return merged(events)

    def finish_reason(self, finish: FinishCause | None) -> str | None:
        """The finish reason in OpenAI's words. A truncated call does not count as one."""
        called = bool(self.call_ids) and not self._parser.is_cut and not self._is_named
        return CALLS if called and finish is FinishCause.STOP else finish

    def _count(self, offsets: Sequence[int]) -> None:
        """Counts the tokens that begin before the reasoning ends."""
        if self._offsets is None:
            return
        self._offsets += offsets
        end = self._parser.reasoning_end
        if end is None:
            self.reasoning_tokens = len(self._offsets)
        else:
            self.reasoning_tokens, self._offsets = bisect_left(self._offsets, end), None

    def _new_id(self, call: CallStarted) -> str:
        match self._ids:
            case CallIds.FREE:
                return f"call_{secrets.token_hex(12)}"
            case CallIds.SHORT:
                return secrets.token_hex(5)[:9]
            case CallIds.COUNTED:
                return counted_id(call.name, self._calls_before + call.index)
