"""What a proxy's headers are worth: the client's address, and the person who signed in at the proxy."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.http.proxies import parse_networks, with_trusted_proxies
from app.engine.scripted.engine import Script
from app.settings import Settings, SettingsError
from app.store import keys
from tests.support.servers import Serve, Served, chat

USER = {"trusted_proxies": "127.0.0.1", "proxy_user_header": "X-Forwarded-Email"}
OWN = {"sec_fetch_site": "same-origin"}
LIST = "/api/conversations"


async def addresses_of(monkeypatch: pytest.MonkeyPatch, served: Served, *forwarded: str) -> set[str]:
    """The client addresses that requests of one key with these `X-Forwarded-For` are recorded with."""
    recorded: set[str] = set()
    addresses = served.runtime.abuse.addresses
    monkeypatch.setattr(addresses, "record", lambda _key, address: recorded.add(address))
    made = {"name": "ann", "max_streams": 9}
    key = (await served.call("POST", "/api/admin/keys", made, authorization="Bearer root")).json()["key"]
    for value in forwarded:
        headers = {"authorization": f"Bearer {key}", "x_forwarded_for": value}
        assert (await served.post(chat(), **headers)).status == 200
    return recorded


async def test_the_client_is_whom_a_trusted_proxy_names(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """The last address that is no trusted proxy's: what a client wrote in front of it is not believed."""
    served = await serve(Script(tokens=1), api_key="root", trusted_proxies="127.0.0.1, 10.0.0.0/8")
    assert await addresses_of(
        monkeypatch, served, "192.0.2.1", "198.51.100.7, 192.0.2.2", "192.0.2.3, 10.1.2.3"
    ) == {
        "192.0.2.1",
        "192.0.2.2",
        "192.0.2.3",
    }


