"""Streamed text on a terminal: Markdown, drawn as it comes, or the bare text where no person looks."""

from __future__ import annotations

import re
import sys
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

FENCES = ("```", "~~~")


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with every character shown that a terminal would obey: an answer must not move its cursor,
    set its title or turn its lines around.
    """
    return _CONTROLS.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class AnswerWriter(Protocol):
    """The writer of an answer: `write` as it comes, `close` at its end. `text` is all of it so far."""

    text: str

    def write(self, text: str) -> None:
        """Adds the next part of the answer."""
        ...

    def close(self) -> None:
        """Ends the answer. Nothing is written after this."""
        ...


class PlainProse:
    """The text as it is, for pipes and files; on a terminal what that would obey is shown."""

    def __init__(self) -> None:
        self.text: str = ""

    def write(self, text: str) -> None:
        """Prints the part at once."""
        self.text += text
        print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)

    def close(self) -> None:
        """Ends the last line."""
        print(flush=True)


class MarkdownProse:
    """Finished blocks are printed for good; only the last, unfinished one is redrawn as it grows."""

    def __init__(self, console: Console) -> None:
        self.text: str = ""
        self._open = ""  # the block that may still grow
        self._live = Live(console=console, transient=True, refresh_per_second=12)
        self._live.start()

    def write(self, text: str) -> None:
        """Prints the blocks that the part completes, and redraws the unfinished one."""
        self.text += text
        whole, self._open = split_blocks(self._open + visible(text))
        if whole:
            self._live.console.print(Markdown(whole))
        self._live.update(Markdown(self._open))

    def close(self) -> None:
        """Prints the last block for good."""
        self._live.stop()
        self._live.console.print(Markdown(self._open))


def split_blocks(text: str) -> tuple[str, str]:
    """(blocks that can no longer change, the rest). A block ends at an empty line outside a code fence."""
    fence, end, at = "", 0, 0
    for line in text.splitlines(keepends=True):
        at += len(line)
        mark = next((mark for mark in FENCES if line.lstrip().startswith(mark)), "")
        if mark and (not fence or fence == mark):
            fence = "" if fence else mark
        elif not fence and not line.strip() and line.endswith("\n"):
            end = at
    return text[:end], text[end:]
