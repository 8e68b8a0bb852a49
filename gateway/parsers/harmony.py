"""Answers of gpt-oss: messages with headers, in channels. All of an answer is read here, tools or not.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, `<|start|>assistant<|channel|>final<|message|>...`
the answer. `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>` is a call; words
in that channel without a recipient belong to the answer. The recipient may stand before the channel. The
prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import re

from gateway.parsers.calls import (
    Format,
    Mark,
    Schemas,
    Tools,
    arguments,
    attempt,
    call_by_name,
    either,
    optional,
    sequence,
    text,
)
from gateway.parsers.output import ParsedOutput
from gateway.parsers.reasoning import ReasoningTags
from gateway.parsers.source import ParsedText, Sink, Wait

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (MESSAGE, START, CHANNEL, CONSTRAIN, END, CALL, RETURN)
_OVER = (END, CALL, RETURN, START)
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.:/-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_CHANNELS = ("analysis", "commentary", "final")
_WORD = re.compile(r"\w+")
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_BREAK = re.compile("|".join(map(re.escape, _OVER)))
REASONING = ReasoningTags(f"{CHANNEL}analysis{MESSAGE}", END)


def read(source: ParsedText, out: ParsedOutput, tools: Tools) -> Wait[None]:
    """Reads an answer to its end. Any name may be called, if there are tools."""
    while (header := (yield from _header(source, out))) is not None:
        to, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if to and tools and (to[1] or to[2] in tools):  # the model may leave "functions." out
            _ends(out, 0)
            yield from attempt(source, out, _call(source, out, to[2]))
        elif channel and channel[1] == "analysis":
            if (yield from _words(source, out.reasoning, out.reasoning)):
                out.reasoned()
                _ends(out, source.consumed)
            continue
        _ends(out, 0)
        yield from _words(source, out.content, out.cut)


def _words(source: ParsedText, sink: Sink, cut: Sink) -> Wait[bool]:
    """Reads a message's words; gives whether it has an end: its own, or another message in a channel. Markers
    that do not belong there are dropped.
    """
    while marker := (yield from source.upto(MARKERS, sink, cut)):
        if marker in _OVER:
            return True
        if marker == CHANNEL:
            name = yield from source.run(_WORD)
            source.back(name)
            if name in _CHANNELS:
                source.back(CHANNEL)
                return True
    return False


def _ends(out: ParsedOutput, at: int) -> None:
    """The first message tells where the reasoning ends."""
    if out.reasoning_end is None:
        out.reasoning_end = at


def _header(source: ParsedText, out: ParsedOutput) -> Wait[str | None]:
    """Reads the header of the next message; None if there is none. Words without a message are content. A
    header that the model ended or began anew is dropped.
    """
    parts: list[str] = []
    if (yield from source.upto((MESSAGE,), parts.append)):
        return _BREAK.split("".join(parts))[-1]
    said = "".join(parts)
    _ends(out, 0)
    if CHANNEL not in said and START not in said:
        for words in _MARKER.split(said):
            out.content(words)
    return None


def _call(source: ParsedText, out: ParsedOutput, name: str) -> Wait[None]:
    yield from source.space()
    yield from call_by_name(source, out, name, MARKERS)


def grammar(tools: Schemas, mark: Mark, many: bool) -> Format:
    """One call of these tools, and nothing but reasoning before it: the model makes one at a time."""
    calls = [
        sequence(
            *(mark(CHANNEL), text(f"commentary to=functions.{name} "), mark(CONSTRAIN), text("json")),
            *(mark(MESSAGE), arguments(schema)),
        )
        for name, schema in tools.items()
    ]
    return sequence(_thought(mark), either(calls))


def final(content: Format, mark: Mark) -> Format:
    """An answer of this content."""
    return sequence(_thought(mark), mark(CHANNEL), text("final"), mark(MESSAGE), content)


def free(mark: Mark) -> Format:
    """Any text without a marker."""
    return {
        "type": "any_text",
        "excludes": [name for name in MARKERS if mark(name)["type"] == "const_string"],
    }


def _thought(mark: Mark) -> Format:
    """The reasoning, if any, and the beginning of the message after it."""
    over = (mark(END), mark(START), text("assistant"))
    return optional(sequence(mark(CHANNEL), text("analysis"), mark(MESSAGE), free(mark), *over))
