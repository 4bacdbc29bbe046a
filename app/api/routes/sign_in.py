"""The routes by which people sign in. The console keeps the state of a sign-in; this server keeps none.

A sign-in gives the person's key one more secret. That ends after `oidc_session_hours`, with the key
(`app.store.keys.revoke`), or when newer sign-ins displace it (`add_session`). A person whom the issuer
removes keeps a session until its end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from structlog.typing import FilteringBoundLogger

from app.api.http.auth import person_at_proxy, terms_of_person
from app.api.openai.listing import json_response
from app.api.schema.fields import Field, read_fields
from app.errors import IssuerUnavailable, NotFound, RateLimited, ServingError, SignInRefused
from app.intake.bodies import BodyReader
from app.metering.rates import Bucket
from app.settings import Settings
from app.store import people
from app.store.key_table import KeyTable, now_us

if TYPE_CHECKING:
    from app.api.http.issuer import Issuer

FIELDS: Mapping[str, Field] = {
    "code": Field((str,), min_chars=1, max_chars=4096),
    "verifier": Field((str,), min_chars=43, max_chars=128),
    "nonce": Field((str,), min_chars=16, max_chars=128),
    "redirect_uri": Field((str,), min_chars=1, max_chars=2048),
}
"""What the console sends of a sign-in; all of it is required."""
SIGN_INS_PER_S = 5.0
"""Sign-ins per second of everybody, as each one asks the issuer; bursts have a hundred."""
SIGN_IN_BURST = 100.0
_NAMES = ("email", "preferred_username", "name", "sub")
_HOUR_US = 3_600_000_000


class SignInRoutes:
    """Handlers of `/api/sign-in`, which need no key."""

    def __init__(
        self, settings: Settings, table: KeyTable, bodies: BodyReader, log: FilteringBoundLogger
    ) -> None:
        """Raise SettingsError."""
        self._issuer = _issuer(settings)
        self._terms = terms_of_person(settings)
        self._session_us = round(settings.oidc_session_hours * _HOUR_US)
        self._table = table
        self._bodies = bodies
        self._log = log
        self._bucket = Bucket(SIGN_INS_PER_S, SIGN_IN_BURST, time.monotonic())

    async def methods(self, request: Request) -> Response:
        """GET: the issuer and what a page asks it with, and whether a proxy has signed the person in."""
        person = person_at_proxy(request)
        return json_response(
            {"oidc": await self._oidc_parameters(), "proxy_user": None if person is None else person.name},
            confidential=True,
        )

    async def _oidc_parameters(self) -> dict[str, Any] | None:
        issuer = self._issuer
        if issuer is None:
            return None
        try:
            endpoint = (await issuer.metadata())["authorization_endpoint"]
        except IssuerUnavailable as error:
            self._log.warning("issuer_unavailable", reason=error.message)
            endpoint = None
        return {
            "issuer": issuer.url,
            "client_id": issuer.client_id,
            "scope": issuer.scope,
            "authorization_endpoint": endpoint,
        }

    async def oidc(self, request: Request) -> Response:
        """POST oidc: a key of the person, for the code that the issuer gave the console."""
        if self._issuer is None:
            raise NotFound("Nobody signs in here by OpenID Connect: oidc_issuer is not set.")
        body = await (await self._bodies.read(request, "sign-in")).parse()
        sent = read_fields(body, "", FIELDS, FIELDS)
        check_redirect(request, sent["redirect_uri"])
        if self._bucket.take(time.monotonic()):
            raise RateLimited("Too many people sign in at once; try again.", retry_after_s=1)
        try:
            return json_response(await self._sign_in(self._issuer, sent), confidential=True)
        except ServingError as error:
            self._log.warning("sign_in_refused", error=error.code, reason=error.message)
            raise

    async def _sign_in(self, issuer: Issuer, sent: Mapping[str, str]) -> dict[str, Any]:
        claims = await issuer.claims_of(sent["code"], sent["verifier"], sent["nonce"], sent["redirect_uri"])
        issuer.check_allowed(claims)
        name = next(claims[name] for name in _NAMES if isinstance(claims.get(name), str) and claims[name])
        person = people.person_of(issuer.url, claims["sub"], name)
        at_us, scope = now_us(), issuer.scope_of(claims)
        ends_at_us = at_us + self._session_us
        issued = await self._table.write(
            lambda c: people.sign_in(c, person, self._terms, at_us, ends_at_us, scope)
        )
        self._log.info("signed_in", key=issued.key.id)
        return {
            "object": "sign_in",
            "id": issued.key.id,
            "key": issued.text,
            "name": issued.key.terms.name,
            "expires_at": ends_at_us // 1_000_000,
        }


def check_redirect(request: Request, redirect_uri: str) -> None:
    """Raise SignInRefused unless the issuer returned to the page that asks, a page of this server."""
    origin, host = request.headers.get("origin", ""), request.headers.get("host", "")
    own = origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")
    if not own or not redirect_uri.startswith(f"{origin}/") or {"?", "#"} & set(redirect_uri):
        raise SignInRefused(
            "A sign-in begins and ends at this server's own page: `Origin`, `Host` and redirect_uri agree."
        )


def _issuer(settings: Settings) -> Issuer | None:
    """The issuer, where there is one: its HTTP client takes 0.2 s to import, a sixth of a start."""
    if not settings.oidc_issuer:
        return None
    from app.api.http.issuer import Issuer

    return Issuer(settings)
