"""The ASGI application: its routes. Nothing in it outlives a request."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from app.api.http.auth import Access, CheckedHandler, Gatekeeper
from app.api.http.cors import with_cors
from app.api.http.errors import ErrorMiddleware, ErrorResponses
from app.api.http.layers import CountedResponses, LimitHeaders
from app.api.http.proxies import with_trusted_proxies
from app.api.routes.admin import AbuseRoutes, AdminKeyRoutes
from app.api.routes.console import ConsoleRoutes, load
from app.api.routes.conversations import ConversationRoutes
from app.api.routes.endpoints import chat_endpoint, text_endpoint
from app.api.routes.generations import GenerationRoutes
from app.api.routes.live import LiveRoutes
from app.api.routes.metrics import MetricsRoutes
from app.api.routes.moderations import ModerationRoutes
from app.api.routes.prefixes import PrefixRoutes
from app.api.routes.safety import SafetyRoutes
from app.api.routes.safety_report import SafetyReportRoutes
from app.api.routes.service import ServiceRoutes, openapi
from app.api.routes.sign_in import SignInRoutes
from app.api.routes.tokens import TokenRoutes
from app.api.routes.usage import UsageRoutes
from app.intake.bodies import BodyMemoryLayer, BodyReader
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
    layers = BodyMemoryLayer(LimitHeaders(app, runtime.limiter), budget)
    whole = with_cors(ErrorMiddleware(layers, runtime.log), runtime.settings.cors_origins)
    counted = CountedResponses(whole, runtime.responses)
    return with_trusted_proxies(counted, runtime.settings)


def _routes(runtime: Runtime) -> list[Route]:
    settings = runtime.settings
    gatekeeper = Gatekeeper(runtime.keys, settings)
    access = Access(gatekeeper, runtime.reads)
    bodies = BodyReader(
        runtime.backends, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
    )
    service = ServiceRoutes(runtime, gatekeeper)
    prefixes = PrefixRoutes(runtime.prefixes)
    usage = UsageRoutes(runtime.database, runtime.keys)
    console = ConsoleRoutes(load())
    return [
        route("/", console.page, "GET"),
        route("/console/{version}/{path:path}", console.file, "GET"),
        route("/openapi.json", openapi, "GET"),
        route("/healthz", service.healthz, "GET"),
        *(route(path, service.readyz, "GET") for path in HEALTH_PATHS),
        route("/version", service.version, "GET"),
        route("/api/models", access(service.models, paced=True), "GET"),
        *(route(path, access(service.model_info, paced=True), "GET") for path in MODEL_INFO_PATHS),
        *(route(path, access(service.server_info, paced=True), "GET") for path in SERVER_INFO_PATHS),
        route("/v1/models", access(service.models_openai, paced=True), "GET"),
        route("/v1/models/{id:path}", access(service.model_openai, paced=True), "GET"),
        route("/api/me", access(service.me, paced=True), "GET"),
        route("/api/usage", access(usage.usage, alone=True), "GET"),
        route("/api/prefixes", access(prefixes.own, paced=True), "GET"),
        route("/api/admin/prefixes", access(prefixes.list, admin=True), "GET"),
        *_sign_in_routes(runtime, bodies),
        *_generation_routes(runtime, access, bodies),
        *_text_routes(runtime, access, bodies),
        *_conversation_routes(runtime, access, bodies),
        *_admin_routes(runtime, access, bodies),
    ]


def _sign_in_routes(runtime: Runtime, bodies: BodyReader) -> list[Route]:
    sign_in = SignInRoutes(runtime.settings, runtime.keys, bodies, runtime.log)
    return [
        route("/api/sign-in", sign_in.methods, "GET"),
        route("/api/sign-in/oidc", sign_in.oidc, "POST"),
    ]


def _generation_routes(runtime: Runtime, access: Access, bodies: BodyReader) -> list[Route]:
    """Under `/api` a DELETE stops and keeps, under `/v1` it forgets, as OpenAI's does."""
    intake, strict = Intake(runtime, bodies), runtime.settings.strict_parameters
    api = GenerationRoutes(chat_endpoint(store=True, strict=strict), intake)
    path = "/api/chat/completions"
    routes = [
        route(path, access(api.create), "POST"),
        route(path + "/{id}", access(api.attach), "GET"),
        route(path + "/{id}", access(api.cancel), "DELETE"),
        route(path + "/{id}/cancel", access(api.cancel), "POST"),
    ]
    openai = {
        "/v1/chat/completions": chat_endpoint(store=False, strict=strict),
        "/v1/completions": text_endpoint(strict=strict),
    }
    for path, endpoint in openai.items():
        generations = GenerationRoutes(endpoint, intake)
        routes += [
            route(path, access(generations.create), "POST"),
            route(path + "/{id}", access(generations.retrieve), "GET"),
            route(path + "/{id}", access(generations.delete), "DELETE"),
            route(path + "/{id}/cancel", access(generations.cancel), "POST"),
        ]
    return routes


