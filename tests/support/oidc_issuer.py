"""OpenID Connect issuers: one whose every answer a test chooses, so that it can lie, and a certified one."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from scripts.support.openai_environments import Offline, node_command

CLIENT = "tokenring"
Token = Callable[["ScriptedIssuer", dict[str, Any]], str | None]


def signed(issuer: ScriptedIssuer, claims: dict[str, Any]) -> str:
    """An id token as it should be."""
    return jwt.encode(claims, issuer.key, "RS256", {"kid": issuer.kid})


def public_pem(issuer: ScriptedIssuer) -> bytes:
    """The issuer's public key, which everybody has."""
    return issuer.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@dataclass
class ScriptedIssuer:
    """What it says, and what it was asked."""

    url: str = ""
    key: rsa.RSAPrivateKey = field(default_factory=lambda: rsa.generate_private_key(65537, 2048))
    kid: str = "first"
    claims: dict[str, Any] = field(default_factory=dict)
    """Instead of those of an honest token, or beside them; None leaves a claim out."""
    info: dict[str, Any] = field(default_factory=dict)
    token: Token = signed
    down: set[str] = field(default_factory=set)
    """Paths that answer 500."""
    metadata: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    forms: list[dict[str, str]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Codes that were exchanged."""

    async def answer(self, request: web.Request) -> web.Response:
        """Any request."""
        self.asked.append(request.path)
        if request.path in self.down:
            return web.Response(status=500, text="<html>down</html>")
        if request.path.endswith("openid-configuration"):
            return web.json_response(self._metadata() | self.metadata)
        if request.path == "/jwks":
            jwk = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
            return web.json_response({"keys": [{**jwk, "kid": self.kid, "use": "sig", "alg": "RS256"}]})
        if request.path == "/token":
            return await self._token(request)
        return web.json_response({"sub": "ann-1", **self.info})

    async def _token(self, request: web.Request) -> web.Response:
        form = {name: str(value) for name, value in (await request.post()).items()}
        self.forms.append(form)
        self.authorizations.append(request.headers.get("authorization", ""))
        if form["code"] in self.used:
            return web.json_response({"error": "invalid_grant"}, status=400)
        self.used.add(form["code"])
        now_s = int(time.time())
        honest = {
            "iss": self.url,
            "sub": "ann-1",
            "aud": CLIENT,
            "iat": now_s,
            "exp": now_s + 300,
            "nonce": NONCE,
            "email": "ann@example.org",
        }
        claims = {name: value for name, value in (honest | self.claims).items() if value is not None}
        token = self.token(self, claims)
        return web.json_response({"access_token": "at", "token_type": "Bearer", "id_token": token})

    def _metadata(self) -> dict[str, Any]:
        return {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/jwks",
            "userinfo_endpoint": f"{self.url}/me",
        }


NONCE = "n" * 32
PROVIDER = Path(__file__).parent / "oidc_provider/provider.mjs"
PROVIDER_SETTINGS = {
    "oidc_client_id": CLIENT,
    "oidc_client_secret": "secret",
    "oidc_scope": "openid email groups",
    "oidc_admin": "groups=ops",
}
"""What a server must be set to, besides the provider's address."""


@contextmanager
def certified_provider(port: int, redirect_uri: str) -> Iterator[str]:
    """The npm package oidc-provider on a port of this machine. Skips where it cannot be had."""
    try:
        command = node_command(PROVIDER)
    except (Offline, FileNotFoundError) as exc:
        pytest.skip(f"npm's oidc-provider cannot be had: {exc}")
    process = subprocess.Popen(
        [*command, str(port), redirect_uri], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody is given meanwhile; a server that asks for it by number gets it."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield int(sock.getsockname()[1])


@asynccontextmanager
async def scripted_issuer() -> AsyncIterator[ScriptedIssuer]:
    """The issuer on a free port of this machine."""
    issuer = ScriptedIssuer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", issuer.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield issuer
    finally:
        await runner.cleanup()
