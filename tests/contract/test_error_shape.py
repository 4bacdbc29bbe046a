"""Every bad input over a real socket: status, code, param, one body, and nothing of it in the log."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.api.schema.parameters import PARAMETERS
from app.core import ChatRequest
from app.engine.scripted.engine import Script
from app.errors import CODES
from tests.support.servers import Serve, ServerProcess, Spawn, chat, start_process
from tests.support.sse_client import Connection, Response, fetch, open_stream, request_bytes

CANARY = "canary-7f3a"
CHAT = "/v1/chat/completions"
MAX_BODY_BYTES = 256 * 1024
KEYED = {"idempotency-key": CANARY}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def body(content: Any = CANARY, **parameters: Any) -> dict[str, Any]:
    """A good request, less what `parameters` spoil; None takes a parameter out."""
    request = {"model": "scripted", "messages": [{"role": "user", "content": content}]} | parameters
    return {name: value for name, value in request.items() if value is not None}


def message(**fields: Any) -> dict[str, Any]:
    """A request with this one message."""
    return body(messages=[fields])


def nested(levels: int) -> bytes:
    """A body whose `metadata` nests arrays so deeply that the whole has `levels` levels."""
    inner = "[" * (levels - 1) + "]" * (levels - 1)
    return json.dumps(body()).removesuffix("}").encode() + f', "metadata": {inner}}}'.encode()


@dataclass(frozen=True)
class Bad:
    """A bad input and the refusal it must meet."""

    name: str
    status: int
    code: str
    param: str | None = None
    body: Any = None
    method: str = "POST"
    path: str = CHAT
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    """The whole request as bytes, instead of the fields above."""

    async def send(self, port: int) -> Response:
        """The server's answer."""
        if self.raw is None:
            return await fetch(port, self.method, self.path, self.body, self.headers)
        async with await Connection.to(port) as connection:
            await connection.send(self.raw)
            return await connection.response()


def invalid(name: str, param: str, code: str = "invalid_value", **parameters: Any) -> Bad:
    """A request with a parameter that cannot be."""
    return Bad(name, 400, code, param, body(**parameters))


BODIES = [
    Bad("broken JSON", 400, "invalid_json", body=b'{"model": "scripted", "' + CANARY.encode()),
    Bad("empty body", 400, "invalid_json", body=b""),
    Bad("an array", 400, "invalid_json", body=b"[1, 2]"),
    Bad("NaN", 400, "invalid_json", body=b'{"model": "scripted", "temperature": NaN}'),
    Bad("half a surrogate pair", 400, "invalid_json", body=b'{"model": "\\ud800"}'),
    Bad("not UTF-8", 400, "invalid_encoding", body=b'{"model": "\xff' + CANARY.encode() + b'"}'),
    Bad("65 levels", 400, "nesting_too_deep", body=nested(65)),
    Bad("nesting bomb", 400, "nesting_too_deep", body=nested(60_000)),
    Bad("nesting bomb, unfinished", 400, "nesting_too_deep", body=b"[" * 200_000),
    Bad("declared too large", 413, "body_too_large", headers={"content-length": str(10**12)}),
    Bad(
        "chunked too large",
        413,
        "body_too_large",
        raw=f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        + (b"8000\r\n" + b"a" * 0x8000 + b"\r\n") * 9
        + b"0\r\n\r\n",
    ),
]

