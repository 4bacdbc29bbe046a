"""Who is let in: the right key, or, without one, this machine only."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from app.api.auth import Gatekeeper, is_loopback
from app.errors import Forbidden, Unauthorized


def request(**headers: str) -> Request:
    """A request with these headers, as bytes on the wire."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw})


@pytest.mark.parametrize("key", ["plain-key", "schlüssel-世界"])
def test_right_key_is_let_in(key: str):
    """The key is compared as bytes, whatever characters it has."""
    assert Gatekeeper(key).owner(request(authorization=f"Bearer {key}")) == "local"
    assert Gatekeeper(key).owner(request(authorization=f"bearer  {key} ")) == "local"


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
    ],
)
def test_wrong_keys_are_not(header: str, code: str):
    """No key and a wrong key are told apart, and neither is repeated."""
    with pytest.raises(Unauthorized) as error:
        Gatekeeper("key").owner(request(authorization=header))
    assert error.value.code == code
    assert "wrong " not in error.value.message


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:8000"},
        {"host": "127.0.0.1"},
        {"host": "[::1]:8000"},
        {"host": "127.8.9.1", "origin": "http://localhost:3000"},
        {"host": "app.localhost"},
    ],
)
def test_local_requests_need_no_key(headers: dict[str, str]):
    """Without a key, requests that name this machine are let in."""
    assert Gatekeeper("").owner(request(**headers)) == "local"


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
    ],
)
def test_web_pages_of_others_are_refused(headers: dict[str, str]):
    """Without a key, what a foreign page makes the browser send is refused, malformed names too."""
    with pytest.raises(Forbidden):
        Gatekeeper("").owner(request(**headers))


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("", False), ("::", False)],
)
def test_loopback_names(host: str, local: bool):
    """Only names and addresses that cannot mean another machine are loopback."""
    assert is_loopback(host) is local
