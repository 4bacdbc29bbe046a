"""People who sign in at an OpenID Connect issuer that may lie, be slow in the head, or be away."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from app.api.http import issuer as issuer_module
from app.api.routes import sign_in as sign_in_routes
from app.engine.scripted.engine import Script
from app.settings import Settings, SettingsError
from app.store.people import MAX_SESSIONS
from tests.support.oidc_issuer import CLIENT, NONCE, ScriptedIssuer, public_pem, scripted_issuer, signed
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Response

ROUTE = "/api/sign-in/oidc"


@pytest.fixture
async def issuer() -> AsyncIterator[ScriptedIssuer]:
    """An issuer that is honest until a test says otherwise."""
    async with scripted_issuer() as started:
        yield started


async def serve_people(serve: Serve, issuer: ScriptedIssuer, **settings: Any) -> Served:
    """A server at which people of the issuer sign in."""
    return await serve(
        Script(tokens=3), oidc_issuer=issuer.url, oidc_client_id=CLIENT, **{"api_key": "root", **settings}
    )


async def sign_in(served: Served, code: str = "c", origin: str = "", **changed: Any) -> Response:
    """What the console sends when the issuer has sent the browser back."""
    origin = origin or f"http://127.0.0.1:{served.port}"
    body = {"code": code, "verifier": "v" * 43, "nonce": NONCE, "redirect_uri": f"{origin}/"}
    host = f"127.0.0.1:{served.port}"
    return await served.call("POST", ROUTE, body | changed, origin=origin, host=host)


def bearer(answer: Response) -> dict[str, str]:
    """The header with the key of an answer."""
    assert answer.status == 200, answer.body
    return {"authorization": f"Bearer {answer.json()['key']}"}


async def keys_of(served: Served) -> list[dict[str, Any]]:
    """Every key, as an admin sees it."""
    return (await served.call("GET", "/api/admin/keys", authorization="Bearer root")).json()["data"]


async def test_a_person_gets_a_key_of_their_own_with_default_terms(serve: Serve, issuer: ScriptedIssuer):
    """It answers a chat, ends by itself, is listed with a name, and its secret is in no log line."""
    served = await serve_people(serve, issuer, sign_in_tier="batch", sign_in_rpm=7, sign_in_budget_usd=2.5)
    answer = await sign_in(served)
    assert (await served.post(chat(), **bearer(answer))).status == 200
    [key] = await keys_of(served)
    assert (key["id"], key["name"], key["scope"]) == (answer.json()["id"], "ann@example.org", "chat")
    assert (key["tier"], key["rpm"], key["tpm"], key["budget_usd"]) == ("batch", 7, None, 2.5)
    assert 23.9 < (answer.json()["expires_at"] - time.time()) / 3600 <= 24
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json()["key"] not in json.dumps(served.log, default=str)
    assert [line["key"] for line in served.logged("signed_in")] == [key["id"]]


async def test_a_person_is_the_same_owner_at_each_sign_in_and_keys_do_not_pile_up(
    serve: Serve, issuer: ScriptedIssuer
):
    """Ten sign-ins are one key; the newest sessions work, the oldest have ended, and terms stay."""
    served = await serve_people(serve, issuer)
    answers = [await sign_in(served, f"c{i}") for i in range(MAX_SESSIONS + 2)]
    path = f"/api/admin/keys/{answers[0].json()['id']}"
    await served.call("PATCH", path, {"rpm": 9, "name": "Ann"}, authorization="Bearer root")
    answers.append(await sign_in(served, "last"))
    statuses = [(await served.call("GET", "/api/models", **bearer(answer))).status for answer in answers]
    assert statuses == [401] * 3 + [200] * MAX_SESSIONS
    [key] = await keys_of(served)
    assert (key["rpm"], key["name"], key["owner"][:7]) == (9, "Ann", "person-")


async def test_people_with_one_e_mail_are_two_owners(serve: Serve, issuer: ScriptedIssuer):
    """Who somebody is, the subject says, in any script; the e-mail is only shown."""
    served = await serve_people(serve, issuer)
    for number, subject in enumerate(("ann-1", "Ann-1", "安妮🦊", "آن", "ann-1\u0301")):
        issuer.claims, issuer.info = {"sub": subject}, {"sub": subject}
        assert (await sign_in(served, f"c{number}")).status == 200
    keys = await keys_of(served)
    assert len({key["owner"] for key in keys}) == len({key["id"] for key in keys}) == 5
    assert {key["name"] for key in keys} == {"ann@example.org"}


async def test_a_session_ends_by_itself(
    serve: Serve, issuer: ScriptedIssuer, monkeypatch: pytest.MonkeyPatch
):
    """After `oidc_session_hours` its key is 401, as an expired one."""
    served = await serve_people(serve, issuer, oidc_session_hours=0.5)
    answer = await sign_in(served)
    now_us = served.runtime.keys._clock_us
    monkeypatch.setattr(served.runtime.keys, "_clock_us", lambda: now_us() + 1_801_000_000)
    assert (await served.call("GET", "/api/models", **bearer(answer))).status == 401


async def test_a_revoked_person_does_not_come_back(serve: Serve, issuer: ScriptedIssuer):
    """The sessions end at once, and the next sign-in is refused."""
    served = await serve_people(serve, issuer)
    answer = await sign_in(served)
    await served.call("DELETE", f"/api/admin/keys/{answer.json()['id']}", authorization="Bearer root")
    assert (await served.call("GET", "/api/models", **bearer(answer))).status == 401
    assert (await sign_in(served, "again")).refusal() == (403, "sign_in_refused", None)


async def test_claims_decide_who_may_sign_in_and_who_is_an_admin(serve: Serve, issuer: ScriptedIssuer):
    """Of the token or the user info; who is in the group no more is no admin at the next sign-in."""
    served = await serve_people(serve, issuer, oidc_require="hd=example.org", oidc_admin="groups=ops")
    assert (await sign_in(served, "1")).refusal() == (403, "sign_in_refused", None)
    issuer.claims = {"hd": ["example.org"], "groups": "operators"}
    answer = await sign_in(served, "2")
    assert (await served.call("GET", "/metrics", **bearer(answer))).status == 403
    issuer.claims, issuer.info = {"hd": "example.org"}, {"groups": ["all", "ops"]}
    assert (await served.call("GET", "/metrics", **bearer(await sign_in(served, "3")))).status == 200
    issuer.info = {}
    await sign_in(served, "4")
    assert (await served.call("GET", "/metrics", **bearer(answer))).status == 403


@pytest.mark.parametrize(
    ("text", "claim", "holds"),
    [
        ("email_verified=true", True, True),
        ("email_verified=true", False, False),
        ("email_verified=true", [False], False),
        ("level=3", 3, True),
        ("level=3", 10**30, False),
        ("level=null", None, False),
    ],
)
def test_a_claim_that_is_no_text_is_compared_as_json(text: str, claim: object, holds: bool):
    """As `email_verified`, which issuers send as a boolean; a claim that is null is none."""
    wanted = issuer_module.claim_of("oidc_require", text)
    assert wanted is not None
    assert wanted.holds({wanted.name: claim}) is holds
    assert not wanted.holds({})


OTHER = rsa.generate_private_key(65537, 2048)


def unsigned(_issuer: ScriptedIssuer, claims: dict[str, Any]) -> str:
    """A token of the algorithm `none`."""
    return jwt.encode(claims, None, "none")


def with_the_public_key(issuer: ScriptedIssuer, claims: dict[str, Any]) -> str:
    """HS256, keyed with what everybody has; by hand, as the library refuses to."""
    import hashlib
    import hmac

    parts = [{"alg": "HS256", "typ": "JWT", "kid": issuer.kid}, claims]
    text = b".".join(base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=") for p in parts)
    mac = hmac.new(public_pem(issuer), text, hashlib.sha256).digest()
    return (text + b"." + base64.urlsafe_b64encode(mac).rstrip(b"=")).decode()


LIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "wrong nonce": (signed, {"nonce": "m" * 32}),
    "no nonce": (signed, {"nonce": None}),
    "wrong issuer": (signed, {"iss": "https://evil.example"}),
    "wrong audience": (signed, {"aud": "another"}),
    "several audiences": (signed, {"aud": [CLIENT, "another"]}),
    "authorized party": (signed, {"aud": [CLIENT, "another"], "azp": "another"}),
    "expired": (signed, {"exp": int(time.time()) - 3600}),
    "never expires": (signed, {"exp": None}),
    "of the future": (signed, {"iat": int(time.time()) + 86_400}),  # beyond the longest test run
    "no subject": (signed, {"sub": None}),
    "empty subject": (signed, {"sub": ""}),
    "subject is a number": (signed, {"sub": 7}),
    "user info of another": (signed, {"sub": "bob-2"}),
    "alg none": (unsigned, {}),
    "HS256 with the public key": (with_the_public_key, {}),
    "another key": (lambda issuer, claims: jwt.encode(claims, OTHER, "RS256", {"kid": issuer.kid}), {}),
    "unknown key": (lambda _issuer, claims: jwt.encode(claims, OTHER, "RS256", {"kid": "x"}), {}),
    "changed": (lambda issuer, claims: signed(issuer, claims)[:-8] + "AAAAAAAA", {}),
    "no token": (lambda *_: None, {}),
    "no JWT": (lambda *_: "<html>", {}),
}


async def test_a_token_that_lies_gives_no_key(serve: Serve, issuer: ScriptedIssuer):
    """Whatever is wrong with it: 403, and nobody was made."""
    served = await serve_people(serve, issuer)
    for number, (name, (token, claims)) in enumerate(LIES.items()):
        issuer.token, issuer.claims = token, claims
        answer = await sign_in(served, f"c{number}")
        assert answer.refusal() == (403, "sign_in_refused", None), name
    assert await keys_of(served) == []
    assert len(served.logged("sign_in_refused")) == len(LIES)
    assert "ann@example.org" not in json.dumps(served.log, default=str)


async def test_a_new_key_of_the_issuer_is_asked_for(serve: Serve, issuer: ScriptedIssuer):
    """Keys are kept between sign-ins, and read again for a token that names another."""
    served = await serve_people(serve, issuer)
    for code in "ab":
        assert (await sign_in(served, code)).status == 200
    assert issuer.asked.count("/jwks") == 1
    issuer.key, issuer.kid = OTHER, "second"
    assert (await sign_in(served, "c")).status == 200
    assert issuer.asked.count("/jwks") == 2


async def test_a_replayed_code_and_another_page_are_refused(serve: Serve, issuer: ScriptedIssuer):
    """A code works once; a page elsewhere gets nothing, and the issuer is not asked for it."""
    served = await serve_people(serve, issuer)
    assert (await sign_in(served)).status == 200
    assert (await sign_in(served)).refusal() == (403, "sign_in_refused", None)
    asked = len(issuer.asked)
    own = f"http://127.0.0.1:{served.port}"
    for changed in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"redirect_uri": "https://evil.example/"},
        {"redirect_uri": f"{own}/#other"},
        {"redirect_uri": f"{own}/?next=https://evil.example"},
        {"redirect_uri": own},
        {"origin": f"{own}.evil.example"},
    ):
        assert (await sign_in(served, "new", **changed)).refusal() == (403, "sign_in_refused", None), changed
    assert (await served.call("POST", ROUTE, {"code": "x"})).refusal() == (
        400,
        "missing_parameter",
        "verifier",
    )
    assert len(issuer.asked) == asked


async def test_without_the_issuer_keys_work_and_the_error_says_so(
    serve: Serve, issuer: ScriptedIssuer, monkeypatch: pytest.MonkeyPatch
):
    """Each of its documents may be missing: 503 with Retry-After, and a key from before still answers."""
    monkeypatch.setattr(issuer_module, "CACHED_S", 0.0)
    monkeypatch.setattr(issuer_module, "FAILED_S", 0.0)
    served = await serve_people(serve, issuer)
    key = bearer(await sign_in(served, "first"))
    for number, path in enumerate(("/me", "/jwks", "/token", "/.well-known/openid-configuration")):
        issuer.down = {path}
        answer = await sign_in(served, f"c{number}")
        assert answer.refusal() == (503, "issuer_unavailable", None), path
        assert answer.headers["retry-after"] == "10"
        assert issuer.url in answer.error()["message"]
        assert (await served.call("GET", "/api/models", **key)).status == 200
    methods = (await served.call("GET", "/api/sign-in")).json()
    assert methods["oidc"]["authorization_endpoint"] is None
    issuer.down, issuer.metadata = set(), {"token_endpoint": "http://evil.example/token"}
    assert (await sign_in(served, "http")).status == 503, "a secret goes to no address without TLS"


async def test_an_issuer_that_is_away_is_not_asked_at_every_page(serve: Serve, issuer: ScriptedIssuer):
    """Its failure is remembered for some seconds, so that sign-in pages do not wait one by one."""
    served = await serve_people(serve, issuer)
    issuer.down = {"/.well-known/openid-configuration"}
    for _ in range(5):
        assert (await served.call("GET", "/api/sign-in")).json()["oidc"]["authorization_endpoint"] is None
    assert len(issuer.asked) == 1


async def test_the_client_s_secret_goes_to_the_token_endpoint_alone(serve: Serve, issuer: ScriptedIssuer):
    """As the issuer takes it; without a secret the client is public."""
    for settings, methods in (
        ({"oidc_client_secret": "s:ü"}, None),
        ({"oidc_client_secret": "s:ü"}, ["client_secret_post"]),
        ({}, ["none"]),
        ({"oidc_client_secret": "s:ü"}, "null"),
    ):
        sent = None if methods == "null" else methods  # some issuers write what they do not say as null
        issuer.metadata = {} if methods is None else {"token_endpoint_auth_methods_supported": sent}
        served = await serve_people(serve, issuer, **settings)
        assert (await sign_in(served, str(methods) + str(settings))).status == 200
        assert "s:ü" not in json.dumps(served.log, default=str)
    basic = base64.b64encode(b"tokenring:s%3A%C3%BC").decode()
    assert issuer.authorizations == [f"Basic {basic}", "", "", f"Basic {basic}"]
    assert [form.get("client_secret") for form in issuer.forms] == [None, "s:ü", None, None]
    assert all(form["code_verifier"] == "v" * 43 for form in issuer.forms)


async def test_what_a_sign_in_page_is_given(serve: Serve, issuer: ScriptedIssuer):
    """All that a page needs to begin, and no secret; nothing without an issuer, where the route is 404."""
    served = await serve_people(serve, issuer, oidc_client_secret="hidden")
    answer = await served.call("GET", "/api/sign-in")
    assert answer.json() == {
        "oidc": {
            "issuer": issuer.url,
            "client_id": CLIENT,
            "scope": "openid profile email",
            "authorization_endpoint": f"{issuer.url}/authorize",
        },
        "proxy_user": None,
    }
    plain = await serve(Script(tokens=1))
    assert (await plain.call("GET", "/api/sign-in")).json() == {"oidc": None, "proxy_user": None}
    assert (await sign_in(plain)).refusal() == (404, "not_found", None)


async def test_a_flood_of_sign_ins_does_not_reach_the_issuer(
    serve: Serve, issuer: ScriptedIssuer, monkeypatch: pytest.MonkeyPatch
):
    """Beyond the rate they are 429. What is no sign-in, which any page can send, takes no place."""
    monkeypatch.setattr(sign_in_routes, "SIGN_IN_BURST", 1.0)
    monkeypatch.setattr(sign_in_routes, "SIGN_INS_PER_S", 0.001)
    served = await serve_people(serve, issuer)
    assert (await sign_in(served, origin="http://evil.example")).status == 403
    assert (await served.call("POST", ROUTE, {"code": "c"})).status == 400
    assert (await sign_in(served, "a")).status == 200
    assert (await sign_in(served, "b")).refusal() == (429, "rate_limit_exceeded", None)
    assert len(issuer.forms) == 1


async def test_where_people_sign_in_there_is_no_open_mode(serve: Serve, issuer: ScriptedIssuer):
    """A server of this machine without keys wants one too."""
    served = await serve_people(serve, issuer, api_key="")
    assert (await served.post(chat())).refusal() == (401, "missing_api_key", None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"oidc_client_id": ""}, "oidc_client_id"),
        ({"oidc_issuer": "http://login.example"}, "https://"),
        ({"oidc_issuer": "login.example"}, "https://"),
        ({"oidc_admin": "ops"}, "oidc_admin: expected a claim"),
        ({"oidc_require": "groups="}, "oidc_require: expected a claim"),
    ],
)
def test_settings_that_cannot_work_end_the_start(settings: dict[str, str], message: str):
    """The error names the setting."""
    with pytest.raises(SettingsError, match=message):
        issuer_module.Issuer(
            Settings(**{"oidc_issuer": "https://login.example", "oidc_client_id": CLIENT, **settings})
        )


def test_a_missing_library_ends_the_start(monkeypatch: pytest.MonkeyPatch):
    """The error says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "jwt", None)
    with pytest.raises(SettingsError, match=r"tokenring\[oidc\]"):
        issuer_module.Issuer(Settings(oidc_issuer="https://login.example", oidc_client_id=CLIENT))
