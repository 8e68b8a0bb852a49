"""What every message between a front and its engine is made of."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message: a tagged union member."""


class Failure(msgspec.Struct, frozen=True):
    """An `EyasError` by its wire name (`eyas.common.errors.from_code` makes it one again)."""

    code: str
    message: str
    param: str | None = None
