"""The routes about the server itself: alive, ready, which version, which models, which API, for whom.

`/model_info` and `/server_info` are as SGLang's clients read them.
"""

from __future__ import annotations

import functools
import time
from importlib import metadata, resources
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.admission.admit import Admission
from app.api.http.auth import Gatekeeper
from app.api.openai.listing import json_response
from app.api.schema.key_terms import as_json
from app.core import TIERS, ModelCard
from app.engine_factory import model_path
from app.errors import EngineNotReady, UnknownModel
from app.intake.caller import Caller
from app.metering.pricing import as_usd_per_1k
from app.routing.backend import Backend
from app.routing.degraded_mode import Step
from app.runtime import Runtime
from app.settings import table
from app.store.key_table import now_us

_DOCUMENT_CACHED_S = 3600


@functools.cache
def _openapi_document() -> bytes:
    """app/api/openapi.json, which scripts/docs makes, with this program's version."""
    document = orjson.loads(resources.files("app.api").joinpath("openapi.json").read_bytes())
    document["info"]["version"] = metadata.version("tokenring")
    return orjson.dumps(document)


async def openapi(request: Request) -> Response:
    """GET: the document. It needs no key and says nothing of this server but its version."""
    headers = {"cache-control": f"public, max-age={_DOCUMENT_CACHED_S}"}
    return Response(_openapi_document(), media_type="application/json", headers=headers)


