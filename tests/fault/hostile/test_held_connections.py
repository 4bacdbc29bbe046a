"""Connections that are held open for nothing: each has an end, and others find room meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable

import pytest

from app.engine.scripted.engine import Script
from tests.support.servers import Serve, ServerProcess, Spawn, chat
from tests.support.sse_client import Connection, fetch, request_bytes, until

CHAT = "/v1/chat/completions"
BODY_TO_COME = "content-length: 100000\r\n\r\n"
FOREVER_S = 20.0
"""Far more than any deadline of this file; without them a connection stays for ever."""


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, deadlines of a fifth of a second."""

    def shorten() -> None:
        for name in ("HEAD_TIMEOUT_S", "DRAIN_S"):
            monkeypatch.setattr(f"app.api.http.protocol.{name}", 0.2)

    return shorten


async def drip(connection: Connection, piece: bytes = b"x") -> None:
    """Send a piece now and then, until the server has closed."""
    async with asyncio.timeout(FOREVER_S):
        while True:
            try:
                await connection.send(piece)
            except (ConnectionResetError, BrokenPipeError):
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (401, f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{BODY_TO_COME}"),
        (404, f"POST /nowhere HTTP/1.1\r\nhost: x\r\n{BODY_TO_COME}"),
        (405, f"PUT {CHAT} HTTP/1.1\r\nhost: x\r\n{BODY_TO_COME}"),
        (
            413,
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-length: 99999999\r\n\r\n",
        ),
        (200, f"GET /healthz HTTP/1.1\r\nhost: x\r\n{BODY_TO_COME}"),
        (401, f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"),
    ],
)
async def test_a_body_that_nobody_reads_ends(serve: Serve, hurry: Callable[[], None], status: int, head: str):
    """After an answer, the rest of the body is read past for a moment, however it drips, and no longer."""
    served = await serve(Script(), api_key="k")
    piece = b"1\r\nx\r\n" if "chunked" in head else b"x"
    async with await Connection.to(served.port) as connection:
        hurry()
        await connection.send(head.encode() + piece)
        assert (await connection.response()).status == status
        await drip(connection, piece)
    await until(lambda: not served.connections)


async def test_the_rest_of_a_body_in_time_keeps_the_connection(serve: Serve):
    """A client that sends the whole body of a refused request may send another one."""
    served = await serve(Script(), api_key="k")
    async with await Connection.to(served.port) as connection:
        for _ in range(3):
            await connection.send(
                f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc".encode()
            )
            assert (await connection.response()).status == 401
            await connection.send(b"defghij")
            await connection.request("GET", "/healthz")
            assert (await connection.response()).status == 200


@pytest.mark.parametrize(
    "piece",
    [b"\r\n", b"GET / HTTP/1.1\r\n", b"G"],
    ids=["blank lines", "headers", "letters"],
)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "after an answer"])
async def test_a_head_that_never_ends_ends(
    serve: Serve, hurry: Callable[[], None], piece: bytes, *, fresh: bool
):
    """Before the first request and after one, bytes that make none do not keep a connection."""
    served = await serve(Script())
    if fresh:
        hurry()
    async with await Connection.to(served.port) as connection:
        if not fresh:
            await connection.request("GET", "/healthz")
            assert (await connection.response()).status == 200
            hurry()
        if piece == b"G":
            await connection.send(b"GET /healthz HTTP/1.1\r\nx: ")
        await drip(connection, b"a: b\r\n" if piece.startswith(b"GET") else piece)
    await until(lambda: not served.connections)