async def test_an_address_from_anyone_else_is_ignored(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """Without the setting, and for a peer that it does not name, the client is the peer."""
    for settings in ({}, {"trusted_proxies": "192.0.2.0/24,::1"}):
        served = await serve(Script(tokens=1), api_key="root", **settings)
        assert await addresses_of(monkeypatch, served, "192.0.2.1") == {"127.0.0.1"}


async def test_a_trusted_proxy_does_not_open_an_open_server(serve: Serve):
    """In open mode what a proxy passed on is refused, whoever it says that the client is."""
    served = await serve(Script(tokens=1), trusted_proxies="127.0.0.1")
    for client in ("127.0.0.1", "192.0.2.1", "::1", ""):
        answer = await served.post(chat(), x_forwarded_for=client)
        assert answer.refusal() == (403, "forbidden", None)
    assert (await served.post(chat())).status == 200, "programs of this machine need no proxy"


async def test_a_person_whom_the_proxy_names_is_an_owner(serve: Serve):
    """Ann has terms, conversations and a key in the list without a secret; Bob sees nothing of hers."""
    served = await serve(Script(tokens=2), api_key="root", sign_in_rpm=50, **USER)
    ann, bob = {"x_forwarded_email": "ann@example.org"}, {"x_forwarded_email": "BOB@example.org"}
    assert (await served.post(chat(), **ann, **OWN)).status == 200
    assert (await served.post(chat(), **ann, **OWN)).status == 200
    assert len((await served.call("GET", LIST, **ann)).json()["data"]) == 2
    assert (await served.call("GET", LIST, **bob)).json()["data"] == []
    assert (await served.call("GET", "/metrics", **ann)).status == 403
    listed = (await served.call("GET", "/api/admin/keys", authorization="Bearer root")).json()["data"]
    assert [(key["name"], key["rpm"], key["scope"]) for key in listed] == [
        ("ann@example.org", 50, "chat"),
        ("BOB@example.org", 50, "chat"),
    ]
    usage = await served.call("GET", "/api/usage?group_by=key", authorization="Bearer root")
    assert [group["key"] for group in usage.json()["groups"]] == [listed[0]["id"]]


async def test_spaces_around_a_name_are_none_of_it(serve: Serve):
    """RFC 9110, section 5.5: the parser leaves those behind a value, which would make another owner."""
    served = await serve(Script(tokens=1), api_key="root", **USER)
    for name in ("ann", " ann", "ann ", "\tann \t"):
        assert (await served.call("GET", LIST, x_forwarded_email=name)).status == 200
    listed = (await served.call("GET", "/api/admin/keys", authorization="Bearer root")).json()["data"]
    assert [key["name"] for key in listed] == ["ann"]
    assert (await served.call("GET", LIST, x_forwarded_email="  ")).status == 401, "nobody is named"


async def test_an_admin_ends_a_person_s_access(serve: Serve):
    """A revoked key of theirs refuses every request; an expired one too, until it is taken back."""
    served = await serve(Script(tokens=1), api_key="root", **USER)
    ann, root = {"x_forwarded_email": "ann"}, {"authorization": "Bearer root"}
    assert (await served.call("GET", LIST, **ann)).status == 200
    [key] = (await served.call("GET", "/api/admin/keys", **root)).json()["data"]
    path = f"/api/admin/keys/{key['id']}"
    await served.runtime.keys.write(lambda c: keys.change(c, key["id"], {"expires_at_us": 1}))
    assert (await served.call("GET", LIST, **ann)).refusal() == (403, "sign_in_refused", None)
    await served.call("PATCH", path, {"expires_at": None, "scope": "admin"}, **root)
    assert (await served.call("GET", "/metrics", **ann)).status == 200
    await served.call("DELETE", path, **root)
    assert (await served.call("GET", LIST, **ann)).refusal() == (403, "sign_in_refused", None)


async def test_the_header_of_anyone_else_is_ignored(serve: Serve):
    """From another address than the proxy's it names nobody, and nobody is made."""
    served = await serve(Script(tokens=1), api_key="root", **{**USER, "trusted_proxies": "192.0.2.1"})
    forged = {"x_forwarded_email": "ann", "x_forwarded_for": "192.0.2.1"}
    assert (await served.call("GET", LIST, **forged)).refusal() == (401, "missing_api_key", None)
    assert (await served.call("GET", "/api/sign-in", **forged)).json()["proxy_user"] is None
    assert served.runtime.keys.empty


async def test_a_key_wins_over_the_proxy_s_word(serve: Serve):
    """A program that sends its key through the proxy is that key; Basic of the proxy is no key."""
    served = await serve(Script(tokens=1), api_key="root", **USER)
    both = {"x_forwarded_email": "ann", "authorization": "Bearer root"}
    assert (await served.call("GET", "/metrics", **both)).status == 200
    wrong = {"x_forwarded_email": "ann", "authorization": "Bearer wrong"}
    assert (await served.call("GET", LIST, **wrong)).refusal() == (401, "invalid_api_key", None)
    basic = {"x_forwarded_email": "ann", "authorization": "Basic YW5uOg=="}
    assert (await served.call("GET", LIST, **basic)).status == 200


@pytest.mark.parametrize(
    ("method", "headers", "allowed"),
    [
        ("GET", {}, True),
        ("GET", {"sec_fetch_site": "same-origin"}, True),
        ("GET", {"sec_fetch_site": "none"}, True),
        ("GET", {"sec_fetch_site": "cross-site"}, False),
        ("GET", {"sec_fetch_site": "same-site"}, False),
        ("GET", {"origin": "https://evil.example"}, False),
        ("POST", {}, False),
        ("POST", {"sec_fetch_site": "same-origin", "origin": "https://chat.example"}, True),
        ("POST", {"origin": "https://chat.example"}, True),
        ("POST", {"origin": "http://chat.example"}, True),
        ("POST", {"origin": "https://chat.example.evil"}, False),
        ("POST", {"origin": "null"}, False),
        ("POST", {"sec_fetch_site": "cross-site", "origin": "https://chat.example"}, False),
        ("DELETE", {"origin": "https://evil.example"}, False),
        ("DELETE", {}, False),
    ],
)
async def test_a_page_of_another_origin_cannot_use_the_proxy_s_cookie(
    serve: Serve, method: str, headers: dict[str, str], allowed: bool
):
    """What a browser sends for another origin's page is 403, also where the page could not read it."""
    served = await serve(Script(tokens=1), api_key="root", cors_origins="https://evil.example", **USER)
    path = {"GET": LIST, "POST": "/api/chat/completions", "DELETE": f"{LIST}/none"}[method]
    body = chat() if method == "POST" else None
    named = {"x_forwarded_email": "ann", "host": "chat.example", **headers}
    answer = await served.call(method, path, body, **named)
    assert (answer.status != 403) is allowed, answer.body
    assert served.runtime.keys.empty is not allowed, "a refused request makes nobody"


async def test_a_name_that_is_none_is_refused(serve: Serve):
    """No UTF-8, twice, too long: 400. Empty is nobody. Other scripts are people."""
    served = await serve(Script(tokens=1), api_key="root", **USER)
    assert (await served.call("GET", LIST, x_forwarded_email="")).status == 401
    assert (await served.call("GET", LIST, x_forwarded_email="a" * 256)).status == 400
    raw = b"GET /api/conversations HTTP/1.1\r\nhost: x\r\n%b\r\n"
    for lines, status in (
        (b"x-forwarded-email: ann\r\nx-forwarded-email: root\r\n", 400),
        (b"x-forwarded-email: \xff\xfe\r\n", 400),
        ("x-forwarded-email: آن-安妮🦊\r\n".encode(), 200),
    ):
        assert await status_of(served, raw % lines) == status, lines
    root = {"authorization": "Bearer root"}
    names = [key["name"] for key in (await served.call("GET", "/api/admin/keys", **root)).json()["data"]]
    assert names == ["آن-安妮🦊"]


async def status_of(served: Served, request: bytes) -> int:
    """The status of the answer to these bytes."""
    from tests.support.sse_client import Connection

    async with await Connection.to(served.port) as connection:
        await connection.send(request)
        return (await connection.response()).status


@pytest.mark.parametrize("text", ["chat.example", "10.0.0.1/8", "0.0.0.0/0", "::/0", "*", "10.0.0.0/8;::1"])
def test_what_is_no_list_of_networks_ends_the_start(text: str):
    """Nor may all addresses be trusted."""
    with pytest.raises(SettingsError, match="trusted_proxies"):
        parse_networks(text)


def test_a_header_that_nobody_may_send_ends_the_start():
    """`proxy_user_header` needs `trusted_proxies`."""
    app: Any = object()
    with pytest.raises(SettingsError, match="trusted_proxies"):
        with_trusted_proxies(app, Settings(proxy_user_header="x-user"))
    assert with_trusted_proxies(app, Settings()) is app
