"""Reads one answer: its reasoning, then its content and calls.

A parser is a pure function of the text: however that is cut, the events say the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.parsers import reasoning
from gateway.parsers.calls import Tools
from gateway.parsers.output import Event, ParsedOutput
from gateway.parsers.reasoning import ReasoningTags
from gateway.parsers.source import ParsedText, Wait
from gateway.parsers.table import ToolFormat


@dataclass(frozen=True)
class MessageReading:
    """The parts that are parsed out of an answer.

    `calls`: the format of its calls; None: none are looked for. `most_calls`: later ones are dropped.
    `calls_before`: how many the chat has already. `is_named`: the caller named the tool, so that a call is
    no news about why the answer ends. `reasoning`: the tags of its reasoning; `is_open`: the first tag is in
    the prompt.
    """

    calls: ToolFormat | None = None
    tools: Tools = field(default_factory=dict)
    most_calls: int | None = None
    calls_before: int = 0
    is_named: bool = False
    reasoning: ReasoningTags | None = None
    is_open: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that must show in the text, even special ones."""
        if self.calls is not None and self.calls.frame is not None:
            return self.calls.markers
        tags = (self.reasoning.begin, self.reasoning.end) if self.reasoning else ()
        return (*(self.calls.markers if self.calls else ()), *tags)


class MessageParser:
    """Reads one answer."""

    def __init__(self, reading: MessageReading) -> None:
        self._source = ParsedText(reading.calls.markers if reading.calls else ())
        self._out = ParsedOutput(reading.most_calls)
        self._steps = self._read(reading)

    @property
    def reasoning_end(self) -> int | None:
        """How many characters the reasoning and its tags have: 0 without any, None until that is known."""
        return self._out.reasoning_end

    @property
    def is_cut(self) -> bool:
        """Whether a call has begun that is not complete."""
        return self._out.is_open

    def feed(self, text: str) -> list[Event]:
        """Takes more text, and returns its events."""
        if text:
            self._source.push(text)
            next(self._steps, None)
        return self._out.drain()

    def end(self) -> list[Event]:
        """Ends the text, and returns the remaining events."""
        self._source.ended = True
        next(self._steps, None)
        self._out.end()
        return self._out.drain()

    def _read(self, reading: MessageReading) -> Wait[None]:
        source, out, tags, end = self._source, self._out, reading.reasoning, 0
        if reading.calls is not None and reading.calls.frame is not None:
            yield from reading.calls.read(source, out, reading.tools)
            return
        if tags is not None and (yield from reasoning.begins(source, out, tags, reading.is_open)):
            yield from reasoning.read(source, out, tags, reading.calls.beginnings if reading.calls else ())
            end = source.consumed
        out.reasoning_end = end
        if reading.calls is not None:
            yield from reading.calls.read(source, out, reading.tools)
        else:
            yield from source.upto((), out.content)
        if out.thinks_on:
            out.reasoning_end = source.consumed
