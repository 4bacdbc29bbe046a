"""The route of abuse flags: which keys an admin may want to look at, and why."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from app.api.http.auth import Gatekeeper
from app.api.http.listing import check_names
from app.metering.abuse import AbuseWatch, Flag

_NOT_KEPT = {"cache-control": "no-store"}
_MICRO = 1_000_000


class AbuseRoutes:
    """The handler of `/api/admin/abuse`. It tells; nothing is blocked."""

    def __init__(self, abuse: AbuseWatch, gatekeeper: Gatekeeper) -> None:
        self._abuse = abuse
        self._gatekeeper = gatekeeper

    async def list(self, request: Request) -> Response:
        """GET: every flag as of now. Raises StorageUnavailable."""
        self._gatekeeper.admin(request)
        check_names(request, ("owner",))
        flags = await self._abuse.read()
        only = request.query_params.get("owner")
        data = [_as_json(flag) for flag in flags if only in (None, flag.owner)]
        body = orjson.dumps({"object": "list", "data": data})
        return Response(body, headers=_NOT_KEPT, media_type="application/json")


def _as_json(flag: Flag) -> dict[str, Any]:
    return {
        "object": "abuse.flag",
        "kind": flag.kind,
        "owner": flag.owner,
        "key": flag.key_id,
        "since": flag.since_us // _MICRO,
        **flag.facts,
    }
