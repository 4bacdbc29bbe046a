"""Who is let in: a valid key, or, where there has never been one, this machine only."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import structlog
from starlette.requests import Request

from app.api.http.auth import Gatekeeper, check_api_key, is_loopback
from app.core import Key, KeyTerms, Secret
from app.errors import EngineNotReady, Forbidden, Unauthorized
from app.intake.caller import LOCAL
from app.settings import Settings, SettingsError
from app.store.key_table import KeyTable
from app.store.keys import digest_of

NOW_US = 1_790_000_000_000_000
ID = "tr-0123456789ab"
TEXT = f"{ID}-{'5' * 64}"
OLD = f"{ID}-{'4' * 64}"


def request(**headers: str) -> Request:
    """A request with these headers, as bytes on the wire."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw})


def a_key(**terms: Any) -> Key:
    """The key of `TEXT`, owned by ann."""
    secret = Secret(digest_of(TEXT.encode()), None)
    return Key(ID, "ann", KeyTerms("laptop", **terms), NOW_US - 1, secrets=(secret,))


def table_of(*keys: Key) -> KeyTable:
    """A table that holds these keys."""
    table = KeyTable(None, structlog.get_logger(), lambda: NOW_US)  # type: ignore[arg-type]  # it reads no store
    table._by_id = {key.id: key for key in keys}
    return table


def gate(
    *keys: Key, api_key: str = "", host: str = "127.0.0.1", loaded: bool = True, cors_origins: str = ""
) -> Gatekeeper:
    """A gatekeeper over these stored keys."""
    table = table_of(*keys)
    table._version = 1 if loaded else None
    return Gatekeeper(table, Settings(api_key=api_key, host=host, cors_origins=cors_origins))


@pytest.mark.parametrize("key", ["plain-key", "schlüssel-世界"])
def test_the_key_of_the_settings_is_let_in(key: str):
    """It is compared as bytes, whatever characters it has, and is an admin's."""
    for header in (f"Bearer {key}", f"bearer  {key} "):
        assert gate(api_key=key).caller(request(authorization=header)) is LOCAL
    assert (LOCAL.owner, LOCAL.is_admin, LOCAL.models) == ("local", True, None)


def test_a_stored_key_is_let_in_as_its_owner():
    """A stored key names its owner, what it may do, and which models."""
    for scope in ("chat", "admin"):
        caller = gate(a_key(scope=scope, models=("m",))).caller(request(authorization=f"Bearer {TEXT}"))
        assert (caller.owner, caller.is_admin, caller.models) == ("ann", scope == "admin", ("m",))
    assert gate(a_key(), api_key="other").caller(request(authorization=f"Bearer {TEXT}")).owner == "ann"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        ("Bearer ", "missing_api_key"),
        ("Basic key", "missing_api_key"),
        ("Bearer wrong", "invalid_api_key"),
        ("Bearer key2", "invalid_api_key"),
        ("Bearer kéy", "invalid_api_key"),
        (f"Bearer {ID}", "invalid_api_key"),
        (f"Bearer {ID}-", "invalid_api_key"),
        (f"Bearer {TEXT[:-1]}", "invalid_api_key"),
        (f"Bearer {TEXT}5", "invalid_api_key"),
        (f"Bearer {TEXT.upper()}", "invalid_api_key"),
        (f"Bearer tr-ba9876543210{TEXT[15:]}", "invalid_api_key"),
        (f"Bearer {digest_of(TEXT.encode()).hex()}", "invalid_api_key"),
    ],
)
def test_wrong_keys_are_not(header: str, code: str):
    """No key and a wrong key are told apart, and neither is repeated."""
    with pytest.raises(Unauthorized) as error:
        gate(a_key(), api_key="key").caller(request(authorization=header))
    assert error.value.code == code
    assert "wrong" not in error.value.message
    assert ID not in error.value.message