PARAMS = [
    Bad("unknown model", 404, "model_not_found", "model", body(model="gpt-4o")),
    invalid("model is a number", "model", "invalid_type", model=5),
    invalid("no messages", "messages", "missing_parameter", messages=None),
    invalid("empty messages", "messages", messages=[]),
    invalid("messages is a string", "messages", "invalid_type", messages=CANARY),
    invalid("a message is a string", "messages[0]", "invalid_type", messages=[CANARY]),
    Bad("unknown role", 400, "invalid_role", "messages[0].role", message(role="narrator", content=CANARY)),
    Bad("no role", 400, "invalid_role", "messages[0].role", message(content=CANARY)),
    Bad("role is an object", 400, "invalid_role", "messages[0].role", message(role={}, content=CANARY)),
    Bad("no content", 400, "missing_parameter", "messages[0].content", message(role="user")),
    invalid("content is a number", "messages[0].content", "invalid_type", content=5),
    invalid("a part is a string", "messages[0].content[0]", "invalid_type", content=[CANARY]),
    invalid("a part has no type", "messages[0].content[0].type", "invalid_type", content=[{}]),
    invalid("an image for a text model", "messages[0].content[0]", "unsupported_content", content=[IMAGE]),
    invalid("audio", "messages[0].content[0]", "unsupported_content", content=[{"type": "input_audio"}]),
    invalid("a prompt too long", "messages", "context_length_exceeded", content="a " * 33_000),
    invalid("an answer too long", "messages", "context_length_exceeded", max_tokens=32_768),
    invalid("max_tokens 0", "max_tokens", max_tokens=0),
    invalid("max_tokens negative", "max_tokens", max_tokens=-5),
    invalid("max_tokens a fraction", "max_tokens", "invalid_type", max_tokens=1.5),
    invalid("max_tokens a string", "max_tokens", "invalid_type", max_tokens="5"),
    invalid("max_tokens beyond 64 bits", "max_tokens", "invalid_type", max_tokens=2**70),
    invalid("max_completion_tokens 0", "max_completion_tokens", max_completion_tokens=0),
    invalid("two limits", "max_completion_tokens", max_tokens=5, max_completion_tokens=6),
    invalid("temperature too high", "temperature", temperature=2.5),
    invalid("temperature a string", "temperature", "invalid_type", temperature="hot"),
    invalid("n is true", "n", "invalid_type", n=True),
    invalid("n too high", "n", n=1000),
    invalid("stream is a string", "stream", "invalid_type", stream="yes"),
    invalid("stop holds a number", "stop[0]", "invalid_type", stop=[5]),
    invalid("too many stops", "stop", stop=["a"] * 17),
    invalid("an empty stop", "stop", stop=""),
    invalid("an empty stop among others", "stop[1]", stop=["a", ""]),
    invalid("a stop too long", "stop", stop="a" * 1001),
    invalid("a stop token that is none", "stop_token_ids[0]", stop_token_ids=[-1]),
    invalid("a stop token that is a word", "stop_token_ids[1]", "invalid_type", stop_token_ids=[1, "a"]),
    invalid("a bias for a word", "logit_bias", logit_bias={"hello": 1}),
    invalid("a bias too large", "logit_bias.5", logit_bias={"5": 1e30}),
    invalid("a bias that is a word", "logit_bias.5", "invalid_type", logit_bias={"5": "high"}),
    invalid("top_k beyond 32 bits", "top_k", top_k=2**40),
    invalid("a penalty that overflows", "repetition_penalty", repetition_penalty=1e-40),
    invalid("a seed beyond 64 bits", "seed", seed=2**63),
    invalid("top_logprobs alone", "top_logprobs", top_logprobs=2),
    invalid("stream_options alone", "stream_options", stream_options={"include_usage": True}),
    Bad(
        "unknown stream option",
        400,
        "unsupported_parameter",
        "stream_options.include_everything",
        body(stream=True, stream_options={"include_everything": True}),
    ),
    invalid("unknown parameter", "max_words", "unknown_parameter", max_words=5),
    *(
        invalid(f"refused: {name}", name, "unsupported_parameter", **{name: CANARY})
        for name, parameter in PARAMETERS.items()
        if parameter.refusal is not None
    ),
]

ROUTES = [
    Bad("unknown route", 404, "route_not_found", method="GET", path="/v1/embeddings"),
    Bad("two slashes at the end", 404, "route_not_found", body=body(), path=CHAT + "//"),
    Bad("wrong method", 405, "method_not_allowed", method="GET", path=CHAT),
    Bad("OPTIONS", 405, "method_not_allowed", method="OPTIONS", path=CHAT),
    Bad("PATCH on a stream", 405, "method_not_allowed", method="PATCH", path=CHAT + "/x"),
    Bad("unknown stream", 404, "stream_not_found", method="GET", path=CHAT + "/chatcmpl-x"),
    Bad("stopping an unknown stream", 404, "stream_not_found", path=CHAT + "/chatcmpl-x/cancel"),
    Bad("unknown model by id", 404, "model_not_found", "model", method="GET", path="/v1/models/gpt-4o"),
    Bad(
        "position is no number",
        400,
        "invalid_last_event_id",
        "Last-Event-ID",
        chat(CANARY),
        headers={"last-event-id": "x"},
    ),
]

