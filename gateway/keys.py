"""Who calls: one rule for the keys of both fronts.

It knows which keys open the door and how callers are named. It refuses to know what callers may do.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

from eyas.common.errors import Unauthorized

_NAME_DIGITS = 12


class Keys:
    """The keys that callers may have. Without any, the door is open and every caller has the same name."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(f"Bearer {key}") for key in keys]

    def caller(self, authorization: str | None) -> str:
        """The caller's name, which tells its key from others and does not give it away; "" for an open door.

        `authorization` is the header or metadata as it came. Raises Unauthorized unless it carries a key.
        """
        if not self._digests:
            return ""
        given = _digest(authorization or "")
        # Every key is compared, whole: the time it takes says nothing of how close a guess was.
        matches = [digest for digest in self._digests if secrets.compare_digest(digest, given)]
        if not matches:
            raise Unauthorized(
                "the API key is missing or wrong: send 'Authorization: Bearer KEY' (over gRPC as metadata)"
            )
        return given[:_NAME_DIGITS]


def _digest(authorization: str) -> str:
    return hashlib.sha256(authorization.encode()).hexdigest()
