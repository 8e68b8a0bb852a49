"""Calls that break off: what is given back as text shows none of the format's markers."""

from __future__ import annotations

import pytest
from answers import reading

from gateway.parsers.message import MessageParser
from gateway.parsers.output import ContentText


@pytest.mark.parametrize(
    ("name", "text", "left"),
    [
        ("mistral_v11", '[TOOL_CALLS] [{"[ARGS]', '[{"'),
        ("mistral", '[TOOL_CALLS] [{"[TOOL_CALLS]x', '[{" x'),
        ("glm45", "<tool_call></tool_call>so", "so"),
        ("pythonic", "<|python_start|>[g(b<|python_end|>", "[g(b"),
    ],
)
def test_what_breaks_off_gives_back_no_marker(name: str, text: str, left: str) -> None:
    parser = MessageParser(reading(name))
    events = [*parser.feed(text), *parser.end()]
    assert "".join(event.text for event in events if isinstance(event, ContentText)).strip() == left