REFUSED: dict[str, Callable[[], Key | None]] = {
    "unknown": lambda: None,
    "wrong secret": lambda: replace(a_key(), secrets=(Secret(bytes(32), None),)),
    "revoked": lambda: replace(a_key(), revoked_at_us=NOW_US, secrets=()),
    "revoked, with a secret left": lambda: replace(a_key(), revoked_at_us=NOW_US),
    "expired": lambda: a_key(expires_at_us=NOW_US),
    "rotated away": lambda: replace(a_key(), secrets=(Secret(digest_of(TEXT.encode()), NOW_US),)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused_keys_cannot_be_told_apart(why: str, monkeypatch: pytest.MonkeyPatch):
    """Each is refused in the same words after one SHA-256 and one comparison in constant time."""
    compared: list[int] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(len(b))
        return a == b

    key = REFUSED[why]()
    keeper = gate(*([] if key is None else [key]), host="0.0.0.0")
    monkeypatch.setattr(hmac, "compare_digest", compare)
    with pytest.raises(Unauthorized) as error:
        keeper.caller(request(authorization=f"Bearer {TEXT}"))
    assert error.value.message == "The API key is not valid: unknown, expired, or revoked."
    assert compared == [32]


def test_a_key_is_valid_until_it_expires():
    """The microsecond before it expires it is let in."""
    assert (
        gate(a_key(expires_at_us=NOW_US + 1)).caller(request(authorization=f"Bearer {TEXT}")).owner == "ann"
    )


def test_both_secrets_are_valid_in_the_overlap():
    """After a rotation the old and the new secret name the same owner."""
    secrets = (Secret(digest_of(OLD.encode()), NOW_US + 1), Secret(digest_of(TEXT.encode()), None))
    for text in (OLD, TEXT):
        caller = gate(replace(a_key(), secrets=secrets)).caller(request(authorization=f"Bearer {text}"))
        assert caller.owner == "ann"


def test_the_setting_is_no_stored_key():
    """A chat key, exported for a client where a server is started then, would be an admin's."""
    for stored in (a_key(), replace(a_key(), revoked_at_us=NOW_US, secrets=())):
        with pytest.raises(SettingsError, match="stored key 'laptop'"):
            check_api_key(TEXT, table_of(stored))
    for other in ("", "other", f"tr-ba9876543210{TEXT[15:]}"):
        check_api_key(other, table_of(a_key()))


def test_admin_routes_are_for_admin_keys():
    """A chat key is 403 there; an admin key, the key of the settings, and open mode are not."""
    header = request(authorization=f"Bearer {TEXT}")
    with pytest.raises(Forbidden, match="admin key"):
        gate(a_key()).admin(header)
    assert gate(a_key(scope="admin")).admin(header).owner == "ann"
    assert gate(api_key=TEXT).admin(header) is LOCAL
    assert gate().admin(request()) is LOCAL


@pytest.mark.parametrize(
    "keeper",
    [
        gate(a_key()),
        gate(replace(a_key(), revoked_at_us=NOW_US, secrets=())),
        gate(api_key="key"),
        gate(host="0.0.0.0"),
        gate(host="10.0.0.7", loaded=False),
    ],
)
def test_open_mode_ends(keeper: Gatekeeper):
    """With the first key, revoked or not, a key of the settings, or another address, a key is needed."""
    assert not keeper.keyless
    with pytest.raises(Unauthorized) as error:
        keeper.caller(request(host="localhost"))
    assert error.value.code == "missing_api_key"


def test_nobody_is_let_in_before_the_store_is_read():
    """What is not known yet is a 503; only the key of the settings needs no store."""
    for keeper in (gate(loaded=False), gate(loaded=False, api_key="key")):
        with pytest.raises(EngineNotReady):
            keeper.caller(request(authorization=f"Bearer {TEXT}"))
    assert gate(loaded=False, api_key="key").caller(request(authorization="Bearer key")) is LOCAL


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:8000"},
        {"host": "127.0.0.1"},
        {"host": "[::1]:8000"},
        {"host": "127.8.9.1:3000", "origin": "http://127.8.9.1:3000", "sec-fetch-site": "same-origin"},
        {"host": "LOCALHOST", "origin": "http://localhost"},
        {"host": "[::1]:8000", "origin": "http://[::1]:8000"},
        {"host": "localhost:8000", "sec-fetch-site": "none"},
        {"host": "localhost:8000", "sec-fetch-mode": "cors"},
        {"host": "app.localhost"},
        {"host": "LOCALHOST:8000"},
        {"user-agent": "OpenAI/Python", "x-stainless-lang": "python", "x-openwebui-user-name": "ann"},
        {"authorization": "Bearer none"},
    ],
)
def test_local_requests_need_no_key(headers: dict[str, str]):
    """In open mode, requests that name this machine are let in."""
    assert gate().keyless
    assert gate().caller(request(**headers)) is LOCAL


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "localhost.evil.example"},
        {"host": "10.0.0.7:8000"},
        {"host": "localhost", "origin": "https://evil.example"},
        {"host": "localhost", "origin": "null"},
        {"host": "[::1"},
        {"host": "localhost", "origin": "http://[::1"},
        {"host": "evil.example:80@127.0.0.1"},
        {"host": "user@localhost"},
        {"host": "localhost/"},
        {"host": ""},
        {"host": "localhost:8000:1"},
        {"host": "2130706433"},
        {"host": "0177.0.0.1"},
        {"host": "127.1"},
        {"host": "127.0.0.1."},
        {"host": "[::ffff:10.0.0.7]"},
        {"host": "localhost\t.evil.example"},
        {"host": "localhost:8000", "origin": "http://localhost:9999"},
        {"host": "localhost:8000", "origin": "http://localhost"},
        {"host": "localhost:8000", "origin": "https://localhost:8000"},
        {"host": "localhost:8000", "origin": "http://127.0.0.1:8000"},
        {"host": "localhost:8000", "origin": "http://localhost:8000/"},
        {"host": "127.0.0.1:8000", "origin": "http://a.localhost:8000", "sec-fetch-site": "same-origin"},
        {"host": "localhost:8000", "sec-fetch-site": "same-site"},
        {"host": "localhost:8000", "sec-fetch-site": "cross-site"},
        {"host": "localhost:8000", "sec-fetch-site": ""},
    ],
)
def test_web_pages_of_others_are_refused(headers: dict[str, str]):
    """In open mode, what a foreign page makes the browser send is refused, malformed names too."""
    with pytest.raises(Forbidden):
        gate().caller(request(**headers))


