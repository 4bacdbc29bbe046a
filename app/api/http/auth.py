"""Access: callers and their rights, by stored keys, the setting `api_key`, a proxy, or from this machine."""

from __future__ import annotations

import contextlib
import fnmatch
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection
from typing import cast
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp

from app.api.http.cors import ANY, parse_origins
from app.api.http.proxies import user_of
from app.core import Key, KeyTerms, Tier
from app.errors import EngineNotReady, Forbidden, ServingError, Unauthorized
from app.intake.caller import LOCAL, Caller
from app.intake.scope import KEY_ID, LIMITED_KEY, OWNER, PROXY_USER
from app.metering.reads import Reads
from app.settings import Settings, SettingsError
from app.store.key_table import KeyTable, now_us
from app.store.keys import ID_CHARS, digest_of
from app.store.people import Person, check_key, enrol, person_of

CheckedHandler = Callable[[Request], Awaitable[ASGIApp]]
Handler = Callable[[Request, Caller], Awaitable[ASGIApp]]
PROXY_HEADERS = """
    via forwarded forwarded-for x-forwarded x-forwarded-* x-original-forwarded-for x-original-host
    x-real-ip x-client-ip x-cluster-client-ip true-client-ip client-ip x-proxyuser-ip do-connecting-ip
    cdn-loop cf-* fastly-* fly-* tailscale-* x-envoy-* x-arr-* x-azure-* x-amzn-* x-amz-cf-*
    x-cloud-trace-context x-scheme x-request-start
"""
"""Headers of proxies, tunnels and load balancers: RFC 9110 `Via`, RFC 7239 `Forwarded`, and their own.

No list of them is complete: docs/keys.md says what that means for open mode.
"""
_PROXY_HEADER = re.compile("|".join(map(fnmatch.translate, PROXY_HEADERS.split())))

_OWN_PAGES = frozenset({"same-origin", "none"})
"""Values of `Sec-Fetch-Site` that browsers send with a request of the same origin's page, or of the user."""
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s@:/?#\[\]]*))(?::\d*)?")
"""RFC 9110, section 7.2: a name or an address, and a port. No user, no path."""


def check_api_key(api_key: str, keys: KeyTable) -> None:
    """Raise SettingsError where the setting is a stored key, revoked or not: it would be an admin's."""
    stored = keys.get(api_key[:ID_CHARS])
    if stored is not None:
        raise SettingsError(
            f"api_key (TOKENRING_API_KEY): this is the stored key {stored.terms.name!r}, and as a setting it"
            " would be an admin key that cannot be revoked. Unset it here; it is for `chat` and `top`."
        )


class Gatekeeper:
    """Names the caller of a request by its API key.

    Open mode: if the server listens on a loopback address and there has never been a key, requests need
    none. Two kinds of requests could still arrive from outside: those of a web page in the user's own
    browser, and those through a proxy on this machine. Pages are refused by Host (DNS rebinding), and by
    Origin and Sec-Fetch-Site (another origin, on this machine too); proxies by their headers.
    """

    def __init__(self, keys: KeyTable, settings: Settings) -> None:
        self._origins = parse_origins(settings.cors_origins)
        self._keys = keys
        api_key = settings.api_key
        self._api_key = digest_of(api_key.encode()) if api_key else None
        self._may_be_keyless = not api_key and not settings.people_sign_in and is_loopback(settings.host)
        self._terms_of_person = terms_of_person(settings)

    @property
    def keyless(self) -> bool:
        """True while requests of this machine need no key."""
        return self._may_be_keyless and self._keys.loaded and self._keys.empty

    async def enrol(self, request: Request) -> None:
        """Give the person whom a proxy names a key, if this is the first request of theirs.

        Raises as `caller`.
        """
        person = person_at_proxy(request)
        if person is not None and self._keys.get(person.key_id) is None:
            self._check_loaded()
            await self._keys.write(lambda c: enrol(c, person, self._terms_of_person, now_us()))

    def admin(self, request: Request) -> Caller:
        """The caller, who has an admin key. Raises Forbidden for the others, and as `caller` does."""
        caller = self.caller(request)
        if not caller.is_admin:
            raise Forbidden("This needs an admin key.")
        return caller

    def may_see_details(self, request: Request) -> bool:
        """True where the caller of a public route is an admin."""
        try:
            return self.caller(request).is_admin
        except ServingError:
            return False

    def caller(self, request: Request) -> Caller:
        """The caller, by one lookup and one SHA-256. Raises Unauthorized, Forbidden, EngineNotReady."""
        caller = self._caller(request)
        request.scope[OWNER] = caller.owner
        request.scope[KEY_ID] = None if caller.key is None else caller.key.id
        return caller

    def _caller(self, request: Request) -> Caller:
        if self.keyless:
            _check_local(request, self._origins)
            return LOCAL
        if self._may_be_keyless:
            self._check_loaded()
        person = person_at_proxy(request)
        if person is not None:
            enrolled = self._keys.get(person.key_id)
            if enrolled is not None:
                return _caller_of(check_key(enrolled, person, now_us()), request)
        key = _bearer(request.headers.get("authorization", ""))
        digest = digest_of(key.encode("latin-1"))
        if self._api_key is not None and hmac.compare_digest(digest, self._api_key):
            return LOCAL
        self._check_loaded()
        stored = self._keys.find(key, digest)
        if stored is None:
            named = self._keys.get(key[:ID_CHARS])  # an id is no secret; what is not a key's may be anything
            request.scope[KEY_ID] = None if named is None else named.id
            # One message for all, so that no client learns which keys exist or existed.
            raise Unauthorized("The API key is not valid: unknown, expired, or revoked.")
        return _caller_of(stored, request)

    def _check_loaded(self) -> None:
        if not self._keys.loaded:
            raise EngineNotReady("The server cannot take requests yet: its store is being opened; try again.")


