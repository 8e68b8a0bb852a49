"""Refusals of a schema: sentences that point into it."""

from __future__ import annotations

from typing import NoReturn

from eyas.common.errors import InvalidRequest


def refuse(pointer: str, reason: str) -> NoReturn:
    """Raises InvalidRequest for the place in the schema."""
    raise InvalidRequest(f"at {pointer[:200]}: {reason}", param="grammar")


class UnwritableBranch(InvalidRequest):
    """An alternative that no rule can express: an output may be another one of the alternatives."""


def leave(pointer: str, reason: str) -> NoReturn:
    """Raises UnwritableBranch for the place in the schema."""
    raise UnwritableBranch(f"at {pointer[:200]}: {reason}", param="grammar")
