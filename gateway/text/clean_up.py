"""The spaces that some tokenizers write before English punctuation, taken out of a text that comes in parts.

However a text is cut, the parts that come out join to the same string: what may still change is held back.
"""

from __future__ import annotations

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
"""The replacements of `clean_up_tokenization_spaces`, in transformers' order."""


class CleanUp:
    """The replacements, one after the other."""

    __slots__ = ("_stages",)

    def __init__(self) -> None:
        self._stages = [_TextReplacer(pattern, content) for pattern, content in _CLEANED.items()]

    def feed(self, text: str) -> str:
        """Takes a part of the text; gives what has become certain."""
        for stage in self._stages:
            text = stage.feed(text)
        return text

    def flush(self) -> str:
        """At the end of a text, or of a part that was shown as a whole: gives what is left."""
        text = ""
        for stage in self._stages:
            text = stage.feed(text) + stage.flush()
        return text


class _TextReplacer:
    """`str.replace`, for a `pattern` that is not empty."""

    __slots__ = ("_content", "_held", "_pattern")

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._held = ""  # possibly the beginning of a pattern

    def feed(self, text: str) -> str:
        *done, last = (self._held + text).split(self._pattern)
        end = len(last) - self._begun(last)
        self._held = last[end:]
        return self._content.join([*done, last[:end]])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """How many characters of the pattern's beginning `text` ends with."""
        longest = min(len(self._pattern) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(self._pattern[:n])), 0)
