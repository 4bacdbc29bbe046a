"""The ASGI application: its routes. Nothing in it outlives a request."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from app.api.http.access import Access, Endpoint
from app.api.http.auth import Gatekeeper
from app.api.http.cors import with_cors
from app.api.http.errors import ErrorMiddleware, ErrorResponses
from app.api.http.layers import CountedResponses, LimitHeaders, TrailingSlash
from app.api.routes.abuse import AbuseRoutes
from app.api.routes.admin import AdminKeyRoutes
from app.api.routes.chat import chat_door
from app.api.routes.completions import text_door
from app.api.routes.conversations import ConversationRoutes
from app.api.routes.generations import GenerationRoutes
from app.api.routes.info import InfoRoutes, openapi
from app.api.routes.metrics import MetricsRoutes
from app.api.routes.moderations import ModerationRoutes
from app.api.routes.prefixes import PrefixRoutes
from app.api.routes.safety import SafetyRoutes
from app.api.routes.service import ServiceRoutes
from app.api.routes.tokens import TokenRoutes
from app.api.routes.usage import UsageRoutes
from app.intake.bodies import BodyMemory, BodyReader
from app.intake.body_budget import BodyBudget
from app.intake.open_stream import Intake
from app.runtime import Runtime

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
    access = Access(gatekeeper, runtime.reads)
    bodies = BodyReader(
        runtime.backends, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
    )
    service = ServiceRoutes(runtime, gatekeeper)
    prefixes = PrefixRoutes(runtime.prefixes)
    usage = UsageRoutes(runtime.database, runtime.keys)
    return [
        route("/openapi.json", openapi, "GET"),
        route("/healthz", service.healthz, "GET"),
        *(route(path, service.readyz, "GET") for path in HEALTH_PATHS),
        route("/version", service.version, "GET"),
        route("/api/models", access.paced(service.models), "GET"),
        route("/v1/models", access.paced(service.models_openai), "GET"),
        route("/v1/models/{id:path}", access.paced(service.model_openai), "GET"),
        route("/api/usage", access.one_at_a_time(usage.usage), "GET"),
        route("/api/prefixes", access.paced(prefixes.own), "GET"),
        route("/api/admin/prefixes", access.admin(prefixes.list), "GET"),
        *_generation_routes(runtime, access, bodies),
        *_text_routes(runtime, access, bodies),
        *_conversation_routes(runtime, access, bodies),
        *_admin_routes(runtime, access, bodies),
    ]


def _generation_routes(runtime: Runtime, access: Access, bodies: BodyReader) -> list[Route]:
    """Under `/api` a DELETE stops and keeps, under `/v1` it forgets, as OpenAI's does."""
    intake, strict = Intake(runtime, bodies), runtime.settings.strict_parameters
    api = GenerationRoutes(chat_door(store=True, strict=strict), intake)
    path = "/api/chat/completions"
    routes = [
        route(path, access.any_caller(api.create), "POST"),
        route(path + "/{id}", access.any_caller(api.attach), "GET"),
        route(path + "/{id}", access.any_caller(api.cancel), "DELETE"),
        route(path + "/{id}/cancel", access.any_caller(api.cancel), "POST"),
    ]
    openai = {
        "/v1/chat/completions": chat_door(store=False, strict=strict),
        "/v1/completions": text_door(strict=strict),
    }
    for path, door in openai.items():
        generations = GenerationRoutes(door, intake)
        routes += [
            route(path, access.any_caller(generations.create), "POST"),
            route(path + "/{id}", access.any_caller(generations.retrieve), "GET"),
            route(path + "/{id}", access.any_caller(generations.delete), "DELETE"),
            route(path + "/{id}/cancel", access.any_caller(generations.cancel), "POST"),
        ]
    return routes


def _text_routes(runtime: Runtime, access: Access, bodies: BodyReader) -> list[Route]:
    """Routes of texts that get no answer, under the paths of SGLang and vLLM, the older ones too."""
    info, tokens = InfoRoutes(runtime), TokenRoutes(runtime, bodies)
    moderations = ModerationRoutes(runtime.safety, runtime.limiter, bodies)
    return [
        *(route(path, access.paced(info.model_info), "GET") for path in MODEL_INFO_PATHS),
        *(route(path, access.paced(info.server_info), "GET") for path in SERVER_INFO_PATHS),
        *(route(path, access.paced(tokens.tokenize), "POST") for path in ("/tokenize", "/v1/tokenize")),
        *(route(path, access.paced(tokens.detokenize), "POST") for path in ("/detokenize", "/v1/detokenize")),
        route("/api/moderations", access.any_caller(moderations.create), "POST"),
        route("/v1/moderations", access.any_caller(moderations.create), "POST"),
    ]


def _conversation_routes(runtime: Runtime, access: Access, bodies: BodyReader) -> list[Route]:
    conversations = ConversationRoutes(runtime, bodies)
    by_id = "/api/conversations/{id}"
    return [
        route("/api/conversations", access.one_at_a_time(conversations.list), "GET"),
        route(by_id, access.one_at_a_time(conversations.view), "GET"),
        route(by_id, access.paced(conversations.rename), "PATCH"),
        route(by_id, access.paced(conversations.delete), "DELETE"),
        route(by_id + "/restore", access.paced(conversations.restore), "POST"),
        route(by_id + "/export", access.one_at_a_time(conversations.export), "GET"),
    ]


def _admin_routes(runtime: Runtime, access: Access, bodies: BodyReader) -> list[Route]:
    keys = AdminKeyRoutes(runtime.database, runtime.keys, bodies)
    safety = SafetyRoutes(runtime.database, runtime.policies, runtime.reload_policy)
    path = "/api/admin/keys"
    return [
        route("/metrics", access.admin(MetricsRoutes(runtime).metrics), "GET"),
        route(path, access.admin(keys.list), "GET"),
        route(path, access.admin(keys.create), "POST"),
        route(path + "/{id}", access.admin(keys.change), "PATCH"),
        route(path + "/{id}", access.admin(keys.revoke), "DELETE"),
        route(path + "/{id}/rotate", access.admin(keys.rotate), "POST"),
        route("/api/admin/safety", access.one_at_a_time(safety.list, admin=True), "GET"),
        route("/api/admin/safety/reload", access.admin(safety.reload), "POST"),
        route("/api/admin/abuse", access.one_at_a_time(AbuseRoutes(runtime.abuse).list, admin=True), "GET"),
    ]


def route(path: str, endpoint: Endpoint, method: str) -> Route:
    """A route of one method; Starlette adds HEAD to a GET."""
    return Route(path, endpoint, methods=[method])
