"""Every error a caller can meet, as one tree with stable codes.

Before the first byte an error is an HTTP status with the body of `as_body()`;
after it, the same body is the last `data:` event of the stream. The bottom of
the layer stack: it knows nothing else of the product.

    ServingError
    ├── BadRequest (400) ── ContextOverflow, UnsupportedParameter, ReplayPositionUnknown, Cancelled
    ├── Unauthorized (401), Forbidden (403), NotFound (404) ── UnknownModel
    ├── MethodNotAllowed (405), Conflict (409)
    ├── ReplayExpired (410), BodyTooLarge (413)
    ├── Unavailable (503, Retry-After) ── EngineNotReady, Draining, EngineOverloaded
    └── InternalError (500) ── EngineFailed
"""

from __future__ import annotations

from typing import ClassVar


class ServingError(Exception):
    """An error with an HTTP status, a stable `code`, and a message that says what to do."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after_s = retry_after_s

    def as_body(self) -> dict[str, object]:
        """OpenAI's error body (API reference, "Error codes")."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class BadRequest(ServingError):
    """The request itself is wrong; sending it again unchanged fails again."""

    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class ContextOverflow(BadRequest):
    """Prompt and answer do not fit the model's context window."""

    default_code = "context_length_exceeded"


class UnsupportedParameter(BadRequest):
    """A parameter this server, or the loaded model, cannot honour."""

    default_code = "unsupported_parameter"


class ReplayPositionUnknown(BadRequest):
    """`Last-Event-ID` is not a number, or beyond what was ever sent."""

    default_code = "invalid_last_event_id"


class Cancelled(BadRequest):
    """The caller left or stopped the request before it was admitted."""

    default_code = "cancelled"


class Unauthorized(ServingError):
    """No API key, or a wrong one."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(ServingError):
    """The caller may not do this here."""

    status = 403
    type = "permission_error"
    default_code = "forbidden"


class NotFound(ServingError):
    """The object does not exist, or belongs to someone else."""

    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class UnknownModel(NotFound):
    """No model of that name is served here."""

    default_code = "model_not_found"


class MethodNotAllowed(ServingError):
    """The route exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class Conflict(ServingError):
    """The request contradicts one the server already has."""

    status = 409
    type = "invalid_request_error"
    default_code = "conflict"


class ReplayExpired(ServingError):
    """The events asked for have left the ring."""

    status = 410
    type = "invalid_request_error"
    default_code = "events_expired"


class BodyTooLarge(ServingError):
    """The request body is over the limit."""

    status = 413
    type = "invalid_request_error"
    default_code = "body_too_large"


class Unavailable(ServingError):
    """The node cannot take the request now; `Retry-After` says when to try again."""

    status = 503
    type = "server_error"
    default_code = "unavailable"


class EngineNotReady(Unavailable):
    """The engine is still starting, or has died."""

    default_code = "engine_not_ready"


class EngineOverloaded(Unavailable):
    """The engine refused a request it has no room for."""

    default_code = "engine_overloaded"


class Draining(Unavailable):
    """The server is stopping."""

    default_code = "draining"


class InternalError(ServingError):
    """A fault of ours; the request may be sent again."""


class EngineFailed(InternalError):
    """The engine died while it was generating."""

    default_code = "engine_failed"
