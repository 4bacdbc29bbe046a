"""Trusted proxies: what their headers say of a request, by the setting `trusted_proxies`.

From any other address these headers mean nothing. In open mode they are signs of a proxy all the same, and
the request is refused (app.api.http.auth).
"""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from app.errors import BadRequest
from app.intake.scope import PROXY_USER
from app.settings import Settings, SettingsError

MAX_USER_CHARS = 255


class TrustedProxies:
    """The outermost layer: the client's address from `X-Forwarded-For`, and the person whom a proxy names."""

    def __init__(self, app: ASGIApp, networks: list[Network], user_header: str) -> None:
        """`user_header` in lower case; empty is none."""
        self._app = app
        self._networks = networks
        self._user_header = user_header.encode()
        forwarded = ProxyHeadersMiddleware(app, [str(network) for network in networks])  # type: ignore[arg-type]
        self._forwarded: ASGIApp = forwarded  # type: ignore[assignment]  # uvicorn's own ASGI types

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        host, port = scope.get("client") or ("", 0)
        address = _address(host)
        if address is None or not any(address in network for network in self._networks):
            await self._app(scope, receive, send)
            return
        scope["client"] = (str(address), port)
        if self._user_header:
            users = [value.strip(b" \t") for name, value in scope["headers"] if name == self._user_header]
            if users and users != [b""]:
                scope[PROXY_USER] = users
        await self._forwarded(scope, receive, send)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def with_trusted_proxies(app: ASGIApp, settings: Settings) -> ASGIApp:
    """The application behind these proxies; the same application without any. Raises SettingsError."""
    networks = parse_networks(settings.trusted_proxies)
    if networks:
        return TrustedProxies(app, networks, settings.proxy_user_header.lower())
    if settings.proxy_user_header:
        raise SettingsError(
            "proxy_user_header: set trusted_proxies too, to the address of the proxy that sends it"
        )
    return app


def parse_networks(text: str) -> list[Network]:
    """The comma-separated addresses and networks of the setting. Raises SettingsError."""
    try:
        networks = [ipaddress.ip_network(entry.strip()) for entry in text.split(",") if entry.strip()]
    except ValueError as exc:
        raise SettingsError(
            f"trusted_proxies: {exc}; expected addresses or networks as 127.0.0.1, 10.1.0.0/16 or ::1"
        ) from exc
    if any(network.prefixlen == 0 for network in networks):
        raise SettingsError("trusted_proxies: a network of all addresses would believe every client")
    return networks


def user_of(values: list[bytes]) -> str:
    """The person whom the proxy's header names. Raises BadRequest."""
    try:
        [user] = [value.decode() for value in values]
    except ValueError:
        user = ""
    if not 0 < len(user) <= MAX_USER_CHARS:
        raise BadRequest(
            "The proxy's header of the signed-in person must be there once, in UTF-8, with 1 to"
            f" {MAX_USER_CHARS} characters."
        )
    return user


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address of a peer; None where it has none. A dual-stack socket writes IPv4 as ::ffff:192.0.2.1."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