def _text_routes(runtime: Runtime, access: Access, bodies: BodyReader) -> list[Route]:
    """Routes of texts that get no answer, under the paths of SGLang and vLLM, the older ones too."""
    tokens = TokenRoutes(runtime, bodies)
    moderations = ModerationRoutes(runtime.safety, runtime.limiter, bodies)
    return [
        *(route(path, access(tokens.tokenize, paced=True), "POST") for path in ("/tokenize", "/v1/tokenize")),
        *(
            route(path, access(tokens.detokenize, paced=True), "POST")
            for path in ("/detokenize", "/v1/detokenize")
        ),
        route("/api/moderations", access(moderations.create), "POST"),
        route("/v1/moderations", access(moderations.create), "POST"),
    ]


def _conversation_routes(runtime: Runtime, access: Access, bodies: BodyReader) -> list[Route]:
    conversations = ConversationRoutes(runtime, bodies)
    by_id = "/api/conversations/{id}"
    return [
        route("/api/conversations", access(conversations.list, alone=True), "GET"),
        route("/api/conversations", access(conversations.create, paced=True), "POST"),
        route(by_id, access(conversations.view, alone=True), "GET"),
        route(by_id, access(conversations.rename, paced=True), "PATCH"),
        route(by_id, access(conversations.delete, paced=True), "DELETE"),
        route(by_id + "/restore", access(conversations.restore, paced=True), "POST"),
        route(by_id + "/export", access(conversations.export, alone=True), "GET"),
    ]


def _admin_routes(runtime: Runtime, access: Access, bodies: BodyReader) -> list[Route]:
    keys = AdminKeyRoutes(runtime.database, runtime.keys, bodies)
    safety = SafetyRoutes(runtime.database, runtime.policies, runtime.reload_policy)
    live, report = LiveRoutes(runtime), SafetyReportRoutes(runtime.settings)
    path = "/api/admin/keys"
    return [
        route("/metrics", access(MetricsRoutes(runtime).metrics, admin=True), "GET"),
        route(path, access(keys.list, admin=True), "GET"),
        route(path, access(keys.create, admin=True), "POST"),
        route(path + "/{id}", access(keys.change, admin=True), "PATCH"),
        route(path + "/{id}", access(keys.revoke, admin=True), "DELETE"),
        route(path + "/{id}/rotate", access(keys.rotate, admin=True), "POST"),
        route("/api/admin/live", access(live.live, admin=True), "GET"),
        route("/api/admin/requests", access(live.requests, admin=True), "GET"),
        route("/api/admin/requests/{id}/cancel", access(live.cancel, admin=True), "POST"),
        route("/api/admin/safety", access(safety.list, admin=True, alone=True), "GET"),
        route("/api/admin/safety/report", access(report.report, admin=True, paced=True), "GET"),
        route("/api/admin/safety/reload", access(safety.reload, admin=True), "POST"),
        route("/api/admin/abuse", access(AbuseRoutes(runtime.abuse).list, admin=True, alone=True), "GET"),
    ]


def route(path: str, endpoint: CheckedHandler, method: str) -> Route:
    """A route of one method; Starlette adds HEAD to a GET."""
    return Route(path, endpoint, methods=[method])
