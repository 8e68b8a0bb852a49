"""Changes to a text that comes in parts: each shows what is certain and holds what may still change.

They know characters. They refuse to know tokens, and why a text is changed.
"""

from __future__ import annotations

from typing import Protocol


class TextStage(Protocol):
    """However a text is cut, what comes out joins to the same."""

    def feed(self, text: str) -> str:
        """What has become certain."""
        ...

    def settle(self) -> str:
        """What came so far was shown elsewhere as a whole text, and another one goes on from it.

        Returns what is not held any more.
        """
        ...

    def flush(self) -> str:
        """The rest, at the end of the text."""
        ...


class Replacer:
    """`str.replace`, for a `pattern` that is not empty."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._held = ""  # how a pattern may begin

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
        """How many characters of a pattern `text` ends with."""
        longest = min(len(self._pattern) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(self._pattern[:n])), 0)


class Stripper:
    """Takes a character up to `start` times from a text's beginning and up to `stop` times from its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = ""  # what may be the end

    def feed(self, text: str) -> str:
        if self._start and text:
            text = self._without_start(text)
        text = self._held + text
        end = max(len(text.rstrip(self._content)), len(text) - self._stop)
        self._held = text[end:]
        return text[:end]

    def settle(self) -> str:
        """What was stripped there is no end here: it is held further on."""
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
    """English as `clean_up_tokenization_spaces` wants it, in transformers' order."""
    return tuple(Replacer(pattern, content) for pattern, content in _CLEANED.items())
