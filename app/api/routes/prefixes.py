"""The routes of the prefix report: what the cache should have had of each system prompt, and had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.api.openai.listing import check_names, json_response, limit_of
from app.errors import BadRequest
from app.intake.caller import Caller
from app.prefix_report.report import PrefixReport
from app.prefix_report.series import Break, PromptSeries

_MICRO = 1_000_000


class PrefixRoutes:
    """Handlers of `/api/admin/prefixes` and `/api/prefixes`. Text is shown to its owner, on request."""

    def __init__(self, report: PrefixReport) -> None:
        self._report = report

    async def list(self, request: Request, caller: Caller) -> Response:
        """GET: the system prompts of all owners, those that lost most tokens first."""
        check_names(request, ("limit", "owner", "key", "text"))
        return self._answer(request, request.query_params.get("owner"), caller.owner)

    async def own(self, request: Request, caller: Caller) -> Response:
        """GET: those of the caller's owner."""
        check_names(request, ("limit", "key", "text"))
        return self._answer(request, caller.owner, caller.owner)

    def _answer(self, request: Request, owner: str | None, reader: str) -> Response:
        report, limit, key = self._report, limit_of(request), request.query_params.get("key")
        shown_to = reader if _wants_text(request) else None
        entries = [s for s in report.series(owner) if key in (None, s.series_key.key_id)]
        entries.sort(key=lambda s: (s.expected_tokens - s.cached_tokens, s.seen_us), reverse=True)
        body = {
            "object": "list",
            "data": [_as_json(s, text=s.series_key.owner == shown_to) for s in entries[:limit]],
            "has_more": len(entries) > limit,
        }
        return json_response(body, confidential=True)


def _wants_text(request: Request) -> bool:
    raw = request.query_params.get("text", "false")
    if raw not in ("true", "false"):
        raise BadRequest(f"text must be true or false, got {raw!r}.", param="text")
    return raw == "true"


def _as_json(series: PromptSeries, *, text: bool) -> dict[str, Any]:
    expected = series.expected_tokens
    varies = series.varies
    return {
        "id": series.id,
        "object": "prefix",
        "owner": series.series_key.owner,
        "key": series.series_key.key_id,
        "model": series.series_key.model,
        "characters": len(series.newest.stable.text),
        "requests": series.requests,
        "expected_tokens": expected,
        "cached_tokens": series.cached_tokens,
        "hit_rate": round(series.cached_tokens / expected, 4) if expected else None,
        "recent_hit_rate": round(series.recent, 4) if series.judged else None,
        "last_seen_at": series.seen_us // _MICRO,
        "varies": None
        if varies is None
        else {
            "kind": varies.kind,
            "position": varies.position,
            "length": varies.length,
            **({"text": varies.shown} if text else {}),
        },
        "breaks": dict(series.breaks),
        "last_breaks": _breaks(list(series.last), text=text),
    }


def _breaks(entries: Sequence[Break], *, text: bool) -> list[dict[str, Any]]:
    return [
        {
            "created_at": event.at_us // _MICRO,
            "request_id": event.request_id,
            "cause": event.cause,
            "what": event.what or None,
            "unit": event.unit,
            "position": event.position,
            "length": event.length,
            "expected_tokens": event.expected_tokens,
            "cached_tokens": event.cached_tokens,
            **({"text": event.shown} if text else {}),
        }
        for event in reversed(entries)
    ]
