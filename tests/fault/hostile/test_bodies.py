"""Bodies made to cost: nobody else waits for them, and ordinary ones, however long, are answered."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from app.concurrency.owner_threads import LARGE_BYTES
from app.engine.scripted.engine import Script
from app.intake import bodies
from app.intake.body_budget import BodyBudget
from app.intake.json_body import parse_body
from tests.support.lateness import lateness
from tests.support.servers import Serve, ServerProcess, start_process
from tests.support.sse_client import Connection, Response, fetch, until

CHAT = "/v1/chat/completions"
SIZE = 31 * 1024 * 1024
LATE_S = 1.0
"""The bodies below kept the loop for 1.3 to 5 s; a machine that is busy with other tests takes its time."""

HELLO: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}


def repeated(opening: bytes, item: bytes, closing: bytes, separator: bytes = b",") -> bytes:
    """`opening`, as many items as make a body of `SIZE`, `closing`."""
    times = SIZE // (len(item) + len(separator))
    return opening + separator.join([item] * times) + closing


HEAD = json.dumps(HELLO).encode()[:-1]
BODIES: dict[str, tuple[bytes, tuple[int, str]]] = {
    "empty objects": (repeated(HEAD + b', "metadata": {"a": [', b"{}", b"]}}"), (400, "too_many_values")),
    "empty arrays": (repeated(HEAD + b', "tools": [', b"[]", b"]}"), (400, "too_many_values")),
    "numbers": (repeated(HEAD + b', "stop_token_ids": [', b"1", b"]}"), (400, "too_many_values")),
    "empty strings": (repeated(HEAD + b', "stop": [', b'""', b"]}"), (400, "too_many_values")),
    "names": (
        HEAD + b', "logit_bias": {' + b",".join(b'"%d":1' % i for i in range(2_000_000)) + b"}}",
        (400, "too_many_values"),
    ),
    "tiny messages": (
        repeated(b'{"model": "scripted", "messages": [', b'{"role":"user","content":""}', b"]}"),
        (400, "too_many_values"),
    ),
    "structure behind escaped quotes": (
        repeated(HEAD + b', "user": "\\\\\\"[{,", "metadata": {"a": [', b"{}", b"]}}"),
        (400, "too_many_values"),
    ),
    "a name of a parameter": (
        HEAD + b', "' + b"\\u0007" * (SIZE // 6) + b'": 1}',
        (400, "unknown_parameter"),
    ),
    "a model's name": (b'{"model": "' + b"m" * SIZE + b'", "messages": []}', (400, "invalid_value")),
    "not JSON in its last byte": (
        HEAD + b', "user": "' + b"u" * SIZE + b'"]',
        (400, "invalid_json"),
    ),
    "not UTF-8 in its last byte": (
        HEAD + b', "user": "' + b"u" * SIZE + b'\xff"}',
        (400, "invalid_encoding"),
    ),
    "white space": (HEAD + b" " * SIZE + b', "nonsense": 1}', (400, "unknown_parameter")),
}


@pytest.fixture(scope="module")
async def big_server(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: Any
) -> AsyncIterator[ServerProcess]:
    """A server that takes bodies of 32 MiB, and a context that they fit."""
    script = ("--engine", "scripted", "--scripted", "tokens=2,context=20000000,pool=40000000")
    flags = (*script, "--safety", "off", "--max-body-bytes", str(32 * 1024**2))
    server = await start_process(tmp_path_factory.mktemp("big"), *flags)
    await server.ready()
    yield server
    await server.close()


async def post(port: int, raw: bytes, **headers: str) -> Response:
    """POST a chat request."""
    return await fetch(port, "POST", CHAT, raw, headers)


@pytest.mark.timed
async def test_no_body_stalls_the_others(big_server: ServerProcess):
    """Whatever 31 MB hold, they are refused by name, and `/healthz` answers meanwhile."""
    port = await big_server.port()
    late = {}
    for name, (raw, refusal) in BODIES.items():
        async with lateness(big_server) as measured:
            answer = await post(port, raw)
        assert answer.refusal()[:2] == refusal, name
        late[name] = measured.longest_s
    assert all(late_s < LATE_S for late_s in late.values()), late


@pytest.mark.timed
@pytest.mark.parametrize("letter", ["a", "é", "中", '"', "\\", "\x07"], ids=ascii)
async def test_a_long_text_stalls_nobody(big_server: ServerProcess, letter: str):
    """One string of 31 MB in whatever letters is answered, and `/healthz` meanwhile."""
    port = await big_server.port()
    encoded = json.dumps(letter).encode()[1:-1]
    content = b'"' + encoded * (SIZE // len(encoded)) + b'"'
    raw = b'{"model": "scripted", "messages": [{"role": "user", "content": ' + content + b"}]}"
    async with lateness(big_server) as measured:
        answer = await post(port, raw, **{"idempotency-key": ascii(letter)})
    assert answer.status in (200, 400), answer.body
    assert measured.longest_s < LATE_S


async def test_text_full_of_brackets_is_text(serve: Serve):
    """A pasted JSON document of 400,000 brackets and commas, escaped as strings are, is one value."""
    served = await serve(Script(tokens=2, context=10**6, pool=10**7))
    document = json.dumps([{"a": [1, 2, '"quoted"', "back\\slash"]}] * 100_000)
    answer = await served.post({**HELLO, "messages": [{"role": "user", "content": document}]})
    assert answer.status == 200, answer.body


async def test_ordinary_large_requests_are_answered(serve: Serve):
    """A thousand turns, 2 MB of text, 128 tools, and as many biases as OpenAI takes are no attack."""
    served = await serve(Script(tokens=2, context=2 * 10**6, pool=10**7))
    turns = [
        message
        for i in range(1000)
        for message in ({"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"})
    ]
    properties = {f"p{i}": {"type": "string", "enum": ["a", "b", "c"]} for i in range(40)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    for parameters in (
        {"messages": [*turns, {"role": "user", "content": "and?"}]},
        {"messages": [{"role": "user", "content": "A sentence of a report. " * 90_000}]},
        {"tools": [{"type": "function", "function": function}] * 128},
        {"logit_bias": {str(i): 1 for i in range(1024)}},
        {"metadata": {f"{i:064d}": "v" * 512 for i in range(16)}, "user": "u" * 500},
    ):
        answer = await served.post(HELLO | parameters)
        assert answer.status == 200, answer.body


async def test_the_limit_fits_the_model(serve: Serve):
    """Unless it is set, a body may be as large as a text that fits the context."""
    served = await serve(Script(tokens=2, context=1000))
    large = {**HELLO, "messages": [{"role": "user", "content": "x" * (1024**2 + 16_000)}]}
    assert (await served.post(large)).refusal() == (413, "body_too_large", None)
    served = await serve(Script(tokens=2, context=10**6))
    assert (await served.post(large)).status == 200
    served = await serve(Script(tokens=2, context=1000), max_body_bytes=2 * 1024**2)
    assert (await served.post(large)).status != 413


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/admin/keys"), ("PATCH", "/api/admin/keys/x"), ("PATCH", "/api/conversations/x")],
)
async def test_small_routes_read_small_bodies(serve: Serve, method: str, path: str):
    """A route that takes names and numbers reads 64 KiB at most, told or not how much comes."""
    served = await serve(Script(context=10**6))
    raw = b'{"title": "' + b"t" * 100_000 + b'"}'
    assert (await served.call(method, path, raw)).refusal() == (413, "body_too_large", None)
    async with await Connection.to(served.port) as connection:
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        await connection.send(head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(raw), raw))
        assert (await connection.response()).refusal() == (413, "body_too_large", None)


async def test_moderation_takes_its_million_letters(serve: Serve):
    """The body limit of moderations is above what they take, in JSON's ASCII too."""
    served = await serve(Script(context=1000), max_body_bytes=32 * 1024**2)
    raw = json.dumps({"input": "中" * 1_000_000}).encode()
    answer = await served.call("POST", "/v1/moderations", raw)
    assert answer.refusal()[1] == "safety_unavailable"


