"""The ASGI application: its routes. Nothing in it outlives a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from app.api.abuse import AbuseRoutes
from app.api.admin import AdminKeyRoutes
from app.api.auth import Gatekeeper
from app.api.chat import ChatRoutes
from app.api.conversations import ConversationRoutes
from app.api.limits import LimitHeaders
from app.api.metrics import MetricsRoutes
from app.api.moderations import ModerationRoutes
from app.api.openapi import openapi
from app.api.prefixes import PrefixRoutes
from app.api.refusal import Guard, Refusals
from app.api.safety import SafetyRoutes
from app.api.service import ServiceRoutes
from app.api.usage import UsageRoutes
from app.runtime import Runtime

Handler = Callable[[Request], Awaitable[ASGIApp]]


def build_app(runtime: Runtime) -> ASGIApp:
    """The application over an open runtime."""
    gatekeeper = Gatekeeper(runtime.keys, runtime.settings.api_key, runtime.settings.host)
    abuse = AbuseRoutes(runtime, gatekeeper)
    admin = AdminKeyRoutes(runtime, gatekeeper)
    chat = ChatRoutes(runtime, gatekeeper)
    conversations = ConversationRoutes(runtime, gatekeeper)
    metrics = MetricsRoutes(runtime, gatekeeper)
    moderations = ModerationRoutes(runtime, gatekeeper)
    prefixes = PrefixRoutes(runtime, gatekeeper)
    safety = SafetyRoutes(runtime, gatekeeper)
    service = ServiceRoutes(runtime, gatekeeper)
    usage = UsageRoutes(runtime, gatekeeper)
    path = "/chat/completions"
    one = path + "/{id}"
    conversation = "/api/conversations/{id}"
    keys = "/api/admin/keys"

    def route(where_: str, handler: Handler, method: str) -> Route:
        return Route(where_, handler, methods=[method])

    routes = [
        route("/openapi.json", openapi, "GET"),
        route("/healthz", service.healthz, "GET"),
        route("/readyz", service.readyz, "GET"),
        route("/metrics", metrics.metrics, "GET"),
        route("/api/models", service.models, "GET"),
        route("/api/usage", usage.usage, "GET"),
        route("/api/prefixes", prefixes.own, "GET"),
        route("/api/conversations", conversations.list, "GET"),
        route(conversation, conversations.view, "GET"),
        route(conversation, conversations.rename, "PATCH"),
        route(conversation, conversations.delete, "DELETE"),
        route(conversation + "/restore", conversations.restore, "POST"),
        route(conversation + "/export", conversations.export, "GET"),
        route(keys, admin.list, "GET"),
        route(keys, admin.create, "POST"),
        route(keys + "/{id}", admin.change, "PATCH"),
        route(keys + "/{id}", admin.revoke, "DELETE"),
        route(keys + "/{id}/rotate", admin.rotate, "POST"),
        route("/api/admin/safety", safety.list, "GET"),
        route("/api/admin/safety/reload", safety.reload, "POST"),
        route("/api/admin/prefixes", prefixes.list, "GET"),
        route("/api/admin/abuse", abuse.list, "GET"),
        route("/api/moderations", moderations.create, "POST"),
        route("/v1/moderations", moderations.create, "POST"),
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
    app = Starlette(routes=routes, exception_handlers=Refusals(runtime.log).handlers())
    app.router.redirect_slashes = False  # a redirect is built from the Host header, and drops bodies
    return Guard(LimitHeaders(app, runtime.limiter), runtime.log)
