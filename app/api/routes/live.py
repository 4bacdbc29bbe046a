"""The routes of admin keys over what happens now: the requests, and the load of the last minutes.

They are computed when somebody asks. No answer has text of a prompt or an answer in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.api.metrics.tables import by_model
from app.api.openai.listing import check_names, json_response, limit_of
from app.core import TIERS
from app.errors import NotFound
from app.intake.caller import Caller
from app.pipeline.live import RECENT_S, EndedRequest, LiveRequest, percentile
from app.routing.backend import Backend
from app.runtime import Runtime
from app.stream.token_stream import ADMIN

_PERCENTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class LiveRoutes:
    """Handlers of `/api/admin/requests` and `/api/admin/live`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def requests(self, request: Request, _caller: Caller) -> Response:
        """GET: the requests in the pipeline, oldest first, and those that ended lately, newest first."""
        check_names(request, ("limit", "owner", "key"))
        limit, live = limit_of(request), self._runtime.live
        owner, key = (request.query_params.get(name) for name in ("owner", "key"))

        def wanted(of_owner: str, key_id: str | None) -> bool:
            return owner in (None, of_owner) and key in (None, key_id)

        def newest(ended: Iterable[EndedRequest]) -> list[dict[str, Any]]:
            chosen = (e for e in ended if wanted(e.owner, e.fields["key"]))
            return [_ended_as_json(e) for e in islice(chosen, limit)]

        shown = [r for r in live if wanted(r.stream.request.owner, r.key_id)]
        places = self._places()
        body = {
            "object": "list",
            "data": [self._as_json(live_request, places) for live_request in shown[:limit]],
            "has_more": len(shown) > limit,
            "total": len(shown),
            "ended": newest(live.ended()),
            "failed": newest(live.failed()),
        }
        return json_response(body, confidential=True)

    async def cancel(self, request: Request, caller: Caller) -> Response:
        """POST {id}/cancel: stop a request of any owner; kept and billed as if its owner had stopped it."""
        runtime, request_id = self._runtime, request.path_params["id"]
        if not runtime.streams.cancel_live(request_id, ADMIN):
            raise NotFound(f"No request {request_id!r} is live: it has ended, or never was.")
        runtime.log.info("stopped_by_admin", request_id=request_id, by=caller.key and caller.key.id)
        return json_response({"id": request_id, "object": "admin.request", "cancelled": True})

    async def live(self, request: Request, _caller: Caller) -> Response:
        """GET: the state of the server, the load by model, percentiles and samples of the last minutes."""
        check_names(request, ())
        runtime, mode = self._runtime, self._runtime.degrade
        restarts = runtime.restarts
        ended: dict[str, list[EndedRequest]] = {}
        for entry in runtime.live.ended():
            ended.setdefault(entry.fields["model"], []).append(entry)
        body = {
            "object": "admin.live",
            "created_at": int(time.time()),
            "ready": runtime.ready,
            "state": runtime.state,
            "degraded": mode and {"step": mode.step.label, "pressure": round(mode.pressure, 3)},
            "engine": {
                "outages": restarts.losses,
                "restarts": restarts.num_restarts,
                "last_outage_s": round(restarts.last_away_s, 3),
                "reason": restarts.reason,
            },
            "streams": {
                "live": runtime.streams.num_live,
                "readers": runtime.streams.num_readers,
                "retained": runtime.streams.num_retained,
                "suspended": len(runtime.suspensions),
            },
            "store": {
                "failing": runtime.database.failing,
                "writer_lag_s": round(runtime.database.writer_lag_s, 3),
                "unsettled_requests": runtime.journal.num_unsettled,
            },
            "models": list(by_model(runtime, lambda b: _model_as_json(b, ended.get(b.id, []))).values()),
            "failed": sum(1 for _ in runtime.live.failed()),
            "window_s": RECENT_S,
            "samples": [
                {
                    "at": round(sample.at_unix_s, 1),
                    "running": sample.running,
                    "waiting": sample.waiting,
                    "used_tokens": sample.used_tokens,
                    "tokens_per_s": round(rate, 1),
                    "loop_lag_s": round(sample.loop_lag_s, 4),
                }
                for sample, rate in runtime.load_history.rates()
            ],
        }
        return json_response(body, confidential=True)

    def _places(self) -> dict[str, int]:
        places: dict[str, int] = {}
        for backend in self._runtime.backends:
            places |= backend.admission.places()
        return places

    def _as_json(self, live: LiveRequest, places: Mapping[str, int]) -> dict[str, Any]:
        trace, stream, key = live
        request, timings, request_id = stream.request, trace.timings(), stream.request_id
        ready = self._runtime.backends.of(request.model).ready
        phase, phase_s = live.phase(engine_ready=ready)
        fields = trace.fields()
        generating = phase in ("decode", "held") and phase_s > 0
        grace_left_s = self._runtime.streams.grace_left_s(request_id)
        return {
            "id": request_id,
            "object": "admin.request",
            "owner": request.owner,
            "key": live.key_id,
            "key_name": live.key_name,
            "tier": "standard" if key is None else key.terms.tier,
            "model": request.model,
            "n": request.n,
            "phase": phase,
            "phase_s": round(phase_s, 3),
            "age_s": round(timings.total_s, 3),
            "position": places.get(request_id),
            **{name: fields[name] for name in _COUNTS},
            "tokens_per_s": round(trace.completion_tokens / phase_s, 1) if generating else None,
            "ttft_s": timings.ttft_s and round(timings.ttft_s, 3),
            "readers": len(stream.readers),
            "stops_in_s": None if grace_left_s is None else round(grace_left_s, 1),
            "cancelled": stream.cancelled,
        }


