"""A sign-in at a certified OpenID Connect provider, by a client that follows its pages as a browser does."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

from app.engine.scripted.engine import Script
from tests.support.oidc_issuer import NONCE, PROVIDER_SETTINGS, certified_provider, free_port
from tests.support.servers import Serve, chat

VERIFIER = "v" * 64


async def signed_in_at(provider: httpx.AsyncClient, page: str, login: str, **asked: str) -> dict[str, str]:
    """The query with which the provider sends the browser back, after its pages for login and consent."""
    answer = await provider.get("/auth", params=asked)
    while not answer.headers.get("location", "").startswith(page):
        if answer.has_redirect_location:
            answer = await provider.get(answer.headers["location"])
            continue
        [action] = re.findall(r'<form [^>]*action="([^"]+)"', answer.text)
        [prompt] = re.findall(r'name="prompt" value="(\w+)"', answer.text)
        form = {"prompt": prompt, "login": login, "password": "any"}
        answer = await provider.post(action, data=form)
    query = parse_qs(urlsplit(answer.headers["location"]).query)
    return {name: values[0] for name, values in query.items()}


async def test_a_person_signs_in_at_a_certified_provider(serve: Serve):
    """The code, PKCE and the user info work; the code works once, and with its own verifier only."""
    port = free_port()
    served = await serve(
        Script(tokens=2), api_key="root", oidc_issuer=f"http://127.0.0.1:{port}", **PROVIDER_SETTINGS
    )
    origin = f"http://127.0.0.1:{served.port}"
    digest = hashlib.sha256(VERIFIER.encode()).digest()
    asked = {
        "response_type": "code",
        "redirect_uri": f"{origin}/",
        "state": "s" * 32,
        "nonce": NONCE,
        "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
        "code_challenge_method": "S256",
    }
    headers = {"origin": origin, "host": origin.removeprefix("http://")}

    async def exchange(code: str, verifier: str = VERIFIER) -> tuple[int, dict[str, Any]]:
        body = {"code": code, "verifier": verifier, "nonce": NONCE, "redirect_uri": f"{origin}/"}
        answer = await served.call("POST", "/api/sign-in/oidc", body, **headers)
        return answer.status, answer.json()

    with certified_provider(port, f"{origin}/") as url:
        oidc = (await served.call("GET", "/api/sign-in")).json()["oidc"]
        assert oidc["authorization_endpoint"] == f"{url}/auth"
        asked |= {"client_id": oidc["client_id"], "scope": oidc["scope"]}
        people = {}
        for login in ("ann", "安妮"):
            async with httpx.AsyncClient(base_url=url, timeout=20) as provider:
                back = await signed_in_at(provider, origin, login, **asked)
                assert back["state"] == asked["state"]
                status, people[login] = await exchange(back["code"])
                assert status == 200, people[login]
                assert (await exchange(back["code"]))[1]["error"]["code"] == "sign_in_refused"
                other = await signed_in_at(provider, origin, login, **asked)
                assert (await exchange(other["code"], "w" * 64))[1]["error"]["code"] == "sign_in_refused"
    scopes = []
    for person in people.values():
        key = {"authorization": f"Bearer {person['key']}"}
        assert (await served.post(chat(), **key)).status == 200
        scopes.append((await served.call("GET", "/api/me", **key)).json()["scope"])
    assert scopes == ["admin", "chat"]
    assert people["ann"]["name"] == people["安妮"]["name"] == "ann@example.org"
    assert people["ann"]["id"] != people["安妮"]["id"]
