"""Who is calling. Until keys are stored there is one owner and at most one key."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request

from app.errors import Forbidden, Unauthorized

OWNER = "local"


class Gatekeeper:
    """Names the owner of a request by its API key, or lets all in when there is none.

    Without a key the server listens on loopback only, and what still could reach it from
    outside is a web page in the user's own browser: those requests are refused by their
    Host and Origin (DNS rebinding, cross-site requests).
    """

    def __init__(self, api_key: str) -> None:
        self._api_key = api_key.encode()

    def owner(self, request: Request) -> str:
        """The caller's name. Raises Unauthorized, Forbidden."""
        if self._api_key:
            self._check_key(request.headers.get("authorization", ""))
        else:
            self._check_local(request)
        return OWNER

    def _check_key(self, header: str) -> None:
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized(
                "Send your API key as the header `Authorization: Bearer KEY`.", code="missing_api_key"
            )
        if not hmac.compare_digest(key.strip().encode("latin-1"), self._api_key):
            raise Unauthorized("The API key is wrong.")

    def _check_local(self, request: Request) -> None:
        host, origin = request.headers.get("host"), request.headers.get("origin")
        from_outside = origin is not None and not is_loopback(_hostname(origin))
        if from_outside or (host and not is_loopback(_hostname(f"//{host}"))):
            raise Forbidden(
                "Without an API key this server answers local requests only; set TOKENRING_API_KEY."
            )


def _hostname(url: str) -> str:
    """The host of a URL; empty when there is none, or the URL cannot be read."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
