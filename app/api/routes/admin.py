"""The routes of admin keys: make, list, change, rotate and revoke API keys, and look at flags of abuse."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.api.openai.listing import check_names, json_response
from app.api.schema.key_terms import as_json, issued_as_json, read_new, read_overlap_us, read_terms
from app.intake.bodies import BodyReader
from app.intake.caller import Caller
from app.metering.abuse import AbuseWatch, Flag
from app.store import keys
from app.store.database import Database
from app.store.key_table import KeyTable, now_us

_MICRO = 1_000_000


class AdminKeyRoutes:
    """Handlers of `/api/admin/keys`. What they change is in force when they answer."""

    def __init__(self, database: Database, table: KeyTable, bodies: BodyReader) -> None:
        self._database = database
        self._table = table
        self._bodies = bodies

    async def list(self, _request: Request, _caller: Caller) -> Response:
        """GET: every key, revoked ones too, oldest first."""
        at_us = now_us()
        stored = await self._database.read(keys.all_keys)
        return _answer({"object": "list", "data": [as_json(key, at_us) for key in stored]})

    async def create(self, request: Request, caller: Caller) -> Response:
        """POST: a new key; its text is in this answer and in no other."""
        at_us = now_us()
        terms, owner = read_new(await self._body(request, caller.owner), at_us)
        issued = await self._table.write(lambda c: keys.create(c, terms, at_us, owner))
        return _answer(issued_as_json(issued, at_us), status=201)

    async def change(self, request: Request, caller: Caller) -> Response:
        """PATCH {id}: other terms; null takes a limit away."""
        at_us, key_id = now_us(), request.path_params["id"]
        terms = read_terms(await self._body(request, caller.owner), at_us)
        return _answer(as_json(await self._table.write(lambda c: keys.change(c, key_id, terms)), at_us))

    async def revoke(self, request: Request, _caller: Caller) -> Response:
        """DELETE {id}: revoke the key permanently."""
        at_us, key_id = now_us(), request.path_params["id"]
        return _answer(as_json(await self._table.write(lambda c: keys.revoke(c, key_id, at_us)), at_us))

    async def rotate(self, request: Request, caller: Caller) -> Response:
        """POST {id}/rotate: a new secret; the old ones stay valid for `overlap_s`."""
        at_us, key_id = now_us(), request.path_params["id"]
        overlap_us = read_overlap_us(await self._body(request, caller.owner, may_be_empty=True))
        issued = await self._table.write(lambda c: keys.rotate(c, key_id, at_us, overlap_us))
        return _answer(issued_as_json(issued, at_us))

    async def _body(self, request: Request, owner: str, *, may_be_empty: bool = False) -> dict[str, Any]:
        body = await self._bodies.read(request, owner)
        return {} if may_be_empty and not body.raw else await body.parse()


def _answer(body: dict[str, Any], status: int = 200) -> Response:
    return json_response(body, status, confidential=True)


class AbuseRoutes:
    """The handler of `/api/admin/abuse`. It tells; nothing is blocked."""

    def __init__(self, abuse: AbuseWatch) -> None:
        self._abuse = abuse

    async def list(self, request: Request, _caller: Caller) -> Response:
        """GET: every flag as of now. Raises StorageUnavailable."""
        check_names(request, ("owner",))
        flags = await self._abuse.read()
        only = request.query_params.get("owner")
        data = [_flag_as_json(flag) for flag in flags if only in (None, flag.owner)]
        return json_response({"object": "list", "data": data}, confidential=True)


def _flag_as_json(flag: Flag) -> dict[str, Any]:
    return {
        "object": "abuse.flag",
        "kind": flag.kind,
        "owner": flag.owner,
        "key": flag.key_id,
        "since": flag.since_us // _MICRO,
        **flag.facts,
    }
