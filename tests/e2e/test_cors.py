"""Pages of other origins: what a browser asks first, and which answers it lets a script read."""

from __future__ import annotations

import pytest

from app.api.http.cors import EXPOSED, parse_origins
from app.engine.scripted.engine import Script
from app.settings import SettingsError
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Response

PAGE = "https://chat.example.org"
KEY = {"authorization": "Bearer secret"}


async def preflight(served: Served, origin: str, method: str = "POST") -> Response:
    """A browser's question before a request with a key."""
    return await served.call(
        "OPTIONS",
        "/v1/chat/completions",
        origin=origin,
        access_control_request_method=method,
        access_control_request_headers="authorization,content-type,last-event-id,x-stainless-os",
    )


async def test_without_the_setting_no_cors_header_is_sent(serve: Serve):
    """A preflight is a request of a method that no route has."""
    served = await serve(Script(tokens=2), api_key="secret")
    asked = await preflight(served, PAGE)
    answer = await served.call("GET", "/v1/models", origin=PAGE, **KEY)
    assert (asked.status, answer.status) == (405, 200)
    assert not [name for name in {**asked.headers, **answer.headers} if name.startswith("access-control")]


async def test_a_preflight_of_a_listed_origin_is_answered_without_a_key(serve: Serve):
    """It may send a key, `Last-Event-ID` and the headers of SDKs, by each method that a route has."""
    served = await serve(api_key="secret", cors_origins=f"http://localhost:3000, {PAGE}")
    for method in ("GET", "POST", "PATCH", "DELETE"):
        answer = await preflight(served, PAGE, method)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert method in answer.headers["access-control-allow-methods"]
        assert "last-event-id" in answer.headers["access-control-allow-headers"]


async def test_a_preflight_of_another_origin_is_refused(serve: Serve):
    """Its answer allows nothing."""
    served = await serve(api_key="secret", cors_origins=PAGE)
    answer = await preflight(served, "https://evil.example")
    assert (answer.status, answer.headers.get("access-control-allow-origin")) == (400, None)


async def test_a_page_reads_a_stream_and_the_headers_to_resume_it(serve: Serve):
    """Refusals too: the script sees the status and when to come back."""
    served = await serve(Script(tokens=3), api_key="secret", cors_origins=PAGE)
    async with await served.open(chat(), headers={"origin": PAGE, **KEY}) as stream:
        events = [event async for event in stream.events()]
    assert events[-1].data == "[DONE]"
    assert stream.head.headers["access-control-allow-origin"] == PAGE
    exposed = stream.head.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after", "last-event-id", "x-ratelimit-reset-tokens"} <= set(exposed)
    assert set(exposed) == set(EXPOSED)
    refused = await served.call("GET", "/v1/models", origin=PAGE)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)


async def test_a_page_of_an_origin_that_is_not_listed_cannot_read(serve: Serve):
    """The request is served, as its key is good, and the browser keeps the answer from the script."""
    served = await serve(api_key="secret", cors_origins=PAGE)
    answer = await served.call("GET", "/v1/models", origin="https://evil.example", **KEY)
    assert (answer.status, answer.headers.get("access-control-allow-origin")) == (200, None)


async def test_in_open_mode_a_listed_origin_gives_no_right(serve: Serve):
    """A page of another machine has no key, and so it does not come in."""
    served = await serve(cors_origins=f"{PAGE},http://localhost:3000")
    assert (await served.call("GET", "/v1/models", origin=PAGE)).status == 403
    local = await served.call("GET", "/v1/models", origin="http://localhost:3000")
    assert (local.status, local.headers["access-control-allow-origin"]) == (200, "http://localhost:3000")


async def test_a_star_allows_every_origin(serve: Serve):
    """No cookie is ever taken, so the star gives no page the rights of its reader."""
    served = await serve(api_key="secret", cors_origins="*")
    answer = await served.call("GET", "/v1/models", origin=PAGE, **KEY)
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("text", "origins"),
    [("", ()), (" , ", ()), ("*", ("*",)), (f"{PAGE}, http://[::1]:80", (PAGE, "http://[::1]:80"))],
)
def test_origins_are_read_as_they_are_listed(text: str, origins: tuple[str, ...]):
    """White space and empty entries do not count."""
    assert parse_origins(text) == origins


@pytest.mark.parametrize(
    "text", ["chat.example.org", f"{PAGE}/", "*,https://a.example", "HTTPS://A.example", "null", "ftp://a"]
)
def test_what_no_browser_sends_as_an_origin_is_an_error_at_start(text: str):
    """It would never match, and nobody would learn why."""
    with pytest.raises(SettingsError, match="cors_origins"):
        parse_origins(text)
