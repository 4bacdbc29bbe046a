"""GET /api/usage: what was used and what it cost."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.auth import Gatekeeper
from app.errors import BadRequest
from app.metering.period import groups_of, period_of
from app.metering.report import usage_report
from app.runtime import Runtime

_PARAMETERS = ("period", "from", "to", "group_by")


class UsageRoutes:
    """The handler of `/api/usage`."""

    def __init__(self, runtime: Runtime, gatekeeper: Gatekeeper) -> None:
        self._runtime = runtime
        self._gatekeeper = gatekeeper

    async def usage(self, request: Request) -> Response:
        """The caller's own usage; the current UTC month when no period is asked for."""
        owner = self._gatekeeper.owner(request)
        query = request.query_params
        for name in query:
            if name not in _PARAMETERS:
                raise BadRequest(
                    f"Unknown parameter {name!r}; usage takes {', '.join(_PARAMETERS)}.",
                    code="unknown_parameter",
                    param=name,
                )
        today = datetime.now(UTC).date()
        period = period_of(query.get("period"), query.get("from"), query.get("to"), today)
        group_by = groups_of(query.get("group_by", ""))
        report = await self._runtime.database.read(lambda c: usage_report(c, period, group_by, owner))
        return JSONResponse(report)