async def unfinished(port: int, size_bytes: int, sent_bytes: int) -> Connection:
    """A request that has said how long its body is, and sent a part of it."""
    connection = await Connection.to(port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size_bytes}\r\n\r\n"
    await connection.send(head.encode() + b" " * sent_bytes)
    return connection


async def test_bodies_in_flight_have_a_budget(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """A caller's large bodies get half of the memory; small ones pass, and large ones once it is free."""
    mb = 1024**2
    budget = BodyBudget(10 * mb)
    monkeypatch.setattr("app.api.app.BodyBudget", lambda _size: budget)
    served = await serve(Script(tokens=1), max_body_bytes=4 * mb, body_memory_bytes=10 * mb)
    waiting = [await unfinished(served.port, 2 * mb, 100) for _ in range(2)]
    large = {**HELLO, "messages": [{"role": "user", "content": "x" * 2 * mb}]}
    try:
        await until(lambda: budget.held_bytes == 4 * mb)
        refused = await served.post(large)
        assert refused.refusal() == (503, "too_many_bodies", None)
        assert int(refused.headers["retry-after"]) > 0
        assert (await served.post(HELLO)).status == 200
    finally:
        for connection in waiting:
            connection.close()
    monkeypatch.setattr("app.intake.body_budget.WAIT_S", 50.0)  # however slow the machine reads them
    answers = [served.post(large) for _ in range(8)]
    assert {answer.status for answer in await asyncio.gather(*answers)} == {200}, (
        "each waits for those before it"
    )
    await until(lambda: not served.live())


async def test_large_bodies_are_parsed_one_at_a_time(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """Parsers hold the interpreter's lock: the loop waits for one, however many bodies have arrived."""
    lock, running = threading.Lock(), 0
    seen: list[int] = []

    def parse(raw: bytes) -> dict[str, Any]:
        nonlocal running
        with lock:
            running += 1
            seen.append(running)
        try:
            return parse_body(raw)
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(bodies, "parse_body", parse)
    served = await serve(Script())
    raw = b'{"model": "scripted", "messages": [], ' + b",".join(b'"k%d":1' % i for i in range(50_000)) + b"}"
    answers = await asyncio.gather(*(post(served.port, raw) for _ in range(12)))
    assert {answer.status for answer in answers} == {400}
    assert seen == [1] * 12


@pytest.mark.parametrize(
    ("path", "function"),
    [
        (CHAT, "app.api.routes.endpoints.parse_chat_request"),
        (CHAT, "app.safety.session.screened.read_request"),
        (CHAT, "app.safety.session.screened.conversation_of"),
        ("/tokenize", "app.api.routes.tokens.parse_chat_request"),
        ("/v1/completions", "app.api.routes.endpoints.parse_completion"),
        ("/v1/moderations", "app.api.routes.moderations.parse_moderation"),
    ],
)
async def test_a_large_request_is_taken_apart_beside_the_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, function: str
):
    """Whatever grows with a request's messages, calls and texts runs in a thread, and of a small one here."""
    module, _, name = function.rpartition(".")
    original, threads = getattr(importlib.import_module(module), name), []

    def noting(*arguments: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return original(*arguments, **named)

    monkeypatch.setattr(function, noting)
    served = await serve(Script(), safety="on")

    async def unavailable(*_: Any, **__: Any) -> None:
        """A guard that cannot judge now."""

    monkeypatch.setattr(served.runtime.safety, "guard", lambda: SimpleNamespace(judge=unavailable))
    for text in ("hello", "hello " * (LARGE_BYTES // 6)):
        sent = {"/v1/completions": {"prompt": text}, "/v1/moderations": {"input": text}}
        messages = {"messages": [{"role": "user", "content": text}]}
        assert (await fetch(served.port, "POST", path, sent.get(path, messages))).status == 200
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


async def test_callers_take_turns_with_large_bodies():
    """Who sends one large body waits for one of another caller's, not for all of them."""
    budget = BodyBudget(1)
    order: list[str] = []

    async def parsed(owner: str) -> None:
        async with budget.parse_slot(owner):
            order.append(owner)
            await asyncio.sleep(0)

    await asyncio.gather(*(parsed("ann") for _ in range(9)), parsed("bob"))
    assert order.index("bob") <= 2
