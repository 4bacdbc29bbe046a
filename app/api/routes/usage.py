"""GET /api/usage: what was used and what it cost."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.http.auth import Caller, Gatekeeper
from app.api.schema.key_terms import as_usd
from app.core import Key
from app.errors import BadRequest, Forbidden
from app.metering.period import groups_of, period_of
from app.metering.report import usage_report
from app.store.database import Database
from app.store.key_table import KeyTable

_PARAMETERS = ("period", "from", "to", "group_by", "key")


class UsageRoutes:
    """The handler of `/api/usage`."""

    def __init__(self, database: Database, keys: KeyTable, gatekeeper: Gatekeeper) -> None:
        self._database = database
        self._keys = keys
        self._gatekeeper = gatekeeper

    async def usage(self, request: Request) -> Response:
        """The usage of the caller's owner, or all to an admin; this UTC month when no period is asked for."""
        caller = self._gatekeeper.caller(request)
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
        owner, key = self._whose(caller, query.get("key"))
        report = await self._database.read(lambda c: usage_report(c, period, group_by, owner))
        if key is not None:
            report["budget_usd"] = as_usd(key.terms.budget_micro_usd)
        return JSONResponse(report)

    def _whose(self, caller: Caller, named: str | None) -> tuple[str | None, Key | None]:
        """The owner whose usage it is, None for everyone's, and the key whose budget. Raises Forbidden."""
        if not caller.is_admin:
            if caller.key is None or named not in (None, caller.owner, caller.key.id):
                raise Forbidden("Only an admin key is shown the usage of another one.", param="key")
            return caller.owner, caller.key
        if named is None:
            return None, None
        key = self._keys.get(named)
        return (named if key is None else key.owner), key