@pytest.mark.parametrize(
    "piece",
    [b"trailer: value\r\n", b"v" * 5000],
    ids=["trailers", "a trailer"],
)
async def test_trailers_are_bounded(serve: Serve, piece: bytes):
    """What follows a body is not kept, and a flood of it is refused."""
    served = await serve(Script())
    async with await Connection.to(served.port) as connection:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n"
        )
        await connection.send(head.encode() + b"x: ")
        for _ in range(1_000_000 // len(piece)):
            try:
                await connection.send(piece)
            except (ConnectionResetError, BrokenPipeError):
                break
        else:
            assert (await connection.response()).refusal()[:2] == (400, "invalid_http")


async def test_tiny_chunks_are_a_body(serve: Serve):
    """A body in chunks of one byte is taken."""
    served = await serve(Script(tokens=1))
    raw = request_bytes("POST", CHAT, chat("x" * 50_000, stream=False)).partition(b"\r\n\r\n")[2]
    async with await Connection.to(served.port) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        await connection.send(head.encode() + b"".join(b"1\r\n%c\r\n" % byte for byte in raw) + b"0\r\n\r\n")
        assert (await connection.response()).status == 200


async def test_an_idle_connection_gives_way(serve: Serve):
    """Where there are as many connections as there may be, the longest idle is closed for a new one."""
    served = await serve(Script(tokens=10**6, rate=100), max_connections=4)
    async with await served.open(chat()) as stream:
        idle = [await Connection.to(served.port) for _ in range(3)]
        await until(lambda: len(served.connections) == 4)
        for connection in idle:
            await connection.request("GET", "/healthz")
            await connection.response()
        assert (await served.call("GET", "/healthz")).status == 200
        assert await idle[0].read() == b"", "closed"
        await stream.read_events(5)
        line = (await until(lambda: served.logged("connections_short")))[0]
        assert line["closed"] == 1
        for connection in idle:
            connection.close()


async def test_unfinished_bodies_give_way(serve: Serve):
    """A caller who fills the server with bodies that drip keeps nobody out."""
    served = await serve(Script(tokens=5), max_connections=4)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{BODY_TO_COME}x".encode()
    dripping = [await Connection.to(served.port) for _ in range(4)]
    for connection in dripping:
        await connection.send(head)
    await until(lambda: len(served.server.server_state.tasks) == 4)
    assert (await served.post(chat(stream=False))).status == 200
    for connection in dripping:
        connection.close()


async def test_many_header_fields_are_refused(serve: Serve):
    """Thousands of tiny fields are a 431; a browser's hundred are not."""
    served = await serve(Script())
    for number, status in ((100, 200), (10_000, 431)):
        fields = {f"x{i}": "1" for i in range(number)}
        async with await Connection.to(served.port) as connection:
            await connection.send(request_bytes("GET", "/healthz", None, fields))
            assert (await connection.response()).status == status


async def test_without_any_idle_the_new_one_is_refused(serve: Serve):
    """Nobody who waits for an answer is cut for a newcomer, who learns why and is in the log, in sums."""
    served = await serve(Script(tokens=10**6, rate=100), max_connections=2)
    streams = [await served.open(chat()) for _ in range(2)]
    for _ in range(20):
        refused = await served.call("GET", "/healthz")
        assert refused.refusal() == (503, "unavailable", None)
        assert int(refused.headers["retry-after"]) > 0
    for stream in streams:
        await stream.read_events(2)
        stream.connection.close()
    assert len(served.logged("connections_short")) == 1
    await until(lambda: not served.connections)
    assert (await served.call("GET", "/healthz")).status == 200


async def test_an_address_has_its_bound(serve: Serve):
    """With a bound for each address, one that has reached it keeps nobody else out."""
    served = await serve(Script(), max_connections_per_address=2)
    held = [await Connection.to(served.port) for _ in range(2)]
    await until(lambda: len(served.connections) == 2)
    assert (await served.call("GET", "/healthz")).status == 503
    async with await Connection.to(served.port, address="127.0.0.2") as other:
        await other.request("GET", "/healthz")
        assert (await other.response()).status == 200
    held.pop().close()
    await until(lambda: len(served.connections) == 1)
    assert (await served.call("GET", "/healthz")).status == 200
    held.pop().close()


async def test_scarce_files_reset_nobody(spawn: Spawn, monkeypatch: pytest.MonkeyPatch):
    """With `ulimit -n 200` and 400 connections that drip bodies, others are answered, and the log says so."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    process: ServerProcess = await spawn("tokens=5", "--api-key", "k")
    port = await process.ready()
    resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE, (200, 200))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    assert hard > 1000
    dripping = []
    for _ in range(400):
        connection = await Connection.to(port)
        dripping.append(connection)
        try:
            await connection.send(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{BODY_TO_COME}x".encode())
        except (ConnectionResetError, BrokenPipeError):
            continue
        if len(dripping) % 50 == 0:
            assert (await fetch(port, "GET", "/healthz")).status == 200
    answer = await fetch(port, "POST", CHAT, chat(stream=False), {"authorization": "Bearer k"})
    assert answer.status == 200
    assert (await process.logged("connections_short"))["closed"] > 0
    for connection in dripping:
        connection.close()


PIPELINED = request_bytes("GET", "/openapi.json", None) * 200
"""Ten megabytes of answers, more than the kernel takes for a client that does not read."""


async def unread(port: int) -> socket.socket:
    """A client that asks for much, without a key, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, PIPELINED)
    return client


