"""Every error a caller can meet, as one tree with stable codes.

Before the first byte an error is an HTTP status with the body of `as_body()`;
after it, the same body is the last `data:` event of the stream. The bottom of
the layer stack: it knows nothing else of the product.

    ServingError
    ├── BadRequest (400) ── ContextOverflow, UnsupportedParameter, ReplayPositionUnknown, Cancelled,
    │                        ContentFiltered, InvalidHTTP
    ├── Unauthorized (401), Forbidden (403) ── SignInRefused, NotFound (404) ── UnknownModel
    ├── MethodNotAllowed (405), Conflict (409)
    ├── ReplayExpired (410), BodyTooLarge (413), HeadersTooLarge (431)
    ├── RateLimited (429) ── TokensLimited, QuotaExceeded, KeyOverloaded
    ├── Unavailable (503, Retry-After) ── EngineNotReady, Draining, EngineOverloaded, Overloaded,
    │                                      StorageUnavailable, IssuerUnavailable, SafetyUnavailable
    └── InternalError (500) ── EngineFailed, Interrupted
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, NamedTuple


class Code(NamedTuple):
    """One row of docs/errors.md: the status of a code, and its meaning."""

    status: int
    meaning: str


CODES: Mapping[str, Code] = {
    # The request
    "invalid_json": Code(400, "The body is not a JSON object, or an object in it has a name twice."),
    "invalid_encoding": Code(400, "The body is not UTF-8."),
    "too_many_values": Code(400, "The body has more than 100,000 JSON values; send fewer, longer texts."),
    "nesting_too_deep": Code(400, "The body nests arrays and objects deeper than 64 levels."),
    "missing_parameter": Code(400, "A required parameter is absent."),
    "invalid_type": Code(400, "A parameter has the wrong JSON type."),
    "invalid_value": Code(400, "A parameter's value is out of range or cannot be read."),
    "invalid_role": Code(400, "The `role` of a message is none of OpenAI's."),
    "unknown_parameter": Code(400, "There is no such parameter; remove it."),
    "unsupported_parameter": Code(400, "This server, or the model, cannot honour the parameter."),
    "unsupported_content": Code(400, "The model cannot read a content part, for example an image."),
    "images_refused": Code(400, "The safety policy refuses images, which no screen reads."),
    "grammar_too_slow": Code(400, "The grammar takes more time than a request may, as the message says."),
    "content_filter": Code(
        400,
        "The safety policy refuses the prompt: the message says what to do, `moderation` beside `error` why.",
    ),
    "context_length_exceeded": Code(
        400, "Prompt and answer exceed the context, by the tokens in the message."
    ),
    "body_timeout": Code(400, "The body did not arrive within `body_timeout_s`."),
    "body_too_large": Code(413, "The body is over `max_body_bytes`, or over the bound of its route."),
    "headers_too_large": Code(431, "The request line and headers are over 64 KiB, or over 256 fields."),
    "invalid_http": Code(400, "The bytes are not an HTTP request."),
    "cancelled": Code(400, "The request was cancelled before it was admitted."),
    # Who and where
    "missing_api_key": Code(401, "The request has no `Authorization: Bearer KEY`."),
    "invalid_api_key": Code(401, "The API key is unknown, expired or revoked."),
    "forbidden": Code(403, "The route needs an admin key, or in open mode a request of this machine."),
    "sign_in_refused": Code(403, "The issuer or this server did not accept the sign-in; begin it again."),
    "grammar_forbidden": Code(403, "The key may use JSON schemas and tools, and no other grammar."),
    "not_found": Code(404, "The object does not exist, or is not yours."),
    "model_not_found": Code(404, "No model of that name is served, or the key may not use it."),
    "key_not_found": Code(404, "There is no key of that id."),
    "route_not_found": Code(404, "There is no such route."),
    "method_not_allowed": Code(405, "The route has other methods; the header `Allow` names them."),
    # The key's limits
    "rate_limit_exceeded": Code(
        429, "The key is at its limit of requests, tokens or generations, or its owner at one of reads."
    ),
    "insufficient_quota": Code(429, "The owner has used up the key's budget of this UTC month."),
    "key_overloaded": Code(429, "The server is full, and the key has more than its fair share of it."),
    # Streams
    "stream_not_found": Code(404, "The stream is unknown, not yours, or its retention has ended."),
    "invalid_last_event_id": Code(400, "`Last-Event-ID` is not a number, or no event of that id was sent."),
    "events_expired": Code(410, "The events after `Last-Event-ID` have left the server's memory."),
    "interrupted": Code(500, "The server ended while it answered; the rest of the answer is lost."),
    "conversation_not_found": Code(404, "The conversation is unknown, not yours, deleted or purged."),
    "conversation_too_long": Code(
        400, "A turn cannot continue so many messages; start a conversation, or continue from an earlier one."
    ),
    "message_not_found": Code(404, "The conversation has no such message."),
    "conversation_busy": Code(409, "Another turn of this conversation is being answered; wait for its end."),
    "invalid_cursor": Code(400, "`cursor` is not a `next_cursor` of this list."),
    "conflict": Code(409, "The request contradicts what the server already has."),
    "idempotency_key_reused": Code(409, "The `Idempotency-Key` was used with another body; use a new one."),
    # The server
    "internal_error": Code(500, "A fault of the server; send the request again."),
    "engine_failed": Code(500, "The engine died while it generated; send the request again."),
    "engine_restarted": Code(500, "The engine was restarted, and this answer could not continue."),
    "unavailable": Code(503, "The server cannot take the request now."),
    "engine_not_ready": Code(503, "The engine is starting, or cannot be reached; see `/readyz`."),
    "issuer_unavailable": Code(503, "The OpenID Connect issuer cannot be reached; keys work all the same."),
    "engine_overloaded": Code(503, "The engine has no room for the request."),
    "overloaded": Code(503, "The server is full, and the request would wait for too long."),
    "queue_timeout": Code(503, "The request waited as long as its key's tier may."),
    "too_many_bodies": Code(503, "Request bodies fill `body_memory_bytes`, or this caller's part of it."),
    "too_many_streams": Code(503, "`max_live_streams` generations are running."),
    "storage_unavailable": Code(503, "The store cannot be read or written: disk full, locked, or broken."),
    "safety_unavailable": Code(503, "A safety check failed or took too long; send the request again."),
    "draining": Code(503, "The server is stopping."),
}
"""Every code a caller can meet. Codes are stable: one may be added, none changes its meaning."""

_TYPES: Mapping[int, str] = {
    **dict.fromkeys((400, 404, 405, 409, 410, 413, 431), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    **dict.fromkeys((500, 503), "server_error"),
}
"""OpenAI's `type` of an error by its status; 429 has several."""