def test_a_page_of_this_machine_needs_no_key_if_its_origin_is_listed():
    """A listed origin counts in open mode if it is of this machine; all that are, with a star."""
    page = {"host": "localhost:8000", "origin": "http://localhost:3000", "sec-fetch-site": "same-site"}
    for listed in ("http://localhost:3000, https://a.example", "*"):
        keeper = gate(cors_origins=listed)
        assert keeper.caller(request(**page)) is LOCAL
        for other in (
            {**page, "origin": "https://a.example"},
            {"host": "a.localhost", "sec-fetch-site": "x"},
        ):
            with pytest.raises(Forbidden):
                keeper.caller(request(**other))
    with pytest.raises(Forbidden, match="cors_origins"):
        gate(cors_origins="http://localhost:4000").caller(request(**page))


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("", False), ("::", False)],
)
def test_loopback_names(host: str, local: bool):
    """Only names and addresses that cannot mean another machine are loopback."""
    assert is_loopback(host) is local


@pytest.mark.parametrize(
    "name",
    [
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
        "x-forwarded-port",
        "x-real-ip",
        "forwarded",
        "via",
        "cf-connecting-ip",
        "true-client-ip",
        "x-envoy-external-address",
    ],
)
def test_what_a_proxy_passes_on_is_not_local(name: str):
    """In open mode a request with a proxy's header is refused, whatever it says and whoever it names."""
    with pytest.raises(Forbidden) as error:
        gate().caller(request(host="127.0.0.1:8000", **{name: "127.0.0.1"}))
    assert name in error.value.message
    assert "tokenring keys create" in error.value.message
    assert gate(api_key="key").caller(request(authorization="Bearer key", **{name: "1.2.3.4"})).owner


@pytest.mark.parametrize(
    "scope",
    [{"client": ("10.0.0.7", 1)}, {"http_version": "1.0"}],
    ids=["another machine", "nginx as it comes"],
)
def test_what_cannot_be_from_here_is_not_local(scope: dict[str, Any]):
    """In open mode another machine's address is refused, and HTTP/1.0, which local clients do not speak."""
    asked = request(host="localhost")
    asked.scope.update(scope)
    with pytest.raises(Forbidden):
        gate().caller(asked)


def test_a_key_that_ends_in_a_letter_of_two_bytes_is_let_in():
    """White space is cut from a key's ends, and no byte that is part of a letter."""
    assert gate(api_key="voilà").caller(request(authorization="Bearer voilà ")) is LOCAL
