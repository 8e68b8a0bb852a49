"""Where a streamed Markdown block ends, and what of an answer a terminal is not given."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from eyas.client.terminal import MarkdownProse, PlainProse, split_blocks, visible

TEXT = "Hello\nthere.\n\n```python\n\nx = 1\n```\n\n~~~\n```\n\n~~~\n\nThe end"
BLOCKS = ["Hello\nthere.\n\n", "```python\n\nx = 1\n```\n\n", "~~~\n```\n\n~~~\n\n", "The end"]


@pytest.mark.parametrize("stride", [1, 2, 3, 7, len(TEXT)])
def test_blocks_do_not_depend_on_how_the_text_is_cut(stride: int) -> None:
    printed, rest = "", ""
    for start in range(0, len(TEXT), stride):
        whole, rest = split_blocks(rest + TEXT[start : start + stride])
        printed += whole
    assert printed == "".join(BLOCKS[:-1]) and rest == BLOCKS[-1]


def test_an_open_fence_is_never_cut() -> None:
    assert split_blocks("a\n\n```\nb\n\nc\n\n") == ("a\n\n", "```\nb\n\nc\n\n")


NASTY = "a\x1b]0;title\x07b\x1b[2J\x9bK\r\x08c\u202ed\n\té"
SHOWN = "a\\x1b]0;title\\x07b\\x1b[2J\\x9bK\\x0d\\x08c\\u202ed\n\té"


def test_what_a_terminal_would_obey_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not to pipes and files, and what is remembered is the answer."""
    assert visible(NASTY) == SHOWN
    for terminal, expected in ((True, SHOWN), (False, NASTY)):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        prose = PlainProse()
        prose.write(NASTY)
        assert capsys.readouterr().out == expected and prose.text == NASTY


def test_markdown_holds_no_escapes() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    prose = MarkdownProse(console)
    prose.write("\x1b[2Jfine\n\nmore\x1b")
    prose.close()
    assert "\x1b" not in console.file.getvalue() and "\\x1b[2Jfine" in console.file.getvalue()
