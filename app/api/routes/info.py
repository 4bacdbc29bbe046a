"""`/openapi.json`, and `/model_info` and `/server_info` as SGLang's clients read them."""

from __future__ import annotations

import functools
from importlib import metadata, resources
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.engine_factory import model_path
from app.errors import UnknownModel
from app.intake.caller import Caller
from app.routing.backend import Backend
from app.runtime import Runtime
from app.settings import table

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


class InfoRoutes:
    """Handlers of both routes and of their older names."""

    def __init__(self, runtime: Runtime) -> None:
        self._settings = runtime.settings
        self._backends = runtime.backends
        self._check_ready = runtime.check_ready

    async def model_info(self, _request: Request, caller: Caller) -> Response:
        """The first model that the caller may use. Admins see the path of its files."""
        backend = self._backend(caller.models)
        card = backend.engine.model
        path = model_path(self._settings) if caller.is_admin and backend is self._backends.large else None
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
        backend = self._backend(caller.models)
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
            settings = self._settings
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

    def _backend(self, allowed: tuple[str, ...] | None) -> Backend:
        """The first backend that the caller may use. Raises EngineNotReady, UnknownModel."""
        self._check_ready()
        backends = self._backends.allowed(allowed)
        if not backends:
            raise UnknownModel("This key may use none of the models that are served here.")
        backends[0].check_ready()
        return backends[0]


def _plain(value: Any) -> Any:
    """A setting's value as JSON has it; a path is its text."""
    return value if isinstance(value, bool | int | float) else str(value)
