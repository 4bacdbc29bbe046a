"""The ASGI application: its routes. Nothing in it outlives a request."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from app.api.http.auth import Gatekeeper
from app.api.http.bodies import BodyMemory, BodyReader
from app.api.http.body_budget import BodyBudget
from app.api.http.errors import ErrorMiddleware, ErrorResponses
from app.api.http.rate_limit_headers import LimitHeaders
from app.api.http.reading import Handler, ReadBounds
from app.api.routes.abuse import AbuseRoutes
from app.api.routes.admin import AdminKeyRoutes
from app.api.routes.chat import ChatRoutes
from app.api.routes.conversations import ConversationRoutes
from app.api.routes.metrics import MetricsRoutes
from app.api.routes.model_selection import ModelSelector
from app.api.routes.moderations import ModerationRoutes
from app.api.routes.prefixes import PrefixRoutes
from app.api.routes.safety import SafetyRoutes
from app.api.routes.service import ServiceRoutes
from app.api.routes.usage import UsageRoutes
from app.api.schema.openapi import openapi
from app.runtime import ONE_PIECE, Runtime


def build_app(runtime: Runtime) -> ASGIApp:
    """The application over an open runtime."""
    gatekeeper = Gatekeeper(runtime.keys, runtime.settings.api_key, runtime.settings.host)
    bodies = BodyReader(
        runtime.backends,
        max_bytes=runtime.settings.max_body_bytes,
        timeout_s=runtime.settings.body_timeout_s,
    )
    database, reads = runtime.database, runtime.reads
    abuse = AbuseRoutes(runtime.abuse, gatekeeper)
    admin = AdminKeyRoutes(database, runtime.keys, bodies, gatekeeper)
    chat = _chat(runtime, bodies, gatekeeper)
    conversations = ConversationRoutes(database, runtime.streams, reads, bodies, gatekeeper=gatekeeper)
    metrics = MetricsRoutes(runtime, gatekeeper)
    moderations = ModerationRoutes(runtime.moderator, runtime.limiter, bodies, gatekeeper)
    prefixes = PrefixRoutes(runtime.prefixes, gatekeeper)
    safety = SafetyRoutes(database, runtime.policies, runtime.reload_policy, gatekeeper)
    service = ServiceRoutes(runtime, gatekeeper)
    usage = UsageRoutes(database, runtime.keys, gatekeeper)
    bounds = ReadBounds(reads, gatekeeper)
    conversation = "/api/conversations/{id}"
    keys = "/api/admin/keys"
    routes = [
        route("/openapi.json", openapi, "GET"),
        route("/healthz", service.healthz, "GET"),
        route("/readyz", service.readyz, "GET"),
        route("/metrics", metrics.metrics, "GET"),
        route("/api/models", bounds.paced(service.models), "GET"),
        route("/api/usage", bounds.in_turn(usage.usage), "GET"),
        route("/api/prefixes", bounds.paced(prefixes.own), "GET"),
        route("/api/conversations", bounds.in_turn(conversations.list), "GET"),
        route(conversation, bounds.in_turn(conversations.view), "GET"),
        route(conversation, bounds.paced(conversations.rename), "PATCH"),
        route(conversation, bounds.paced(conversations.delete), "DELETE"),
        route(conversation + "/restore", bounds.paced(conversations.restore), "POST"),
        route(conversation + "/export", bounds.in_turn(conversations.export), "GET"),
        route(keys, admin.list, "GET"),
        route(keys, admin.create, "POST"),
        route(keys + "/{id}", admin.change, "PATCH"),
        route(keys + "/{id}", admin.revoke, "DELETE"),
        route(keys + "/{id}/rotate", admin.rotate, "POST"),
        route("/api/admin/safety", bounds.in_turn(safety.list), "GET"),
        route("/api/admin/safety/reload", safety.reload, "POST"),
        route("/api/admin/prefixes", prefixes.list, "GET"),
        route("/api/admin/abuse", bounds.in_turn(abuse.list), "GET"),
        route("/api/moderations", moderations.create, "POST"),
        route("/v1/moderations", moderations.create, "POST"),
        route("/v1/models", bounds.paced(service.models_openai), "GET"),
        route("/v1/models/{id:path}", bounds.paced(service.model_openai), "GET"),
        *_chat_routes(chat),
    ]
    app = Starlette(routes=routes, exception_handlers=ErrorResponses(runtime.log).handlers())
    app.router.redirect_slashes = False  # a redirect is built from the Host header, and drops bodies
    budget = BodyBudget(runtime.settings.body_memory_bytes)
    return ErrorMiddleware(BodyMemory(LimitHeaders(app, runtime.limiter), budget), runtime.log)


def _chat(runtime: Runtime, bodies: BodyReader, gatekeeper: Gatekeeper) -> ChatRoutes:
    settings, limiter = runtime.settings, runtime.limiter
    selector = ModelSelector(
        runtime.backends, runtime.router, runtime.degrade, runtime.database, count_text=limiter.count_text
    )
    return ChatRoutes(
        settings,
        gatekeeper,
        bodies=bodies,
        selector=selector,
        pipeline=runtime.pipeline,
        streams=runtime.streams,
        archive=runtime.archive,
        limiter=limiter,
        reads=runtime.reads,
        budgets=runtime.budgets,
        addresses=runtime.abuse.addresses,
        check_ready=runtime.check_ready,
        check_model=runtime.check_model,
        whole_bytes=ONE_PIECE * settings.stream_bytes,
    )


def _chat_routes(chat: ChatRoutes) -> list[Route]:
    """Under `/api` a DELETE stops and keeps, under `/v1` it forgets, as OpenAI's does."""
    path = "/chat/completions"
    by_id = path + "/{id}"
    return [
        route("/api" + path, chat.create, "POST"),
        route("/api" + by_id, chat.attach, "GET"),
        route("/api" + by_id, chat.cancel, "DELETE"),
        route("/api" + by_id + "/cancel", chat.cancel, "POST"),
        route("/v1" + path, chat.create, "POST"),
        route("/v1" + by_id, chat.retrieve, "GET"),
        route("/v1" + by_id, chat.delete, "DELETE"),
        route("/v1" + by_id + "/cancel", chat.cancel, "POST"),
    ]


def route(path: str, handler: Handler, method: str) -> Route:
    """A route of one method; Starlette adds HEAD to a GET."""
    return Route(path, handler, methods=[method])
