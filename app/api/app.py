"""The ASGI application: its routes. Nothing in it outlives a request."""

from __future__ import annotations

from typing import NamedTuple

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from app.api.http.auth import Gatekeeper
from app.api.http.cors import with_cors
from app.api.http.errors import ErrorMiddleware, ErrorResponses
from app.api.http.layers import CountedResponses, LimitHeaders, TrailingSlash
from app.api.http.reading import Handler, ReadBounds
from app.api.routes.abuse import AbuseRoutes
from app.api.routes.admin import AdminKeyRoutes
from app.api.routes.chat import chat_door
from app.api.routes.completions import text_door
from app.api.routes.conversations import ConversationRoutes
from app.api.routes.generations import GenerationRoutes
from app.api.routes.info import InfoRoutes
from app.api.routes.metrics import MetricsRoutes
from app.api.routes.moderations import ModerationRoutes
from app.api.routes.prefixes import PrefixRoutes
from app.api.routes.safety import SafetyRoutes
from app.api.routes.service import ServiceRoutes
from app.api.routes.tokens import TokenRoutes
from app.api.routes.usage import UsageRoutes
from app.api.schema.openapi import HEALTH_PATHS, MODEL_INFO_PATHS, SERVER_INFO_PATHS, openapi
from app.intake.bodies import BodyMemory, BodyReader
from app.intake.body_budget import BodyBudget
from app.intake.door import Door
from app.intake.open_stream import Intake
from app.runtime import Runtime


def build_app(runtime: Runtime) -> ASGIApp:
    """The application over an open runtime. Raises SettingsError."""
    handlers = ErrorResponses(runtime.log).handlers()
    app = Starlette(routes=_routes(runtime), exception_handlers=handlers)
    app.router.redirect_slashes = False
    budget = BodyBudget(runtime.settings.body_memory_bytes)
    layers = BodyMemory(LimitHeaders(TrailingSlash(app), runtime.limiter), budget)
    whole = with_cors(ErrorMiddleware(layers, runtime.log), runtime.settings.cors_origins)
    return CountedResponses(whole, runtime.responses)


class _Entrance(NamedTuple):
    """The parts that requests of all kinds come through."""

    runtime: Runtime
    gatekeeper: Gatekeeper
    bodies: BodyReader
    bounds: ReadBounds


def _routes(runtime: Runtime) -> list[Route]:
    settings = runtime.settings
    gatekeeper = Gatekeeper(runtime.keys, settings.api_key, settings.host, settings.cors_origins)
    bodies = BodyReader(
        runtime.backends, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
    )
    entrance = _Entrance(runtime, gatekeeper, bodies, ReadBounds(runtime.reads, gatekeeper))
    return [
        *_generation_routes(entrance),
        *_model_routes(entrance),
        *_conversation_routes(entrance),
        *_report_routes(entrance),
        *_admin_routes(entrance),
    ]


def _generation_routes(entrance: _Entrance) -> list[Route]:
    """Under `/api` a DELETE stops and keeps, under `/v1` it forgets, as OpenAI's does."""
    runtime, gatekeeper, bodies, _ = entrance
    intake, strict = Intake(runtime, bodies), runtime.settings.strict_parameters

    def behind(door: Door) -> GenerationRoutes:
        return GenerationRoutes(door, intake, gatekeeper)

    api = behind(chat_door(store=True, strict=strict))
    path = "/api/chat/completions"
    return [
        route(path, api.create, "POST"),
        route(path + "/{id}", api.attach, "GET"),
        route(path + "/{id}", api.cancel, "DELETE"),
        route(path + "/{id}/cancel", api.cancel, "POST"),
        *_openai_routes("/v1/chat/completions", behind(chat_door(store=False, strict=strict))),
        *_openai_routes("/v1/completions", behind(text_door(strict=strict))),
    ]


def _openai_routes(path: str, generations: GenerationRoutes) -> list[Route]:
    return [
        route(path, generations.create, "POST"),
        route(path + "/{id}", generations.retrieve, "GET"),
        route(path + "/{id}", generations.delete, "DELETE"),
        route(path + "/{id}/cancel", generations.cancel, "POST"),
    ]


def _model_routes(entrance: _Entrance) -> list[Route]:
    """Models, and what is done with texts without an answer. Some routes have SGLang's older names too."""
    runtime, gatekeeper, bodies, bounds = entrance
    service = ServiceRoutes(runtime, gatekeeper)
    info = InfoRoutes(runtime, gatekeeper)
    tokens = TokenRoutes(runtime, bodies, gatekeeper)
    moderations = ModerationRoutes(runtime.moderator, runtime.limiter, bodies, gatekeeper)
    return [
        route("/api/models", bounds.paced(service.models), "GET"),
        route("/v1/models", bounds.paced(service.models_openai), "GET"),
        route("/v1/models/{id:path}", bounds.paced(service.model_openai), "GET"),
        *(route(path, bounds.paced(info.model_info), "GET") for path in MODEL_INFO_PATHS),
        *(route(path, bounds.paced(info.server_info), "GET") for path in SERVER_INFO_PATHS),
        *(route(path, bounds.paced(tokens.tokenize), "POST") for path in ("/tokenize", "/v1/tokenize")),
        *(route(path, bounds.paced(tokens.detokenize), "POST") for path in ("/detokenize", "/v1/detokenize")),
        route("/api/moderations", moderations.create, "POST"),
        route("/v1/moderations", moderations.create, "POST"),
    ]


def _conversation_routes(entrance: _Entrance) -> list[Route]:
    runtime, gatekeeper, bodies, bounds = entrance
    conversations = ConversationRoutes(runtime, bodies, gatekeeper)
    by_id = "/api/conversations/{id}"
    return [
        route("/api/conversations", bounds.in_turn(conversations.list), "GET"),
        route(by_id, bounds.in_turn(conversations.view), "GET"),
        route(by_id, bounds.paced(conversations.rename), "PATCH"),
        route(by_id, bounds.paced(conversations.delete), "DELETE"),
        route(by_id + "/restore", bounds.paced(conversations.restore), "POST"),
        route(by_id + "/export", bounds.in_turn(conversations.export), "GET"),
    ]


def _report_routes(entrance: _Entrance) -> list[Route]:
    runtime, gatekeeper, _, bounds = entrance
    service = ServiceRoutes(runtime, gatekeeper)
    metrics = MetricsRoutes(runtime, gatekeeper)
    prefixes = PrefixRoutes(runtime.prefixes, gatekeeper)
    usage = UsageRoutes(runtime.database, runtime.keys, gatekeeper)
    return [
        route("/openapi.json", openapi, "GET"),
        route("/healthz", service.healthz, "GET"),
        *(route(path, service.readyz, "GET") for path in HEALTH_PATHS),
        route("/version", service.version, "GET"),
        route("/metrics", metrics.metrics, "GET"),
        route("/api/usage", bounds.in_turn(usage.usage), "GET"),
        route("/api/prefixes", bounds.paced(prefixes.own), "GET"),
        route("/api/admin/prefixes", prefixes.list, "GET"),
    ]


def _admin_routes(entrance: _Entrance) -> list[Route]:
    runtime, gatekeeper, bodies, bounds = entrance
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


def route(path: str, handler: Handler, method: str) -> Route:
    """A route of one method; Starlette adds HEAD to a GET."""
    return Route(path, handler, methods=[method])