CALLER = [
    Bad("foreign Host", 403, "forbidden", body=body(), headers={"host": "rebound.example"}),
    Bad("unreadable Host", 400, "invalid_http", body=body(), headers={"host": "["}),
    Bad("foreign Origin", 403, "forbidden", body=body(), headers={"origin": "https://evil.example"}),
    Bad("opaque Origin", 403, "forbidden", body=body(), headers={"origin": "null"}),
    Bad("empty key", 400, "invalid_value", "Idempotency-Key", body(), headers={"idempotency-key": ""}),
    Bad("long key", 400, "invalid_value", "Idempotency-Key", body(), headers={"idempotency-key": "k" * 256}),
    Bad(
        "two bodies, one key",
        409,
        "idempotency_key_reused",
        "Idempotency-Key",
        body(CANARY + " and another body"),
        headers=KEYED,
    ),
]

HTTP = [
    Bad("garbage", 400, "invalid_http", raw=CANARY.encode() + b"\r\n\r\n"),
    Bad("TLS", 400, "invalid_http", raw=bytes.fromhex("16030100a5010000a10303") + b"\x00" * 30),
    Bad("a path in Latin-1", 400, "invalid_http", raw=b"GET /caf\xe9 HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    Bad(
        "a chunk without a size",
        400,
        "invalid_http",
        raw=f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n".encode(),
    ),
    Bad(
        "two lengths",
        400,
        "invalid_http",
        raw=request_bytes("POST", CHAT, body(), {"content-length": "5", "Content-Length": "6"}),
    ),
    Bad(
        "one endless header",
        431,
        "headers_too_large",
        raw=b"GET /healthz HTTP/1.1\r\nx-long: " + b"a" * 1_000_000,
    ),
    Bad(
        "many headers",
        431,
        "headers_too_large",
        raw=request_bytes("GET", "/healthz", None, {f"x-{i}": "a" * 100 for i in range(700)}),
    ),
    Bad("a long URL", 431, "headers_too_large", raw=request_bytes("GET", "/healthz?" + "a" * 70_000)),
]

BAD = [*BODIES, *PARAMS, *ROUTES, *CALLER, *HTTP]
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    500: "server_error",
    503: "server_error",
}


def check_shape(answer: Response) -> None:
    """The one body that every error has, with a code that is documented for its status."""
    assert answer.headers["content-type"] == "application/json"
    error = answer.error()
    assert error["type"] == TYPES.get(answer.status, "invalid_request_error")
    assert CODES[error["code"]].status == answer.status
    assert error["message"].endswith((".", ")"))
    assert "Traceback" not in answer.body.decode()
    assert ("retry-after" in answer.headers) == (answer.status == 503)
    if error["code"] not in ("invalid_http", "headers_too_large"):
        assert answer.headers["x-request-id"].startswith(("req_", "chatcmpl-"))
    assert ("x-should-retry" in answer.headers) == (answer.status == 409)


async def use_the_key(port: int) -> None:
    """Take the idempotency key that one of the cases uses again."""
    assert (await fetch(port, "POST", CHAT, body(), KEYED)).status == 200


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerProcess]:
    """One server process, which outlives every bad input of this module."""
    flags = ("--engine", "scripted", "--scripted", "tokens=2", "--max-body-bytes", str(MAX_BODY_BYTES))
    process = await start_process(tmp_path_factory.mktemp("server"), *flags)
    await use_the_key(await process.ready())
    yield process
    await process.close()


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
async def test_bad_input_is_refused(server: ServerProcess, bad: Bad):
    """Status, code and param are as listed, and the server goes on serving."""
    port = await server.port()
    answer = await bad.send(port)
    assert answer.refusal() == (bad.status, bad.code, bad.param)
    check_shape(answer)
    assert (await fetch(port, "GET", "/healthz")).status == 200


