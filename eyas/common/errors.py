"""The exception tree of Eyas: the one place where a failure gets its gRPC and HTTP status.

    EyasError                      INTERNAL             500
    ├── LogitsNotFinite                                 500   (the model gave NaN for this request)
    ├── InvalidRequest             INVALID_ARGUMENT     400   (names the field)
    │   ├── ContextLengthExceeded                       400
    │   ├── GrammarTooSlow                              400
    │   ├── PayloadTooLarge                             413
    │   ├── HeadersTooLarge                             431
    │   └── RequestTimeout                              408   (it did not arrive in time)
    ├── Unauthorized               UNAUTHENTICATED      401
    ├── Forbidden                  PERMISSION_DENIED    403   (a web page, or a folder, that may not)
    ├── NotFound                   NOT_FOUND            404
    │   └── ModelNotFound                               404
    ├── Overloaded                 RESOURCE_EXHAUSTED   429   (Retry-After)
    │   └── RateLimited                                 429   (a limit of the caller's key)
    ├── Cancelled                  CANCELLED            499
    ├── DeadlineExceeded           DEADLINE_EXCEEDED    504
    ├── Unavailable                UNAVAILABLE          503   (worker gone or draining: try elsewhere)
    │   ├── EngineError                                 503   (the engine is lost: its worker starts again)
    │   └── WeightsChanging                             503   (new weights come: it may begin again)
    ├── TransferFailed             ABORTED              502   (KV pages did not arrive)
    ├── WeightsChanged             ABORTED              409   (new weights came in mid-answer)
    ├── ConfigError                FAILED_PRECONDITION  500   (a flag, folder or handshake that cannot work)
    └── Busy                       FAILED_PRECONDITION  400   (requests run that this would disturb)

Nothing here imports grpc or an HTTP framework.
"""

from __future__ import annotations

from typing import ClassVar


class EyasError(Exception):
    """Base class. `str(error)` is a sentence for the caller; `code` is its name on the wire.

    `param` names the field or flag at fault, if one is.
    """

    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message: str = message
        self.param: str | None = param


class LogitsNotFinite(EyasError):
    """The model gave NaN or infinity for this request; no other worker would do better."""

    code = "logits_not_finite"


class InvalidRequest(EyasError):
    """The request is wrong; `param` names the field."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit into the context length."""

    code = "context_length_exceeded"


class GrammarTooSlow(InvalidRequest):
    """The grammar of the answer takes too long to follow."""

    code = "grammar_too_slow"


class PayloadTooLarge(InvalidRequest):
    """The body or message is too large."""

    http_status = 413
    code = "payload_too_large"


class HeadersTooLarge(InvalidRequest):
    """The HTTP header is too large."""

    http_status = 431
    code = "headers_too_large"


class RequestTimeout(InvalidRequest):
    """The request did not arrive completely in time."""

    http_status = 408
    code = "request_timeout"


class Unauthorized(EyasError):
    """The API key is missing or wrong."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    code = "invalid_api_key"


class Forbidden(EyasError):
    """The request may come from another site's web page, or names a folder that callers may not."""

    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    code = "forbidden"


class NotFound(EyasError):
    """Nothing has that name."""

    grpc_status = "NOT_FOUND"
    http_status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    """This server does not serve that model."""

    code = "model_not_found"


class Overloaded(EyasError):
    """A queue or limit is full; `retry_after_s` is the seconds to wait."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int = 1, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The caller's key has used what it may."""

    code = "rate_limit_exceeded"


class Cancelled(EyasError):
    """The caller left, reads too slowly, or has aborted it."""

    grpc_status = "CANCELLED"
    http_status = 499
    code = "cancelled"


class DeadlineExceeded(EyasError):
    """The deadline passed."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    code = "deadline_exceeded"


class Unavailable(EyasError):
    """The worker is gone or draining: another one may serve the request."""

    grpc_status = "UNAVAILABLE"
    http_status = 503
    code = "unavailable"


class EngineError(Unavailable):
    """The engine is lost; its worker starts again."""

    code = "engine_error"


class WeightsChanging(Unavailable):
    """A worker gets new weights, or has others than the request: one without a token begins again."""

    code = "weights_changing"


class TransferFailed(EyasError):
    """KV pages did not arrive."""

    grpc_status = "ABORTED"
    http_status = 502
    code = "transfer_failed"


class WeightsChanged(EyasError):
    """The weights changed in the middle of an answer, which is wholly of one version or none."""

    grpc_status = "ABORTED"
    http_status = 409
    code = "weights_changed"


class ConfigError(EyasError):
    """A flag, folder or peer that cannot work; `param` names the flag."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 500
    code = "config_error"


class Busy(EyasError):
    """Requests run that this would disturb: try again when they have ended."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 400
    code = "busy"


def _tree(cls: type[EyasError]) -> list[type[EyasError]]:
    """The errors of this file, which have names on the wire; others are known by the one that they refine."""
    own = [sub for sub in cls.__subclasses__() if sub.__module__ == __name__]
    return [cls, *(leaf for sub in own for leaf in _tree(sub))]


def from_code(code: str, message: str, param: str | None = None) -> EyasError:
    """The error with this name on the wire; the base class for an unknown name."""
    error_class = next((cls for cls in _tree(EyasError) if cls.code == code), EyasError)
    return error_class(message, param=param)


def from_grpc_status(status: str, message: str) -> EyasError:
    """The error for a gRPC status name such as "UNAVAILABLE": the most general class with it."""
    error_class = next((cls for cls in _tree(EyasError) if cls.grpc_status == status), EyasError)
    return error_class(message)
