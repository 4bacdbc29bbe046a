"""The routes of the prefix report: what the cache should have had of each system prompt, and had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.api.openai.listing import check_names, json_response, limit_of
from app.errors import BadRequest
from app.intake.caller import Caller
from app.prefix_report.family import Break, PromptSeries
from app.prefix_report.report import PrefixReport

_MICRO = 1_000_000


class PrefixRoutes:
    """Handlers of `/api/admin/prefixes` and `/api/prefixes`. Text is for its owner, who asks for it."""

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
        entries = [f for f in report.families(owner) if key in (None, f.series_key.key_id)]
        entries.sort(key=lambda f: (f.expected_tokens - f.cached_tokens, f.seen_us), reverse=True)
        body = {
            "object": "list",
            "data": [_as_json(f, text=f.series_key.owner == shown_to) for f in entries[:limit]],
            "has_more": len(entries) > limit,
        }
        return json_response(body, confidential=True)


def _wants_text(request: Request) -> bool:
    raw = request.query_params.get("text", "false")
    if raw not in ("true", "false"):
        raise BadRequest(f"text must be true or false, got {raw!r}.", param="text")
    return raw == "true"


def _as_json(family: PromptSeries, *, text: bool) -> dict[str, Any]:
    expected = family.expected_tokens
    varies = family.varies
    return {
        "id": family.id,
        "object": "prefix",
        "owner": family.series_key.owner,
        "key": family.series_key.key_id,
        "model": family.series_key.model,
        "characters": len(family.newest.stable.text),
        "requests": family.requests,
        "expected_tokens": expected,
        "cached_tokens": family.cached_tokens,
        "hit_rate": round(family.cached_tokens / expected, 4) if expected else None,
        "recent_hit_rate": round(family.recent, 4) if family.judged else None,
        "last_seen_at": family.seen_us // _MICRO,
        "varies": None
        if varies is None
        else {
            "kind": varies.kind,
            "position": varies.position,
            "length": varies.length,
            **({"text": varies.shown} if text else {}),
        },
        "breaks": dict(family.breaks),
        "last_breaks": _breaks(list(family.last), text=text),
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
