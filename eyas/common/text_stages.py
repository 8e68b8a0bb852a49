"""Changes to a text that comes in parts: each gives out what is certain and holds back what may still change.

This module knows characters. It refuses to know tokens, and why a text is changed.
"""

from __future__ import annotations

from typing import Protocol


class TextStage(Protocol):
    """One change. However a text is cut, the parts that come out join to the same string."""

    def feed(self, text: str) -> str:
        """Takes a part of the text; gives what has become certain."""
        ...

    def settle(self) -> str:
        """Called when the text so far was shown as a whole and another text continues it.

        Gives what need not be held back any more.
        """
        ...

    def flush(self) -> str:
        """Called at the end of the text; gives what is left."""
        ...


class Replacer(TextStage):
    """`str.replace`, for a `pattern` that is not empty."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._held = ""  # possibly the beginning of a pattern

    def feed(self, text: str) -> str:
        *done, last = (self._held + text).split(self._pattern)
        end = len(last) - self._begun(last)
        self._held = last[end:]
        return self._content.join([*done, last[:end]])

    def settle(self) -> str:
        return self.flush()

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """How many characters of the pattern's beginning `text` ends with."""
        longest = min(len(self._pattern) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(self._pattern[:n])), 0)


class Stripper(TextStage):
    """Removes a character up to `start` times from a text's beginning and up to `stop` times from its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = ""  # possibly the end of the text

    def feed(self, text: str) -> str:
        if self._start and text:
            text = self._without_start(text)
        text = self._held + text
        end = max(len(text.rstrip(self._content)), len(text) - self._stop)
        self._held = text[end:]
        return text[:end]

    def settle(self) -> str:
        """Nothing: the text goes on, so what is held back may still not be its end."""
        return ""

    def flush(self) -> str:
        return ""

    def _without_start(self, text: str) -> str:
        rest = text.lstrip(self._content)
        taken = min(len(text) - len(rest), self._start)
        self._start = 0 if rest else self._start - taken
        return text[taken:]


_CLEANED = {
    " .": ".",
    " ?": "?",
    " !": "!",
    " ,": ",",
    " ' ": "'",
    " n't": "n't",
    " 'm": "'m",
    " 's": "'s",
    " 've": "'ve",
    " 're": "'re",
}


def clean_up_stages() -> tuple[TextStage, ...]:
    """The replacements of `clean_up_tokenization_spaces`, in transformers' order."""
    return tuple(Replacer(pattern, content) for pattern, content in _CLEANED.items())
