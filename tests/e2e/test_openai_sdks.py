"""OpenAI's own SDKs against real servers: the pinned Python one, the newest, and Node's.

One list of cases; openai_sdk/driver.py and driver.mjs carry each out and say what they saw.
Heartbeats flow at 30 ms, while ids are on and the engine is slower than that.
"""

from __future__ import annotations

import pytest

from app.core import ChatRequest
from app.engine.scripted.engine import Script, scripted_text
from tests.support.sdks import FAST, WEATHER, Case, Sdk, Seen, refused, said
from tests.support.servers import Serve

SLOW = Script(prefill_s=0.07, rate=20, tokens=4)

WORDS = scripted_text(0, 0, 4)
TEXT = "".join(WORDS)
USAGE = {"include_usage": True}


class OnceFull:
    """The engine is full for the first request, and not after it."""

    def __init__(self) -> None:
        self.requests = 0

    def __call__(self, _request: ChatRequest) -> Script:
        self.requests += 1
        return Script(tokens=4, fault="overload" if self.requests == 1 else "")


def by_content(request: ChatRequest) -> Script:
    """The fault that the message names."""
    return Script(tokens=4, fault=request.body["messages"][0]["content"])


def called_tool(seen: Seen) -> bool:
    """One tool call after the text, put together."""
    call = ["get_weather", '{"city": "Paris"}']
    return seen["tools"] == [[call]] and seen["finish"] == ["tool_calls"] and seen["text"] == [TEXT]


TOOL = Script(prefill_s=0.07, rate=20, tokens=4, tool="get_weather")

SCRIPTED = [
    Case("one piece", "create", said(TEXT)),
    Case("usage in one piece", "create", lambda s: s["usage"] > 4),
    Case("streaming", "stream", said(TEXT), script=SLOW),
    Case("no usage unless asked", "stream", lambda s: s["usage"] is None),
    Case("usage in the stream", "stream", lambda s: s["usage"] > 4, {"stream_options": USAGE}, script=SLOW),
    Case("stop", "create", said(WORDS[0] + WORDS[1]), {"stop": [WORDS[2].strip()]}),
    Case("stop in the stream", "stream", said(WORDS[0] + WORDS[1]), {"stop": WORDS[2].strip()}, script=SLOW),
    Case("max_tokens", "stream", said(WORDS[0] + WORDS[1], finish="length"), {"max_tokens": 2}),
    Case("n=2", "create", lambda s: s["text"] == [TEXT, "".join(scripted_text(0, 1, 4))], {"n": 2}),
    Case(
        "n=2 in the stream",
        "stream",
        lambda s: s["text"] == [TEXT, "".join(scripted_text(0, 1, 4))] and s["finish"] == ["stop", "stop"],
        {"n": 2},
        script=SLOW,
    ),
    Case(
        "a tool call",
        "create",
        called_tool,
        {"tools": [WEATHER]},
        script=Script(tokens=4, tool="get_weather"),
    ),
    Case("a tool call in the stream", "stream", called_tool, {"tools": [WEATHER]}, script=TOOL),
    Case("the SDK's own accumulator", "stream_helper", said(TEXT), script=SLOW),
    Case("the accumulator, a tool call", "stream_helper", called_tool, {"tools": [WEATHER]}, script=TOOL),
    Case(
        "raw response",
        "raw",
        lambda s: s["status"] == 200 and s["request_id"] == s["sdk_request_id"] == s["id"],
    ),
    Case(
        "resume after a dropped connection",
        "resume",
        lambda s: (
            s["ids"] == [1, 2, 3, 4]
            and s["pings"] >= 2
            and s["text"] == ["".join(scripted_text(0, 0, 8)[3:])]
            and s["finish"] == ["stop"]
        ),
        script=Script(prefill_s=0.22, rate=6, tokens=8),
    ),
    Case(
        "models and stored completions",
        "objects",
        lambda s: s["models"] == ["scripted"] and s["model"] == "scripted" and s["text"] == [TEXT],
    ),
    refused("400", "BadRequestError", 400, "invalid_value", params={"max_tokens": 0}),
    refused("400 in a stream", "BadRequestError", 400, "invalid_value", params={"n": 0}, op="stream"),
    refused(
        "400, too long",
        "BadRequestError",
        400,
        "context_length_exceeded",
        params={"messages": [{"role": "user", "content": "a " * 33_000}]},
    ),
    refused("401", "AuthenticationError", 401, "invalid_api_key", settings={"api_key": "right"}),
    Case("a key", "stream", said(TEXT), settings={"api_key": "right"}, api_key="right"),
    refused("403", "PermissionDeniedError", 403, "forbidden", headers={"Origin": "https://evil.example"}),
    refused("404", "NotFoundError", 404, "model_not_found", params={"model": "gpt-4o"}),
    refused(
        "413",
        "APIStatusError",
        413,
        "body_too_large",
        params={"messages": [{"role": "user", "content": "a" * 5000}]},
        settings={"max_body_bytes": 4096},
    ),
    refused(
        "500",
        "InternalServerError",
        500,
        "engine_failed",
        script=by_content,
        params={"messages": [{"role": "user", "content": "fail"}]},
    ),
    refused(
        "503",
        "InternalServerError",
        503,
        "engine_overloaded",
        script=by_content,
        params={"messages": [{"role": "user", "content": "overload"}]},
    ),
    Case(
        "a stream that breaks",
        "broken_stream",
        lambda s: (s["error"], s["code"], s["text"]) == ("APIError", "engine_failed", [WORDS[0] + WORDS[1]]),
        script=Script(prefill_s=0.07, rate=20, tokens=4, fault="fail", fault_after=2),
    ),
]


# The first test of an SDK may have to install it.
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("case", SCRIPTED, ids=lambda case: case.name)
async def test_sdk(sdk: Sdk, serve: Serve, case: Case):
    """The SDK makes of each answer, stream and error what its users expect."""
    served = await serve(case.script, heartbeat_s=0.03, **case.settings)
    seen = await sdk.run(served.port, case)
    assert "crash" not in seen, (sdk.version, seen)
    assert case.check(seen), (sdk.version, seen)


async def test_conflict(sdk: Sdk, serve: Serve):
    """Another body under a used Idempotency-Key raises ConflictError at once: it is not tried again."""
    served = await serve(FAST)
    headers = {"Idempotency-Key": "used"}
    first = Case("first", "create", said(TEXT), headers=headers)
    assert first.check(await sdk.run(served.port, first))
    second = refused(
        "409",
        "ConflictError",
        409,
        "idempotency_key_reused",
        headers=headers,
        params={"max_tokens": 3},
        max_retries=2,
    )
    seen = await sdk.run(served.port, second)
    assert second.check(seen), (sdk.version, seen)
    assert len(served.logged("refused")) == 1


async def test_retry_after_is_kept(sdk: Sdk, serve: Serve):
    """On 503 the SDK waits the second that Retry-After asks for, tries again and succeeds."""
    engine = OnceFull()
    served = await serve(engine)
    case = Case("retry", "create", said(TEXT), max_retries=2)
    seen = await sdk.run(served.port, case)
    assert case.check(seen), (sdk.version, seen)
    assert engine.requests == 2
    assert seen["took_s"] >= 1.0, "by its own back-off it would have waited half a second"
