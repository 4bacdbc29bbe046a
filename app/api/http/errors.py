"""Errors before the first byte of a response: OpenAI's body, the headers, one log line.

Every such answer has an `x-request-id`, the one in the log. A request that got as far as a
generation has that generation's id and log line (app.pipeline.trace); the others get theirs here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from app.errors import InternalError, MethodNotAllowed, NotFound, RateLimited, ServingError
from app.intake.scope import CONNECTION, KEY_ID, OWNER, RESPONSE_HEADERS, STREAM_ID
from app.log import safe_traceback

LOG_LINES = 10
"""Lines that are written of each `LOG_WINDOW_S`; enough to see what a client does wrong."""
LOG_WINDOW_S = 1.0
_ANSWERED = "tokenring.answered"
Handler = Callable[[Request, Exception], Awaitable[Response]]


class ErrorResponses:
    """Answers errors, and logs them without any text of the request."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._throttled_log = ThrottledLog(log)

    def handlers(self) -> Mapping[Any, Handler]:
        """Starlette's exception handlers."""
        return {
            ServingError: self._serving,
            HTTPException: self._routing,
            ClientDisconnect: self._client_left,
            Exception: self._unforeseen,
        }

    async def _serving(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, ServingError)
        exc.forget_frames()
        return self._answer(request, exc)

    async def _client_left(self, _request: Request, _exc: Exception) -> Response:
        """The client left, or was refused, before its body was complete: no answer is read."""
        return Response(status_code=400)

    async def _routing(self, request: Request, exc: Exception) -> Response:
        """Answer Starlette's own errors: unknown routes and methods."""
        assert isinstance(exc, HTTPException)
        if exc.status_code == 405:
            allowed = ", ".join(sorted(_methods(request)))
            message = f"{request.method} is not possible here; allowed: {allowed}."
            response = self._answer(request, MethodNotAllowed(message))
            response.headers["allow"] = allowed
            return response
        message = f"There is no route {request.url.path!r}."
        return self._answer(request, NotFound(message, code="route_not_found"))

    async def _unforeseen(self, request: Request, exc: Exception) -> Response:
        """Answer 500. Starlette then raises the error again, and `ErrorMiddleware` logs where it happened."""
        request.scope[_ANSWERED] = True
        message = "The server failed to answer this request; it may be sent again."
        return self._answer(request, InternalError(message))

    def _answer(self, request: Request, error: ServingError) -> Response:
        request_id = request.scope.get(STREAM_ID)
        if request_id is None:
            request_id = f"req_{secrets.token_hex(14)}"
            route = getattr(request.scope.get("route"), "path", None)
            # A client without a key could otherwise fill the log.
            log = self._log if request.scope.get(OWNER) else self._throttled_log
            log.info(
                "refused",
                request_id=request_id,
                method=request.method,
                route=route,
                key=request.scope.get(KEY_ID),
                status=error.status,
                error=error.code,
            )
        return error_response(error, request_id, request.scope.get(RESPONSE_HEADERS, {}))


def error_response(error: ServingError, request_id: str, extra_headers: Mapping[str, str]) -> Response:
    """An error as a response: status, body, the headers that go with it and `extra_headers`."""
    headers = {"x-request-id": request_id, **extra_headers}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    pointless = isinstance(error, RateLimited) and error.retry_after_s is None
    if error.status == 409 or pointless or error.should_retry is False:
        headers["x-should-retry"] = "false"  # OpenAI's SDKs send these twice more
    return JSONResponse(error.as_body(), status_code=error.status, headers=headers)


def _methods(request: Request) -> set[str]:
    """The methods of all routes that match the request's path; Starlette names the first route's."""
    matching = [r for r in request.app.routes if r.path_regex.match(request.url.path)]
    return {method for route in matching for method in route.methods}


class ErrorMiddleware:
    """The outermost layer: answers an unexpected error with 500, and keeps its message out of the logs."""

    def __init__(self, app: ASGIApp, log: FilteringBoundLogger) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            return
        except Exception as exc:
            self._log.error("request_broke", path=scope.get("path"), error=safe_traceback(exc))
            if scope["type"] != "http":
                raise
            if _ANSWERED not in scope:  # the response had begun: cut it, so that the client sees it broke
                scope["extensions"][CONNECTION].abort()


class ThrottledLog:
    """Log lines about requests without a valid key: the first of each window, the others as a number."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._written = 0
        self._suppressed: Counter[str] = Counter()

    def info(self, event: str, *, error: str, **fields: Any) -> None:
        """Write a line, or count it by its error."""
        if self._written == 0:
            asyncio.get_running_loop().call_later(LOG_WINDOW_S, self._end_window, event)
        self._written += 1
        if self._written <= LOG_LINES:
            self._log.info(event, error=error, **fields)
        else:
            self._suppressed[error] += 1

    def _end_window(self, event: str) -> None:
        if self._suppressed:
            self._log.warning(
                f"{event}_more", requests=self._suppressed.total(), errors=dict(self._suppressed)
            )
        self._written = 0
        self._suppressed.clear()