class ServiceRoutes:
    """Handlers of the health routes, `/version`, the model lists and what SGLang says of itself.

    They report on the whole process, so they take the runtime, as `/metrics` does.
    """

    def __init__(self, runtime: Runtime, gatekeeper: Gatekeeper) -> None:
        self._runtime = runtime
        self._gatekeeper = gatekeeper
        self._created_at_unix_s = int(time.time())

    async def healthz(self, request: Request) -> Response:
        """The process lives and its loop turns."""
        return JSONResponse({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        """The readiness of the server, and why it is not ready; for an admin also its state."""
        runtime = self._runtime
        # Who has no admin key learns what a load balancer needs.
        detail: dict[str, Any] = {"phase": runtime.state}
        if self._gatekeeper.may_see_details(request):
            detail |= self._details()
        if not runtime.ready:
            return JSONResponse(
                {"status": "not_ready", **detail},
                status_code=503,
                headers={"retry-after": str(runtime.retry_after_s())},
            )
        return JSONResponse({"status": "ready", **detail})

    async def version(self, request: Request) -> Response:
        """The version of this program, in the shape of vLLM's route."""
        return JSONResponse({"version": metadata.version("tokenring")})

    async def me(self, _request: Request, caller: Caller) -> Response:
        """GET /api/me: the caller's owner, scope and key, and whether this server needs keys."""
        body = {
            "object": "caller",
            "owner": caller.owner,
            "scope": "admin" if caller.is_admin else "chat",
            "open": self._gatekeeper.keyless,
            "key": None if caller.key is None else as_json(caller.key, now_us()),
        }
        return json_response(body, confidential=True)

    def _details(self) -> dict[str, Any]:
        """The server's state: its load, the store, the ledger, the queue."""
        runtime = self._runtime
        detail: dict[str, Any] = {
            "live_streams": runtime.streams.num_live,
            "store": {
                "failing": runtime.database.failing,
                "writer_lag_s": round(runtime.database.writer_lag_s, 3),
                "unsettled_requests": runtime.journal.num_unsettled,
            },
            "ledger": runtime.balance.detail(),
            "queue": _queue(runtime.backends.large.admission),
        }
        small, backend = runtime.small_engine, runtime.backends.small
        if small is not None and backend is not None:
            detail["small_model"] = {
                "model": small.name,
                "state": small.state,
                "failures": small.num_failures,
                "queue": _queue(backend.admission),
            }
        if runtime.degrade is not None:
            mode = runtime.degrade
            detail["degraded"] = {"step": mode.step.label, "pressure": round(mode.pressure, 2)}
        if runtime.ready:
            load = runtime.engine.load()
            detail["engine"] = {
                "num_running_reqs": load.num_running_reqs,
                "num_queue_reqs": load.num_queue_reqs,
                "used_tokens": load.used_tokens,
                "max_total_tokens": load.max_total_tokens,
            }
        return detail

    async def models(self, _request: Request, caller: Caller) -> Response:
        """GET /api/models: what is served to the caller, its limits and capabilities."""
        return JSONResponse({"object": "list", "data": [self._detailed(p) for p in self._visible(caller)]})

    def _visible(self, caller: Caller) -> list[Backend]:
        """The backends of the models that the caller may use."""
        self._runtime.check_ready()
        return self._runtime.backends.allowed(caller.models)

    def _detailed(self, backend: Backend) -> dict[str, Any]:
        """A model's entry; what is not known before it has been loaded is null."""
        card = _card(backend)
        return self._openai(backend) | {
            "context_length": card and card.context_length,
            "kv_capacity_tokens": card and card.kv_capacity_tokens,
            "capabilities": sorted(card.capabilities) if card else [],
            "images": self._images(card),
            "price_usd_per_1k": as_usd_per_1k(
                self._runtime.prices.price_of(backend.id, time.time_ns() // 1000)
            ),
            "state": "ready" if backend.ready else "not_ready",
            "degraded": self._degraded(backend),
        }

    def _images(self, card: ModelCard | None) -> str | None:
        """The safety policy for images: `allow` or `refuse`; None if the model reads none."""
        policies = self._runtime.policies
        if card is None or "vision" not in card.capabilities:
            return None
        return "allow" if policies is None else policies.current.images

    def _degraded(self, backend: Backend) -> bool:
        """True while degraded mode does less for requests to a model than they ask for."""
        mode = self._runtime.degrade
        return mode is not None and backend is self._runtime.backends.large and mode.step is not Step.NORMAL

    async def models_openai(self, _request: Request, caller: Caller) -> Response:
        """GET /v1/models, in OpenAI's exact shape."""
        return JSONResponse({"object": "list", "data": [self._openai(p) for p in self._visible(caller)]})

    async def model_openai(self, request: Request, caller: Caller) -> Response:
        """GET /v1/models/{id}."""
        self._runtime.check_ready()
        model_id = request.path_params["id"]
        self._runtime.check_model(model_id, caller.models)
        return JSONResponse(self._openai(self._runtime.backends.of(model_id)) | {"id": model_id})

    async def model_info(self, _request: Request, caller: Caller) -> Response:
        """The first model that the caller may use. Admins see the path of its files."""
        runtime, backend = self._runtime, self._first_backend(caller)
        card = backend.engine.model
        path = model_path(runtime.settings) if caller.is_admin and backend is runtime.backends.large else None
        return JSONResponse(
            {
                "model_path": path or backend.id,
                "tokenizer_path": path,
                "served_model_name": backend.id,
                "is_generation": True,
                "max_model_len": card.context_length,
                "has_image_understanding": "vision" in card.capabilities,
                "has_audio_understanding": False,
            }
        )

    async def server_info(self, _request: Request, caller: Caller) -> Response:
        """The sizes of that model; for admins also the settings in force, without secrets, and the load."""
        backend = self._first_backend(caller)
        card = backend.engine.model
        body: dict[str, Any] = {
            "version": metadata.version("tokenring"),
            "served_model_name": backend.id,
            "context_length": card.context_length,
            "max_total_num_tokens": card.kv_capacity_tokens,
            "max_req_input_len": card.max_prompt_tokens,
            "internal_states": [],
        }
        if caller.is_admin:
            settings = self._runtime.settings
            body["tokenizer_path"] = model_path(settings)
            body["settings"] = {s.name: _plain(getattr(settings, s.name)) for s in table() if not s.secret}
            load = backend.engine.load()
            body["internal_states"] = [
                {
                    "num_running_reqs": load.num_running_reqs,
                    "num_waiting_reqs": load.num_queue_reqs,
                    "num_used_tokens": load.used_tokens,
                    "last_gen_throughput": load.gen_throughput_tokens_per_s,
                }
            ]
        return JSONResponse(body)

    def _first_backend(self, caller: Caller) -> Backend:
        """The first backend that the caller may use. Raises EngineNotReady, UnknownModel."""
        backends = self._visible(caller)
        if not backends:
            raise UnknownModel("This key may use none of the models that are served here.")
        backends[0].check_ready()
        return backends[0]

    def _openai(self, backend: Backend) -> dict[str, Any]:
        """OpenAI's fields of a model, and the two that vLLM and SGLang add to them."""
        card = _card(backend)
        return {
            "id": backend.id,
            "object": "model",
            "created": self._created_at_unix_s,
            "owned_by": "tokenring",
            "root": backend.id,
            "max_model_len": card and card.context_length,
        }


def _card(backend: Backend) -> ModelCard | None:
    try:
        return backend.engine.model
    except EngineNotReady:
        return None


def _queue(admission: Admission) -> dict[str, Any]:
    """The requests that wait for the engine, and the size of the prefill window."""
    return {
        "waiting_requests": len(admission.queue),
        "waiting_tokens": admission.queue.tokens,
        "oldest_wait_s": round(max(map(admission.waited_s, range(len(TIERS)))), 3),
        "gate_window_tokens": int(admission.scheduler.prefill_window.window_tokens),
    }


def _plain(value: Any) -> Any:
    """A setting's value as JSON has it; a path is its text."""
    return value if isinstance(value, bool | int | float) else str(value)
