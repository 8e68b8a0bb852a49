"""The exception tree of Eyas, and the one place where a failure gets its gRPC and HTTP status.

    EyasError                      INTERNAL             500
    ├── InvalidRequest             INVALID_ARGUMENT     400   (names the field)
    │   ├── ContextLengthExceeded                       400
    │   ├── PayloadTooLarge                             413
    │   ├── HeadersTooLarge                             431
    │   └── RequestTimeout                              408   (it did not arrive in time)
    ├── Unauthorized               UNAUTHENTICATED      401
    ├── NotFound                   NOT_FOUND            404
    │   └── ModelNotFound                               404
    ├── Overloaded                 RESOURCE_EXHAUSTED   429   (Retry-After)
    ├── Cancelled                  CANCELLED            499
    ├── DeadlineExceeded           DEADLINE_EXCEEDED    504
    ├── Unavailable                UNAVAILABLE          503   (worker gone or draining: try elsewhere)
    │   └── EngineError                                 503   (the engine is lost: its worker starts again)
    ├── TransferFailed             ABORTED              502   (KV pages did not arrive)
    └── ConfigError                FAILED_PRECONDITION  500   (a flag, folder or handshake that cannot work)

It knows names and numbers only: neither grpc nor an HTTP framework is imported here.
"""

from __future__ import annotations

from typing import ClassVar


class EyasError(Exception):
    """Base class: `str(error)` is a sentence for the caller; `code` is its wire name."""

    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message: str = message
        self.param: str | None = param


class InvalidRequest(EyasError):
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class PayloadTooLarge(InvalidRequest):
    http_status = 413
    code = "payload_too_large"


class HeadersTooLarge(InvalidRequest):
    http_status = 431
    code = "headers_too_large"


class RequestTimeout(InvalidRequest):
    http_status = 408
    code = "request_timeout"


class Unauthorized(EyasError):
    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    code = "invalid_api_key"


class NotFound(EyasError):
    grpc_status = "NOT_FOUND"
    http_status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Overloaded(EyasError):
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    code = "overloaded"
    retry_after_s: ClassVar[int] = 1


class Cancelled(EyasError):
    grpc_status = "CANCELLED"
    http_status = 499
    code = "cancelled"


class DeadlineExceeded(EyasError):
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    code = "deadline_exceeded"


class Unavailable(EyasError):
    grpc_status = "UNAVAILABLE"
    http_status = 503
    code = "unavailable"


class EngineError(Unavailable):
    code = "engine_error"


class TransferFailed(EyasError):
    grpc_status = "ABORTED"
    http_status = 502
    code = "transfer_failed"


class ConfigError(EyasError):
    grpc_status = "FAILED_PRECONDITION"
    http_status = 500
    code = "config_error"


def _tree(cls: type[EyasError]) -> list[type[EyasError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


def from_code(code: str, message: str, param: str | None = None) -> EyasError:
    """The error whose wire name is `code` (an unknown name gives the base class)."""
    found = next((cls for cls in _tree(EyasError) if cls.code == code), EyasError)
    return found(message, param=param)


def from_grpc_status(status: str, message: str) -> EyasError:
    """The error for a gRPC status name, such as "UNAVAILABLE" (the most general class that has it)."""
    found = next((cls for cls in _tree(EyasError) if cls.grpc_status == status), EyasError)
    return found(message)
