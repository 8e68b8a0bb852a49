"""API keys: one rule for both fronts.

It knows which keys are valid and how callers are named. It refuses to know what callers may do.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

from eyas.common.errors import Unauthorized

_NAME_DIGITS = 12


class Keys:
    """The valid keys. Without any, every caller is let in and all have the same name."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(f"Bearer {key}") for key in keys]

    def caller(self, authorization: str | None) -> str:
        """The caller's name: the start of a hash of its key; "" if no keys are configured.

        `authorization` is the header or metadata as it came. Raises Unauthorized unless it carries a key.
        """
        if not self._digests:
            return ""
        given = _digest(authorization or "")
        # Every key is compared in constant time, so that the time does not tell how close a guess was.
        matches = [digest for digest in self._digests if secrets.compare_digest(digest, given)]
        if not matches:
            raise Unauthorized(
                "the API key is missing or wrong: send 'Authorization: Bearer KEY' (over gRPC as metadata)"
            )
        return given[:_NAME_DIGITS]


def _digest(authorization: str) -> str:
    return hashlib.sha256(authorization.encode()).hexdigest()
