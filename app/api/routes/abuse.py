"""The route of abuse flags: which keys an admin may want to look at, and why."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.api.openai.listing import check_names, json_response
from app.intake.caller import Caller
from app.metering.abuse import AbuseWatch, Flag

_MICRO = 1_000_000


class AbuseRoutes:
    """The handler of `/api/admin/abuse`. It tells; nothing is blocked."""

    def __init__(self, abuse: AbuseWatch) -> None:
        self._abuse = abuse

    async def list(self, request: Request, _caller: Caller) -> Response:
        """GET: every flag as of now. Raises StorageUnavailable."""
        check_names(request, ("owner",))
        flags = await self._abuse.read()
        only = request.query_params.get("owner")
        data = [_as_json(flag) for flag in flags if only in (None, flag.owner)]
        return json_response({"object": "list", "data": data}, confidential=True)


def _as_json(flag: Flag) -> dict[str, Any]:
    return {
        "object": "abuse.flag",
        "kind": flag.kind,
        "owner": flag.owner,
        "key": flag.key_id,
        "since": flag.since_us // _MICRO,
        **flag.facts,
    }
