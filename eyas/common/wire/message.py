"""The base of every record between a worker's front and its engine."""

from __future__ import annotations

import msgspec

from eyas.common.errors import EyasError, from_code


class TaggedMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message: a tagged union member."""


class WireFailure(msgspec.Struct, frozen=True):
    """An `EyasError` by its wire name."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: EyasError) -> WireFailure:
        """The error without its traceback, to send to another process."""
        return cls(error.code, error.message, error.param)

    def error(self) -> EyasError:
        """The error again, its class intact."""
        return from_code(self.code, self.message, self.param)