@pytest.mark.parametrize("sips", [False, True], ids=["reads nothing", "sips"])
async def test_answers_that_nobody_reads_end(serve: Serve, *, sips: bool):
    """A client that asks for more than it reads is cut, even where it takes a little now and then."""
    served = await serve(Script(), api_key="k", stall_timeout_s=0.2)
    with await unread(served.port) as client:
        await until(lambda: served.server.server_state.total_requests)  # it has been let in
        async with asyncio.timeout(FOREVER_S):
            while served.connections:
                if sips:
                    with contextlib.suppress(BlockingIOError, ConnectionResetError):
                        client.recv(1024)
                await asyncio.sleep(0.02)
    await until(lambda: not served.server.server_state.tasks)


async def test_answers_that_nobody_reads_give_way(serve: Serve):
    """Connections of clients that do not read their answers keep nobody out."""
    served = await serve(Script(tokens=5), api_key="k", max_connections=3)
    clients = [await unread(served.port) for _ in range(3)]
    await until(lambda: len(served.server.server_state.tasks) == 3)
    await until(lambda: sum(c.flow.write_paused for c in served.connections) == 3)
    assert (await served.call("GET", "/healthz")).status == 200
    for client in clients:
        client.close()


async def test_a_client_that_leaves_amid_pipelined_requests_is_no_error(spawn: Spawn):
    """What was asked behind the running request is dropped with its connection, and writes no log line."""
    process: ServerProcess = await spawn("tokens=5", "--api-key", "k")
    port = await process.ready()
    for _ in range(5):
        with await unread(port) as client:
            await asyncio.get_running_loop().sock_recv(client, 1024)
    for _ in range(50):
        assert (await fetch(port, "GET", "/healthz")).status == 200
    assert [line for line in process.log if line.get("level") == "error"] == []


@pytest.mark.parametrize("path", ["/healthz", "/nowhere"])
async def test_http_1_0_gets_its_length(serve: Serve, path: str):
    """An HTTP/1.0 client gets no chunks, and the connection ends with the answer."""
    served = await serve(Script(), api_key="k")
    async with await Connection.to(served.port) as connection:
        await connection.send(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        head = await connection.head()
        assert head.headers["connection"] == "close"
        assert "transfer-encoding" not in head.headers
        assert len(b"".join([p async for p in connection.pieces(head)])) > 0
        assert await connection.read() == b""


async def test_http_1_0_gets_a_stream_as_it_is(serve: Serve):
    """Frames to an HTTP/1.0 client are no chunks; the connection's end is the stream's."""
    served = await serve(Script(tokens=20), api_key="k")
    async with await Connection.to(served.port) as connection:
        request = request_bytes("POST", CHAT, chat(), {"authorization": "Bearer k"})
        await connection.send(request.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1))
        head = await connection.head()
        assert head.status == 200
        assert "transfer-encoding" not in head.headers
        assert head.headers["connection"] == "close"
        pieces = []
        while piece := await connection.read():
            pieces.append(piece)
        lines = b"".join(pieces).split(b"\n")
        assert lines[0] == b"id: 1"
        assert lines[-3:] == [b"data: [DONE]", b"", b""]
        assert all(line == b"" or line.split(b":")[0] in (b"id", b"data", b"retry") for line in lines)
