"""How often a request may try again: it knows counts, and which errors pass by themselves."""

from __future__ import annotations

from eyas.common.errors import Cancelled, EyasError, Overloaded, Unavailable

MAX_RETRIES = 4  # in a row, with no token delivered between them


class Retries:
    """The tries of one request."""

    def __init__(self) -> None:
        self._left = MAX_RETRIES
        self._tokens = 0

    def spend(self, error: EyasError, tokens: int, *, admitted: bool) -> None:
        """Raises `error` if trying again cannot help, or if too many tries in a row brought no token.

        `tokens`: delivered so far. Once `admitted`, a request is never refused for load: it tries again until
        its deadline.
        """
        if isinstance(error, Overloaded) and admitted:
            return
        if tokens > self._tokens:
            self._tokens, self._left = tokens, MAX_RETRIES
        if not isinstance(error, Unavailable | Cancelled) or self._left == 0:
            raise error
        self._left -= 1
