"""The ASGI application: routes, errors as OpenAI's body, nothing that outlives a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.auth import Gatekeeper
from app.api.chat import ChatRoutes
from app.api.service import ServiceRoutes
from app.api.sse import CONNECTION
from app.errors import InternalError, MethodNotAllowed, NotFound, ServingError
from app.log import where
from app.runtime import Runtime

Handler = Callable[[Request], Awaitable[ASGIApp]]
_APOLOGIZED = "tokenring.apologized"


def build_app(runtime: Runtime) -> ASGIApp:
    """The application over an open runtime."""
    gatekeeper = Gatekeeper(runtime.settings.api_key)
    chat = ChatRoutes(runtime, gatekeeper)
    service = ServiceRoutes(runtime, gatekeeper)
    path = "/chat/completions"
    one = path + "/{id}"

    def route(where_: str, handler: Handler, method: str) -> Route:
        return Route(where_, handler, methods=[method])

    routes = [
        route("/healthz", service.healthz, "GET"),
        route("/readyz", service.readyz, "GET"),
        route("/api/models", service.models, "GET"),
        route("/v1/models", service.models_openai, "GET"),
        route("/v1/models/{id:path}", service.model_openai, "GET"),
        route("/api" + path, chat.create, "POST"),
        route("/api" + one, chat.attach, "GET"),
        route("/api" + one, chat.cancel, "DELETE"),
        route("/api" + one + "/cancel", chat.cancel, "POST"),
        route("/v1" + path, chat.create, "POST"),
        route("/v1" + one, chat.retrieve, "GET"),
        route("/v1" + one, chat.delete, "DELETE"),
        route("/v1" + one + "/cancel", chat.cancel, "POST"),
    ]
    handlers = {ServingError: _serving_error, HTTPException: _http_exception, Exception: _apologize}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirect is built from the Host header, and drops bodies
    return _Guard(app, runtime)


def error_response(error: ServingError) -> Response:
    """An error as its status, body and, where it has one, `Retry-After`."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 409:
        headers["x-should-retry"] = "false"  # OpenAI's SDKs send a refused conflict twice more
    return JSONResponse(error.as_body(), status_code=error.status, headers=headers)


async def _serving_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ServingError)
    return error_response(exc)


async def _http_exception(request: Request, exc: Exception) -> Response:
    """Starlette's own refusals, all of them about routes."""
    assert isinstance(exc, HTTPException)
    if exc.status_code == 405:
        allowed = ", ".join(sorted(_methods(request)))
        message = f"{request.method} is not possible here; allowed: {allowed}."
        response = error_response(MethodNotAllowed(message))
        response.headers["allow"] = allowed
        return response
    return error_response(NotFound(f"There is no route {request.url.path!r}.", code="route_not_found"))


def _methods(request: Request) -> set[str]:
    """The methods of all routes that match the request's path; Starlette names the first route's."""
    matching = [r for r in request.app.routes if r.path_regex.match(request.url.path)]
    return {method for route in matching for method in route.methods}


async def _apologize(request: Request, exc: Exception) -> Response:
    """The answer to an error that nobody foresaw; Starlette raises it on, to `_Guard`."""
    request.scope[_APOLOGIZED] = True
    return error_response(InternalError("The server failed to answer this request; it may be sent again."))


class _Guard:
    """The outermost layer: an unexpected error is a clean 500, and its message stays out of logs."""

    def __init__(self, app: ASGIApp, runtime: Runtime) -> None:
        self._app = app
        self._log = runtime.log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            return
        except Exception as exc:
            self._log.error("request_broke", path=scope.get("path"), error=where(exc))
            if scope["type"] != "http":
                raise
            if _APOLOGIZED not in scope:  # the response had begun: cut it, so that the client sees it broke
                scope["extensions"][CONNECTION].abort()