class ServingError(Exception):
    """An error with an HTTP status, a stable `code`, and a message that says what to do.

    A class has the status of its `default_code`, and OpenAI's `type` for that status.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"
    default_retry_after_s: ClassVar[int | None] = None

    def __init_subclass__(cls) -> None:
        cls.status = CODES[cls.default_code].status
        if "type" not in vars(cls) and cls.status in _TYPES:
            cls.type = _TYPES[cls.status]

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.should_retry = should_retry
        """False where a client that tries again by itself will hardly do better."""
        self.message = _elided(message, 500)
        self.code = code or self.default_code
        self.param = param and _elided(param, 100)
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s

    def with_caller_param(self, caller_names: Mapping[str, str]) -> None:
        """Name the caller's own parameter: `caller_names` has its name for each that was translated."""
        name = re.split(r"[.\[]", self.param or "", maxsplit=1)[0]
        if self.param is not None and name in caller_names:
            self.message = self.message.replace(self.param, caller_names[name], 1)
            self.args = (self.message,)
            self.param = caller_names[name]

    def forget_frames(self) -> None:
        """Release the frames that it passed, which hold the request and the error in a cycle."""
        self.__traceback__ = self.__context__ = self.__cause__ = None

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


def _elided(text: str, limit: int) -> str:
    """`text` without its middle when it is longer: messages quote what callers send."""
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-(limit // 2) :]}"


class BadRequest(ServingError):
    """The request itself is wrong; sending it again unchanged fails again."""

    default_code = "invalid_value"


class ContextOverflow(BadRequest):
    """Prompt and answer do not fit the model's context window."""

    default_code = "context_length_exceeded"


class UnsupportedParameter(BadRequest):
    """A parameter this server, or the loaded model, cannot honour."""

    default_code = "unsupported_parameter"


def unknown_parameter(param: str, shown: str = "", advice: str = "remove it") -> UnsupportedParameter:
    """The error for a name that no parameter has; `shown` is the name in quotes, where not all of it is."""
    message = f"Unknown parameter {shown or repr(param)}; {advice}."
    return UnsupportedParameter(message, code="unknown_parameter", param=param)


class ReplayPositionUnknown(BadRequest):
    """`Last-Event-ID` is not a number, or beyond what was ever sent."""

    default_code = "invalid_last_event_id"


class Cancelled(BadRequest):
    """The caller left or stopped the request before it was admitted."""

    default_code = "cancelled"


class ContentFiltered(BadRequest):
    """The policy blocks the prompt; `moderation` is OpenAI's object (app.safety.moderation)."""

    default_code = "content_filter"

    def __init__(
        self,
        message: str,
        moderation: Mapping[str, object] | None = None,
        *,
        code: str | None = None,
        param: str | None = "messages",
    ) -> None:
        super().__init__(message, code=code, param=param)
        self._moderation = moderation

    def as_body(self) -> dict[str, object]:
        """The error body, with the `moderation` object beside `error`."""
        body = super().as_body()
        return body if self._moderation is None else body | {"moderation": dict(self._moderation)}


class InvalidHTTP(BadRequest):
    """The bytes are not an HTTP request."""

    default_code = "invalid_http"


class GrammarTooSlow(BadRequest):
    """A grammar costs more than one request may take of the time that all share."""

    default_code = "grammar_too_slow"


class Unauthorized(ServingError):
    """No API key, or none that is valid."""

    default_code = "invalid_api_key"


class Forbidden(ServingError):
    """The caller may not do this here."""

    default_code = "forbidden"


class SignInRefused(Forbidden):
    """A person's sign-in proves nothing, or the person may not use this server."""

    default_code = "sign_in_refused"


class NotFound(ServingError):
    """The object does not exist, or belongs to another owner."""

    default_code = "not_found"


class UnknownModel(NotFound):
    """No model of that name is served here."""

    default_code = "model_not_found"


class MethodNotAllowed(ServingError):
    """The route exists, the method does not."""

    default_code = "method_not_allowed"


class Conflict(ServingError):
    """The request contradicts one the server already has."""

    default_code = "conflict"


class ReplayExpired(ServingError):
    """The events asked for have left the ring."""

    default_code = "events_expired"


class BodyTooLarge(ServingError):
    """The request body is over the limit."""

    default_code = "body_too_large"


class HeadersTooLarge(ServingError):
    """The request line and headers are over the limit."""

    default_code = "headers_too_large"


class RateLimited(ServingError):
    """The caller's key has reached a limit; without `Retry-After` it does not help to try again."""

    type = "requests"
    default_code = "rate_limit_exceeded"


class TokensLimited(RateLimited):
    """The limit is that of tokens per minute."""

    type = "tokens"


class QuotaExceeded(RateLimited):
    """The month's budget is used up."""

    type = "insufficient_quota"
    default_code = "insufficient_quota"


class KeyOverloaded(RateLimited):
    """The server is full, and the key has more than its share of it."""

    type = "tokens"
    default_code = "key_overloaded"


class Unavailable(ServingError):
    """The node cannot take the request now; `Retry-After` says when to try again."""

    default_code = "unavailable"
    default_retry_after_s = 1


class EngineNotReady(Unavailable):
    """The engine is still starting, or has died."""

    default_code = "engine_not_ready"
    default_retry_after_s = 5


class EngineOverloaded(Unavailable):
    """The engine refused a request it has no room for."""

    default_code = "engine_overloaded"


class Overloaded(Unavailable):
    """The server is full; no limit of the key was exceeded."""

    default_code = "overloaded"


class Draining(Unavailable):
    """The server is stopping."""

    default_code = "draining"


class StorageUnavailable(Unavailable):
    """Nothing can be written to the store now."""

    default_code = "storage_unavailable"
    default_retry_after_s = 10


class IssuerUnavailable(Unavailable):
    """The OpenID Connect issuer cannot be reached, or does not answer as one."""

    default_code = "issuer_unavailable"
    default_retry_after_s = 10


class SafetyUnavailable(Unavailable):
    """A screen threw, took too long, or is not there: fail closed."""

    default_code = "safety_unavailable"


class InternalError(ServingError):
    """A fault of ours; the request may be sent again."""


class EngineFailed(InternalError):
    """The engine died while it was generating."""

    default_code = "engine_failed"


class Interrupted(InternalError):
    """The process that generated this answer died; `details` has its known counts."""

    default_code = "interrupted"

    def __init__(self, message: str, details: Mapping[str, object]) -> None:
        super().__init__(message)
        self._details = dict(details)

    def as_body(self) -> dict[str, object]:
        """The error body, with the counts and the last event id known."""
        error = super().as_body()["error"]
        assert isinstance(error, dict)
        return {"error": error | self._details}
