"""GET /api/usage: what was used and what it cost."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.openai.listing import check_names
from app.api.schema.key_terms import as_usd
from app.core import Key
from app.errors import Forbidden
from app.intake.caller import Caller
from app.metering.usage import groups_of, period_of, usage_report
from app.store.database import Database
from app.store.key_table import KeyTable

_PARAMETERS = ("period", "from", "to", "group_by", "owner", "key")


class UsageRoutes:
    """The handler of `/api/usage`."""

    def __init__(self, database: Database, keys: KeyTable) -> None:
        self._database = database
        self._keys = keys

    async def usage(self, request: Request, caller: Caller) -> Response:
        """The usage of the caller's owner, or all to an admin; this UTC month when no period is asked for."""
        query = request.query_params
        check_names(request, _PARAMETERS)
        today = datetime.now(UTC).date()
        period = period_of(query.get("period"), query.get("from"), query.get("to"), today)
        group_by = groups_of(query.get("group_by", ""))
        key_id = query.get("key")
        key = None if key_id is None else self._keys.get(key_id)
        owner = self._owner(caller, query.get("owner"), key_id, key)
        report = await self._database.read(
            lambda c: usage_report(c, period, group_by, owner=owner, key_id=key_id)
        )
        budgeted = key or (None if caller.is_admin else caller.key)
        if budgeted is not None:
            report["budget_usd"] = as_usd(budgeted.terms.budget_micro_usd)
        return JSONResponse(report)

    def _owner(self, caller: Caller, named: str | None, key_id: str | None, key: Key | None) -> str | None:
        """The owner whose usage it is, None for everyone's. Raises Forbidden."""
        if caller.is_admin:
            return named
        if named not in (None, caller.owner):
            raise Forbidden("Only an admin key is shown the usage of another owner.", param="owner")
        if key_id is not None and (key is None or key.owner != caller.owner):
            raise Forbidden("Only an admin key is shown the usage of another owner's key.", param="key")
        return caller.owner