async def test_nothing_of_a_bad_input_is_logged(spawn: Spawn):
    """After every bad input the log holds no traceback, no word of a body, and nothing unstructured."""
    process = await spawn("tokens=2", "--max-body-bytes", str(MAX_BODY_BYTES), "--log-level", "debug")
    port = await process.ready()
    await use_the_key(port)
    for bad in BAD:
        await bad.send(port)
    process.terminate()
    assert await process.exit_status() == 0
    written = json.dumps(process.log) + "".join(process.noise)
    assert process.noise == []
    assert CANARY not in written
    assert "Traceback" not in written
    assert {line["level"] for line in process.log} <= {"info", "warning"}


async def test_each_refusal_is_one_log_line(serve: Serve):
    """A refused request is logged once, under the id it was answered with, with its code."""
    served = await serve(Script(tokens=2))
    unknown = await served.call("GET", CHAT + "/" + CANARY)
    invalid_value = await served.post(body(max_tokens=0))
    overflow = await served.post(body("a " * 33_000))
    lines = [line for line in served.log if "request_id" in line]
    assert [(line["request_id"], line["error"]) for line in lines] == [
        (unknown.headers["x-request-id"], "stream_not_found"),
        (invalid_value.headers["x-request-id"], "invalid_value"),
        (overflow.headers["x-request-id"], "context_length_exceeded"),
    ]
    assert [line["event"] for line in lines] == ["refused", "refused", "request"]
    assert lines[0]["route"] == CHAT + "/{id}"


async def test_overflow_says_by_how_much(server: ServerProcess):
    """A prompt that does not fit is told the limit, its own size and the excess, in tokens."""
    answer = await fetch(await server.port(), "POST", CHAT, body("a " * 33_000))
    message = answer.error()["message"]
    # One token per word and one for the role; the answer needs room for one.
    for number in ("32768", "33001", "234"):
        assert number in message


async def test_overlong_values_are_not_echoed(server: ServerProcess):
    """An error message stays short, however long the value that it is about."""
    port = await server.port()
    for spoiled in ({"model": "m" * 50_000}, {"x" * 50_000: 1}, {"messages": [{"role": "r" * 50_000}]}):
        answer = await fetch(port, "POST", CHAT, body() | spoiled)
        assert answer.status in (400, 404)
        assert len(answer.body) < 1000
    assert len((await fetch(port, "GET", "/" + "p" * 50_000)).body) < 1000
    assert len((await fetch(port, "GET", CHAT + "/" + "p" * 50_000)).body) < 1000


async def test_wrong_method_names_the_right_ones(server: ServerProcess):
    """405 lists every method that the path has, over all of its routes."""
    answer = await fetch(await server.port(), "OPTIONS", CHAT + "/chatcmpl-x")
    assert answer.headers["allow"] == "DELETE, GET, HEAD"


async def test_head_has_the_status_and_no_body(server: ServerProcess):
    """HEAD answers as GET does, without the body."""
    async with await Connection.to(await server.port()) as connection:
        for path, status in ((CHAT, 405), ("/v1/models", 200), ("/healthz", 200), (CHAT + "/x", 404)):
            await connection.request("HEAD", path)
            assert (await connection.head()).status == status


async def test_keys(serve: Serve):
    """With an API key set, every chat and model route wants it, and a probe does not."""
    served = await serve(Script(tokens=2), api_key="the-key")
    missing, wrong = (401, "missing_api_key", None), (401, "invalid_api_key", None)
    for method, path in (("POST", CHAT), ("GET", CHAT + "/x"), ("GET", "/v1/models"), ("GET", "/api/models")):
        answers = [
            await served.call(method, path, **headers)
            for headers in ({}, {"authorization": "Basic the-key"}, {"authorization": "Bearer other"})
        ]
        assert [a.refusal() for a in answers] == [missing, missing, wrong]
        for answer in answers:
            check_shape(answer)
            assert answer.headers["www-authenticate"] == "Bearer"
    assert (await served.call("GET", "/healthz")).status == 200
    assert (await served.post(body(), authorization="Bearer the-key")).status == 200


