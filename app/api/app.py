"""The ASGI application: its routes. Nothing in it outlives a request."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from app.api.http.auth import Gatekeeper
from app.api.http.bodies import BodyMemory, BodyReader
from app.api.http.body_budget import BodyBudget
from app.api.http.continuations import Continuations, Parts
from app.api.http.cors import with_cors
from app.api.http.errors import ErrorMiddleware, ErrorResponses
from app.api.http.paths import TrailingSlash
from app.api.http.rate_limit_headers import LimitHeaders
from app.api.http.reading import Handler, ReadBounds
from app.api.http.response_counts import CountedResponses
from app.api.routes.abuse import AbuseRoutes
from app.api.routes.admin import AdminKeyRoutes
from app.api.routes.chat import ChatRoutes
from app.api.routes.completions import CompletionRoutes
from app.api.routes.conversations import ConversationRoutes
from app.api.routes.info import InfoRoutes, openapi
from app.api.routes.metrics import MetricsRoutes
from app.api.routes.model_selection import ModelSelector
from app.api.routes.moderations import ModerationRoutes
from app.api.routes.prefixes import PrefixRoutes
from app.api.routes.safety import SafetyRoutes
from app.api.routes.service import ServiceRoutes
from app.api.routes.tokens import TokenRoutes
from app.api.routes.usage import UsageRoutes
from app.runtime import ONE_PIECE, Runtime

HEALTH_PATHS = ("/readyz", "/health", "/health_generate", "/ping")
"""Paths of one route: the names that clients of Kubernetes, vLLM, SGLang and SageMaker know it by."""
MODEL_INFO_PATHS = ("/model_info", "/get_model_info")
SERVER_INFO_PATHS = ("/server_info", "/get_server_info")


def build_app(runtime: Runtime) -> ASGIApp:
    """The application over an open runtime. Raises SettingsError."""
    handlers = ErrorResponses(runtime.log).handlers()
    app = Starlette(routes=_routes(runtime), exception_handlers=handlers)
    app.router.redirect_slashes = False
    budget = BodyBudget(runtime.settings.body_memory_bytes)
    layers = BodyMemory(LimitHeaders(TrailingSlash(app), runtime.limiter), budget)
    whole = with_cors(ErrorMiddleware(layers, runtime.log), runtime.settings.cors_origins)
    return CountedResponses(whole, runtime.responses)


def _routes(runtime: Runtime) -> list[Route]:
    settings = runtime.settings
    gatekeeper = Gatekeeper(runtime.keys, settings.api_key, settings.host, settings.cors_origins)
    bodies = BodyReader(
        runtime.backends,
        max_bytes=settings.max_body_bytes,
        timeout_s=settings.body_timeout_s,
    )
    bounds = ReadBounds(runtime.reads, gatekeeper)
    chat, completions = _generations(runtime, bodies, gatekeeper)
    metrics = MetricsRoutes(runtime, gatekeeper)
    moderations = ModerationRoutes(runtime.moderator, runtime.limiter, bodies, gatekeeper)
    prefixes = PrefixRoutes(runtime.prefixes, gatekeeper)
    service = ServiceRoutes(runtime, gatekeeper)
    usage = UsageRoutes(runtime.database, runtime.keys, gatekeeper)
    return [
        route("/openapi.json", openapi, "GET"),
        route("/healthz", service.healthz, "GET"),
        *(route(path, service.readyz, "GET") for path in HEALTH_PATHS),
        route("/version", service.version, "GET"),
        route("/metrics", metrics.metrics, "GET"),
        route("/api/models", bounds.paced(service.models), "GET"),
        route("/v1/models", bounds.paced(service.models_openai), "GET"),
        route("/v1/models/{id:path}", bounds.paced(service.model_openai), "GET"),
        route("/api/usage", bounds.in_turn(usage.usage), "GET"),
        route("/api/prefixes", bounds.paced(prefixes.own), "GET"),
        route("/api/admin/prefixes", prefixes.list, "GET"),
        route("/api/moderations", moderations.create, "POST"),
        route("/v1/moderations", moderations.create, "POST"),
        *_conversation_routes(runtime, bodies, gatekeeper, bounds),
        *_admin_routes(runtime, bodies, gatekeeper, bounds),
        *_token_routes(runtime, bodies, gatekeeper, bounds),
        *_info_routes(runtime, gatekeeper, bounds),
        *_chat_routes(chat),
        *_completion_routes(completions),
    ]


def _conversation_routes(
    runtime: Runtime, bodies: BodyReader, gatekeeper: Gatekeeper, bounds: ReadBounds
) -> list[Route]:
    conversations = ConversationRoutes(
        runtime.database,
        runtime.streams,
        runtime.reads,
        bodies,
        gatekeeper=gatekeeper,
        settle_suspended=runtime.suspensions.settle_conversation,
    )
    by_id = "/api/conversations/{id}"
    return [
        route("/api/conversations", bounds.in_turn(conversations.list), "GET"),
        route(by_id, bounds.in_turn(conversations.view), "GET"),
        route(by_id, bounds.paced(conversations.rename), "PATCH"),
        route(by_id, bounds.paced(conversations.delete), "DELETE"),
        route(by_id + "/restore", bounds.paced(conversations.restore), "POST"),
        route(by_id + "/export", bounds.in_turn(conversations.export), "GET"),
    ]


def _admin_routes(
    runtime: Runtime, bodies: BodyReader, gatekeeper: Gatekeeper, bounds: ReadBounds
) -> list[Route]:
    abuse = AbuseRoutes(runtime.abuse, gatekeeper)
    admin = AdminKeyRoutes(runtime.database, runtime.keys, bodies, gatekeeper)
    safety = SafetyRoutes(runtime.database, runtime.policies, runtime.reload_policy, gatekeeper)
    keys = "/api/admin/keys"
    return [
        route(keys, admin.list, "GET"),
        route(keys, admin.create, "POST"),
        route(keys + "/{id}", admin.change, "PATCH"),
        route(keys + "/{id}", admin.revoke, "DELETE"),
        route(keys + "/{id}/rotate", admin.rotate, "POST"),
        route("/api/admin/safety", bounds.in_turn(safety.list), "GET"),
        route("/api/admin/safety/reload", safety.reload, "POST"),
        route("/api/admin/abuse", bounds.in_turn(abuse.list), "GET"),
    ]


def _generations(
    runtime: Runtime, bodies: BodyReader, gatekeeper: Gatekeeper
) -> tuple[ChatRoutes, CompletionRoutes]:
    settings, limiter = runtime.settings, runtime.limiter
    selector = ModelSelector(
        runtime.backends, runtime.router, runtime.degrade, runtime.database, count_text=limiter.count_text
    )
    whole_bytes = ONE_PIECE * settings.stream_bytes
    parts = Parts(
        streams=runtime.streams,
        archive=runtime.archive,
        suspensions=runtime.suspensions,
        journal=runtime.journal,
        pipeline=runtime.pipeline,
        keys=runtime.keys,
        limiter=limiter,
        budgets=runtime.budgets,
    )
    continuations = Continuations(
        parts, whole_bytes, check_ready=runtime.check_ready, check_model=runtime.check_model
    )
    shared: dict[str, Any] = {
        "bodies": bodies,
        "selector": selector,
        "pipeline": runtime.pipeline,
        "streams": runtime.streams,
        "archive": runtime.archive,
        "continuations": continuations,
        "limiter": limiter,
        "reads": runtime.reads,
        "budgets": runtime.budgets,
        "addresses": runtime.abuse.addresses,
        "check_ready": runtime.check_ready,
        "check_model": runtime.check_model,
        "whole_bytes": whole_bytes,
    }
    completions = CompletionRoutes(settings, gatekeeper, backends=runtime.backends, **shared)
    return ChatRoutes(settings, gatekeeper, **shared), completions


def _token_routes(
    runtime: Runtime, bodies: BodyReader, gatekeeper: Gatekeeper, bounds: ReadBounds
) -> list[Route]:
    """Under both paths that SGLang has; vLLM has the first."""
    tokens = TokenRoutes(
        runtime.backends,
        runtime.limiter,
        bodies,
        gatekeeper,
        check_ready=runtime.check_ready,
        check_model=runtime.check_model,
    )
    return [
        route(prefix + path, bounds.paced(handler), "POST")
        for prefix in ("", "/v1")
        for path, handler in (("/tokenize", tokens.tokenize), ("/detokenize", tokens.detokenize))
    ]


def _info_routes(runtime: Runtime, gatekeeper: Gatekeeper, bounds: ReadBounds) -> list[Route]:
    """Under SGLang's names, the older ones too."""
    info = InfoRoutes(runtime.settings, runtime.backends, gatekeeper, check_ready=runtime.check_ready)
    return [
        route(path, bounds.paced(handler), "GET")
        for paths, handler in ((MODEL_INFO_PATHS, info.model_info), (SERVER_INFO_PATHS, info.server_info))
        for path in paths
    ]


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


def _completion_routes(completions: CompletionRoutes) -> list[Route]:
    by_id = "/v1/completions/{id}"
    return [
        route("/v1/completions", completions.create, "POST"),
        route(by_id, completions.retrieve, "GET"),
        route(by_id, completions.delete, "DELETE"),
        route(by_id + "/cancel", completions.cancel, "POST"),
    ]


def route(path: str, handler: Handler, method: str) -> Route:
    """A route of one method; Starlette adds HEAD to a GET."""
    return Route(path, handler, methods=[method])
