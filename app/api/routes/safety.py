"""The routes of admin keys over safety: what the screens decided, and the policy in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.api.openai.listing import check_names, json_response, limit_of, page_of
from app.api.schema.key_terms import one_of, time_us
from app.errors import BadRequest, Conflict
from app.intake.caller import Caller
from app.safety.categories import CODE_OF, code_of, name_of
from app.safety.policies.policy import Policies
from app.safety.policies.policy_file import PolicyError
from app.safety.verdict import ACTIONS, STAGES
from app.store import safety_events
from app.store.database import Database
from app.store.safety_events import SafetyEvent

_MICRO = 1_000_000


class SafetyRoutes:
    """Handlers of `/api/admin/safety`. No answer of theirs has text of a prompt or an answer in it."""

    def __init__(
        self, database: Database, policies: Policies | None, reload_policy: Callable[[], object]
    ) -> None:
        """`policies` is None with `safety` off. `reload_policy` raises PolicyError."""
        self._database = database
        self._policies = policies
        self._reload_policy = reload_policy

    async def list(self, request: Request, _caller: Caller) -> Response:
        """GET: events of all owners, newest first, a page at a time, and the policy in force."""
        check_names(request, ("limit", "cursor", "from", "to", *_FILTERS))
        query = request.query_params
        limit, cursor = limit_of(request), query.get("cursor")
        from_us, until_us = (time_us(n, query[n]) if n in query else None for n in ("from", "to"))
        only = _only(query)
        page = await self._database.read(
            lambda c: safety_events.page(c, limit, cursor, only, from_us=from_us, until_us=until_us)
        )
        listed = page_of([_as_json(place, event) for place, event in page.events], page.next_cursor)
        return json_response(listed | {"policy": self._policy()}, confidential=True)

    async def reload(self, _request: Request, _caller: Caller) -> Response:
        """POST reload: take the policy file as it is now; one that is wrong changes nothing."""
        if self._policies is None:
            raise Conflict("This server runs with safety off: there is no policy to reload.")
        try:
            self._reload_policy()
        except PolicyError as exc:
            raise BadRequest(f"The policy stays as it is: {exc}", param="safety_policy") from exc
        return json_response({"object": "safety.policy", **(self._policy() or {})}, confidential=True)

    def _policy(self) -> dict[str, Any] | None:
        policies = self._policies
        if policies is None:
            return None
        return {
            "path": None if policies.path is None else str(policies.path),
            "loaded_at": policies.loaded_at_us // _MICRO,
            **policies.current.as_json(),
        }


def _as_json(place: int, event: SafetyEvent) -> dict[str, Any]:
    return {
        "id": f"safety-{place}",
        "object": "safety.event",
        "created_at": event.at_us // _MICRO,
        "request_id": event.request_id,
        "owner": event.owner,
        "key": event.key_id,
        "model": event.model,
        "subject": event.subject,
        "stage": event.stage,
        "action": event.action,
        "category": event.category,
        "category_name": None if event.category is None else name_of(event.category),
        "score": event.score,
        "threshold": event.threshold,
        "scores": event.scores,
        "policy_hash": event.policy_hash,
        "lag_tokens": event.lag_tokens,
        "text_hmac": None if event.text_hmac is None else event.text_hmac.hex(),
    }


def _only(query: Mapping[str, str]) -> dict[str, str]:
    """The columns that the query asks one value of. Raises BadRequest."""
    wanted = {name: read(name, query[name]) for name, read in _FILTERS.items() if name in query}
    return {"key_id" if name == "key" else name: value for name, value in wanted.items()}


def _category(param: str, value: str) -> str:
    try:
        return code_of(value)
    except KeyError:
        raise BadRequest(
            f"{param} must be one of {', '.join(CODE_OF)}, or its code, got {value!r}.", param=param
        ) from None


_FILTERS: Mapping[str, Callable[[str, str], str]] = {
    "subject": one_of(("prompt", "answer")),
    "stage": one_of(STAGES),
    "action": one_of(ACTIONS),
    "category": _category,
    **dict.fromkeys(("owner", "key", "request_id", "model", "policy_hash"), lambda _, value: value),
}
"""Readers of the query's values, by the column; that of `key` is `key_id`."""
