"""An answer that ends in the middle of calls, for instance at `max_tokens`: no tag of theirs is content."""

from __future__ import annotations

import pytest
from answers import TWO_CALLS, fed, reading

from gateway.parsers.output import CallStarted, ContentText

BY_TEXT = ["hermes", "qwen3_coder", "seed_oss", "minimax_m2", "functionary", "nemotron", "hunyuan", "olmo3"]
"""Formats with marks that are several tokens, so that an answer can end within one."""


@pytest.mark.parametrize("name", BY_TEXT)
def test_what_is_cut_behind_a_call_is_no_content(name: str) -> None:
    text = TWO_CALLS[name]
    leaks = {}
    for length in range(len(text) + 1):
        events = fed(reading(name), [text[:length]])
        words = "".join(event.text for event in events if isinstance(event, ContentText)).strip()
        if words and any(isinstance(event, CallStarted) for event in events):
            leaks[text[:length]] = words
    assert set(leaks.values()) <= {'"'}, leaks  # a title's end in MiniMax-M2


@pytest.mark.parametrize("name", BY_TEXT)
def test_words_behind_a_call_stay_whatever_they_end_with(name: str) -> None:
    for words in ("fine", "1 <", "a <tool", "x </"):
        events = fed(reading(name), [TWO_CALLS[name] + " " + words])
        assert events[-1] == ContentText(words)


def test_without_a_call_the_beginning_of_one_is_content() -> None:
    assert fed(reading("hermes"), ["see <tool_ca"]) == [ContentText("see <tool_ca")]