class Access:
    """Puts handlers behind the gatekeeper: who may call one, and how often.

    The bounds are for requests that no limit of a key counts: their rate, and how many read the store at
    once.
    """

    def __init__(self, gatekeeper: Gatekeeper, reads: Reads) -> None:
        self._gatekeeper = gatekeeper
        self._reads = reads

    def __call__(
        self, handler: Handler, *, admin: bool = False, paced: bool = False, alone: bool = False
    ) -> CheckedHandler:
        """The handler for every caller that has a key, or needs none; with `admin` for admin keys.

        `paced` bounds it to `max_reads_per_s`. `alone` does too, and takes one request of an owner at a
        time: for routes that read the store and no body.
        """

        async def handle(request: Request) -> ASGIApp:
            if PROXY_USER in request.scope:
                await self._gatekeeper.enrol(request)
            caller = self._gatekeeper.admin(request) if admin else self._gatekeeper.caller(request)
            if paced or alone:
                self._reads.charge(caller.owner, caller.key)
            async with self._reads.slot(caller.owner) if alone else contextlib.nullcontext():
                return await handler(request, caller)

        return handle


def terms_of_person(settings: Settings) -> KeyTerms:
    """The terms of a person who signs in first."""
    return KeyTerms(
        "",
        tier=cast("Tier", settings.sign_in_tier),
        rpm=settings.sign_in_rpm or None,
        tpm=settings.sign_in_tpm or None,
        budget_micro_usd=round(settings.sign_in_budget_usd * 1_000_000) or None,
    )


def person_at_proxy(request: Request) -> Person | None:
    """The person whom a trusted proxy names; None without, or where the request has an API key.

    The browser proves itself to the proxy by a cookie, which it also sends with what pages of other origins
    make it do. So such requests are refused. Raises Forbidden, BadRequest.
    """
    users = request.scope.get(PROXY_USER)
    if users is None or request.headers.get("authorization", "")[:7].lower() == "bearer ":
        return None
    check_same_origin(request)
    user = user_of(users)
    return person_of("proxy", user, user)


def check_same_origin(request: Request) -> None:
    """Raise Forbidden for a request of another origin's page.

    What changes something must have a header by which a browser says where it comes from.
    """
    sites = request.headers.getlist("sec-fetch-site")
    origins, host = request.headers.getlist("origin"), request.headers.get("host", "").lower()
    # Browsers send Sec-Fetch-Site with TLS and on this machine; it holds where a proxy has changed the Host.
    values, own = (sites, _OWN_PAGES) if sites else (origins, {f"http://{host}", f"https://{host}"})
    if not own.issuperset(values) or not (sites or origins or request.method in ("GET", "HEAD")):
        raise Forbidden(
            "A person who signed in at a proxy may send this from this server's own pages only;"
            " programs send an API key as `Authorization: Bearer KEY`."
        )


def _caller_of(key: Key, request: Request) -> Caller:
    if key.terms.rpm is not None or key.terms.tpm is not None:
        request.scope[LIMITED_KEY] = key
    return Caller(key.owner, key.terms.scope == "admin", key)


def _bearer(header: str) -> str:
    """The key in an Authorization header. Raises Unauthorized."""
    scheme, _, key = header.partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthorized(
            "Send your API key as the header `Authorization: Bearer KEY`.", code="missing_api_key"
        )
    return key.strip(" \t")  # no other byte: in UTF-8 it may be a letter's


def _check_local(request: Request, listed: Collection[str]) -> None:
    """Raise Forbidden unless the request was made on this machine, for this machine, and by no foreign page.

    `listed` are the origins of `cors_origins`: of them, pages of this machine need no key.
    """
    through = _proxy_sign(request)
    if through is not None:
        raise Forbidden(
            f"This request arrived through a proxy ({through}), and without API keys this server answers"
            " local requests only. Make a key with `tokenring keys create`, and send it."
        )
    headers = request.headers
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    names = [*map(_host_name, hosts), *map(_hostname, origins)]
    if not all(map(is_loopback, names)):
        raise Forbidden(
            "Without API keys this server answers local requests only; make one with `tokenring keys create`."
        )
    own = {f"http://{host.lower()}" for host in hosts}
    if origins:
        foreign = ANY not in listed and not own.union(listed).issuperset(origins)
    else:  # a browser sends no Origin with what only fetches, such as an image
        foreign = not _OWN_PAGES.issuperset(headers.getlist("sec-fetch-site"))
    if foreign:
        raise Forbidden(
            "Without API keys this server refuses web pages of another origin, even on this machine."
            " Name the page's origin in the setting cors_origins, or make a key with `tokenring keys create`."
        )


def _proxy_sign(request: Request) -> str | None:
    """The sign that a proxy passed the request on; None without one."""
    if request.client is not None and not is_loopback(request.client.host):
        return "from another machine"
    if request.scope.get("http_version") == "1.0":  # nginx without settings sends nothing else that tells
        return "HTTP/1.0"
    return next((name for name in request.headers if _PROXY_HEADER.match(name)), None)


def _host_name(host: str) -> str:
    """The name or address in a Host header; empty when it is not well formed."""
    match = _HOST.fullmatch(host.lower())
    return "" if match is None else match[1] or match[2]


def _hostname(url: str) -> str:
    """The host of a URL; empty when there is none, or the URL cannot be read."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """True where a host name or address can only mean this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
