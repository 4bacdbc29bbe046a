"""Several requests on one connection, one after another and pipelined, around a stream."""

from __future__ import annotations

from app.engine.scripted.engine import Script, scripted_text
from tests.support.servers import Serve, chat
from tests.support.sse_client import Connection, Stream, request_bytes

PATH = "/api/chat/completions"
TEXT = "".join(scripted_text(0, 0, 30))


async def test_connection_is_reusable_after_a_stream(serve: Serve):
    """After [DONE] the same connection serves the next request, and the next stream."""
    served = await serve(Script(tokens=30))
    async with await Connection.to(served.port) as connection:
        for _ in range(3):
            await connection.request("POST", PATH, chat())
            transcript = await Stream(connection, await connection.head()).to_end()
            assert transcript.content() == TEXT
            await connection.request("GET", "/healthz")
            assert (await connection.response()).status == 200
        assert len(served.connections) == 1


async def test_pipelined_requests_are_answered_in_order(serve: Serve):
    """Requests sent in one piece, a stream among them, are answered one after another."""
    served = await serve(Script(tokens=30, rate=300))
    async with await Connection.to(served.port) as connection:
        requests = [
            request_bytes("GET", "/healthz"),
            request_bytes("POST", PATH, chat()),
            request_bytes("POST", PATH, chat(stream=False)),
            request_bytes("GET", "/readyz"),
        ]
        await connection.send(b"".join(requests))
        assert (await connection.response()).json() == {"status": "alive"}
        transcript = await Stream(connection, await connection.head()).to_end()
        assert transcript.content() == TEXT
        answer = await connection.response()
        assert answer.json()["choices"][0]["message"]["content"] == TEXT
        assert (await connection.response()).json()["status"] == "ready"


async def test_request_sent_during_a_stream_does_not_disturb_it(serve: Serve):
    """A second request that arrives while a stream runs waits for its turn."""
    served = await serve(Script(tokens=30, rate=100))
    async with await Connection.to(served.port) as connection:
        await connection.request("POST", PATH, chat())
        stream = Stream(connection, await connection.head())
        await stream.read_events(3)
        await connection.request("GET", "/healthz")
        transcript = await stream.to_end()
        assert transcript.content() == TEXT
        assert (await connection.response()).json() == {"status": "alive"}


async def test_refused_body_leaves_the_connection_usable(serve: Serve):
    """A 413 told from the header alone reads past the body and serves the next request."""
    served = await serve(Script(tokens=5), max_body_bytes=1024)
    async with await Connection.to(served.port) as connection:
        await connection.request("POST", PATH, chat("x" * 4000))
        assert (await connection.response()).refusal() == (413, "body_too_large", None)
        await connection.request("POST", PATH, chat(stream=False))
        assert (await connection.response()).status == 200


async def test_spaces_around_the_value_of_a_header_are_no_part_of_it(serve: Serve):
    """RFC 9110, section 5.5: a stream is resumed after event 3."""
    served = await serve(Script(tokens=30))
    first = await served.open(chat())
    await first.to_end()
    async with await served.open(stream_id=first.id, after=3) as again:
        rest = (await again.to_end()).content()
    async with await Connection.to(served.port) as connection:
        await connection.request("GET", f"{PATH}/{first.id}", headers={"last-event-id": " 3 \t"})
        assert (await Stream(connection, await connection.head()).to_end()).content() == rest != TEXT
