"""The base of every message between a front and its engine."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message: a tagged union member."""


class Failure(msgspec.Struct, frozen=True):
    """An `EyasError` under its wire name; `eyas.common.errors.from_code` turns it back into the error."""

    code: str
    message: str
    param: str | None = None
