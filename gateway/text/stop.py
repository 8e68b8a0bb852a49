"""Stop strings, of which a caller never sees any part.

Text goes in piece by piece; what comes out can no longer become part of a stop string. The result does not
depend on how the text is cut: the stop string that is *completed* first wins (of several completed by the
same character, the longest), and the caller sees the text before it.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for any of `stops` (non-empty strings) in one choice's text. `hit`: the one that was completed.

    For each stop string it keeps how many of its characters the text ends with (Knuth, Morris and Pratt's
    automaton), so a character costs constant time. The longest such match is exactly what must be held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the stop string is shown as the end of the text, so nothing is held back."""
        self._include = include
        self._stops = [(stop, _fallbacks(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._pending = ""
        self.hit = ""

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._stops)

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string was completed). Not to be called after a hit."""
        if not self._stops:
            return text, False
        text, start = self._pending + text, len(self._pending)
        for position in range(start, len(text)):
            if hit := self._advance(text[position]):
                self.hit = hit
                end = position + 1
                return text[: end if self._include else end - len(hit)], True
        safe = len(text) - (0 if self._include else max(self._matched))
        self._pending = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """The text held back; called when no more text follows."""
        pending, self._pending = self._pending, ""
        return pending

    def _advance(self, character: str) -> str:
        """Takes one character. The longest stop string that it completes, or ""."""
        hit = ""
        for i, (stop, fallbacks) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = fallbacks[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                hit = max(hit, stop, key=len)
                matched = fallbacks[matched - 1]
            self._matched[i] = matched
        return hit


def _fallbacks(stop: str) -> list[int]:
    """Returns, for each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return table