async def test_starting(spawn: Spawn):
    """While the engine starts, the process is alive, not ready, and chat is 503 with Retry-After."""
    process = await spawn("start_s=60")
    port = await process.port()
    assert (await fetch(port, "GET", "/healthz")).status == 200
    ready = await fetch(port, "GET", "/readyz")
    assert (ready.status, ready.json()["status"]) == (503, "not_ready")
    assert ready.json()["phase"].startswith("starting")
    answer = await fetch(port, "POST", CHAT, body())
    assert answer.refusal() == (503, "engine_not_ready", None)
    check_shape(answer)


async def test_full(serve: Serve):
    """Over max_live_streams a request is 503 with Retry-After."""
    served = await serve(Script(tokens=1000, rate=50), max_live_streams=1)
    async with await served.open(chat()):
        answer = await served.post(body())
    assert answer.refusal() == (503, "too_many_streams", None)
    check_shape(answer)


async def test_draining(serve: Serve):
    """Once the server stops, a request is 503 with Retry-After."""
    served = await serve(Script(tokens=2))
    await served.runtime.streams.drain(0)
    answer = await served.post(body())
    assert answer.refusal() == (503, "draining", None)
    check_shape(answer)


async def test_engine_faults_before_an_answer_in_one_piece(serve: Serve):
    """A full engine is 503 with Retry-After, a broken one 500, each by its own code."""
    served = await serve(lambda r: Script(fault=r.body["messages"][0]["content"]))
    full = await served.post(body("overload"))
    assert full.refusal() == (503, "engine_overloaded", None)
    broken = await served.post(body("fail"))
    assert broken.refusal() == (500, "engine_failed", None)
    for answer in (full, broken):
        check_shape(answer)


async def test_a_body_that_does_not_come(serve: Serve):
    """A body that stops arriving is refused after body_timeout_s."""
    served = await serve(Script(), body_timeout_s=0.1)
    async with await Connection.to(served.port) as connection:
        await connection.send(request_bytes("POST", CHAT, b'{"model": ', {"content-length": "1000"}))
        answer = await connection.response()
    assert answer.refusal() == (400, "body_timeout", None)
    check_shape(answer)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nhost: local", b"POST"])
async def test_a_head_that_does_not_come(serve: Serve, monkeypatch: pytest.MonkeyPatch, sent: bytes):
    """A connection whose request never gets past its head is closed after HEAD_TIMEOUT_S."""
    monkeypatch.setattr("app.api.http.protocol.HEAD_TIMEOUT_S", 0.1)
    served = await serve(Script(tokens=20, rate=50))
    async with await served.open(chat()) as slow, await Connection.to(served.port) as connection:
        await connection.send(sent)
        assert await connection.read() == b""
        assert (await slow.to_end()).done, "a stream may take longer than a head"


async def test_our_own_faults(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """An exception nobody foresaw is a clean 500, logged by its place and not by its words."""

    def broken(request: ChatRequest) -> Script:
        raise RuntimeError(CANARY)

    served = await serve(broken)
    answers = [await served.post(body()), await served.post(chat())]
    monkeypatch.setattr(served.runtime.backends, "allowed", broken)
    answers.append(await served.post(body()))
    for answer in answers:
        assert answer.refusal() == (500, "internal_error", None)
        check_shape(answer)
        assert CANARY not in answer.body.decode()
    events = [line["event"] for line in served.log if line["log_level"] == "error"]
    assert {"pipeline_broke", "request_broke"} <= set(events)
    assert CANARY not in json.dumps(served.log)


async def test_errors_after_the_first_byte_have_the_same_body(serve: Serve):
    """The error event of a broken stream holds the body that a status would have had."""
    served = await serve(Script(tokens=9, fault="fail", fault_after=3))
    async with await open_stream(served.port, chat()) as stream:
        transcript = await stream.to_end()
    (error,) = transcript.errors
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == ("engine_failed", "server_error")