_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")


def _ended_as_json(ended: EndedRequest) -> dict[str, Any]:
    fields = ended.fields
    return {
        "id": fields["request_id"],
        "object": "admin.ended_request",
        "ended_at": ended.ended_at_unix_s,
        "owner": ended.owner,
        "key_name": ended.key_name,
        "cancelled": ended.cancelled,
        **{name: fields[name] for name in ("key", "model", "n", *_COUNTS, "finish_reason", "error")},
        **{f"{name}_s": _seconds(fields[f"{name}_ms"]) for name in ("queue", "ttft", "tpot", "total")},
    }


def _model_as_json(backend: Backend, ended: list[EndedRequest]) -> dict[str, Any]:
    load, admission = backend.engine.load(), backend.admission
    prompt_tokens, cached_tokens = (
        sum(e.fields[n] for e in ended) for n in ("prompt_tokens", "cached_tokens")
    )
    pools = admission.scheduler.kv_pools
    return {
        "model": backend.id,
        "ready": backend.ready,
        "running": load.num_running_reqs,
        "queued_in_engine": load.num_queue_reqs,
        "queued": {
            tier: {
                "requests": admission.queue.depth(rank),
                "tokens": admission.queue.waiting_tokens(rank),
                "oldest_wait_s": round(admission.waited_s(rank), 3),
            }
            for rank, tier in enumerate(TIERS)
        },
        "kv": {
            "used_tokens": load.used_tokens,
            "reserved_tokens": pools.committed_tokens,
            "max_tokens": load.max_total_tokens,
        },
        "ended": len(ended),
        "hit_rate": round(cached_tokens / prompt_tokens, 4) if prompt_tokens else None,
        **{f"{name}_s": _percentiles(ended, f"{name}_ms") for name in ("queue", "ttft", "tpot", "total")},
    }


def _percentiles(ended: Iterable[EndedRequest], field: str) -> dict[str, float] | None:
    """Percentiles in seconds of a field in milliseconds; None if no request has it."""
    ordered = sorted(e.fields[field] for e in ended if e.fields[field] is not None)
    if not ordered:
        return None
    return {name: round(percentile(ordered, share) / 1000, 4) for name, share in _PERCENTILES.items()}


def _seconds(duration_ms: float | None) -> float | None:
    return None if duration_ms is None else round(duration_ms / 1000, 4)
