"""Open mode is for this machine alone; and who has no key learns little, and writes little into the log."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import openai
import pytest

from app.engine.scripted.engine import Script
from tests.support.servers import ROOT, Serve, Spawn, chat
from tests.support.sse_client import Connection, Response, fetch, until

KEYS = "/api/admin/keys"


async def raw(port: int, request: bytes) -> Response:
    """The answer to these bytes."""
    async with await Connection.to(port) as connection:
        await connection.send(request)
        return await connection.response()


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        ("/v1/models", "host: 127.0.0.1:8000\r\nx-forwarded-for: 203.0.113.9\r\n", 403),
        ("/v1/models", "host: localhost\r\nForwarded: for=203.0.113.9\r\n", 403),
        ("/v1/models", "host: localhost\r\nVia: 1.1 proxy\r\n", 403),
        *(
            ("/v1/models", f"host: localhost\r\n{name}: 1\r\n", 403)
            for name in (
                "client-ip",
                "fly-client-ip",
                "cdn-loop",
                "x-amzn-trace-id",
                "x-scheme",
                "x-request-start",
            )
        ),
        ("/v1/models", "host: localhost\r\norigin: http://localhost\r\norigin: http://evil.example\r\n", 403),
        ("/v1/models", "host: localhost\r\norigin: null\r\n", 403),
        ("/v1/models", "host: evil.example\r\n", 403),
        ("/v1/models", "host: evil.example:80@127.0.0.1\r\n", 400),
        ("/v1/models", "host: localhost\r\nhost: localhost\r\n", 400),
        ("/v1/models", "host: evil.example\r\nhost: localhost\r\n", 400),
        ("/v1/models", "", 400),
        ("/v1/models", "host:\r\n", 403),
        ("/v1/models", "host: localhost/evil\r\n", 400),
        ("/v1/models", "host: [::1\r\n", 400),
        ("/v1/models", "host: [::ffff:10.0.0.7]\r\n", 403),
        ("/v1/models", "host: 0177.0.0.1\r\n", 403),
        ("/v1/models", "host: 2130706433\r\n", 403),
        ("http://evil.example/v1/models", "host: localhost\r\n", 400),
        ("http://evil.example/v1/models", "host: evil.example\r\n", 403),
        ("http://user@localhost/v1/models", "host: localhost\r\n", 400),
        ("http://localhost:8000/v1/models", "host: localhost:8000\r\n", 200),
        ("/v1/models", "host: LOCALHOST:8000\r\n", 200),
        ("/v1/models", "host: [::1]:8000\r\n", 200),
    ],
)
async def test_only_local_requests_are_open(serve: Serve, target: str, headers: str, status: int):
    """A request for another name, or through a proxy, is not an admin's, however it is spelled."""
    served = await serve(Script())
    answer = await raw(served.port, f"GET {target} HTTP/1.1\r\n{headers}\r\n".encode())
    assert answer.status == status, answer.body


async def test_two_hosts_are_refused_with_a_key_too(serve: Serve):
    """Whom a request with two Host headers is for depends on who reads it: 400, key or not."""
    served = await serve(Script(), api_key="k")
    for version in ("1.1", "1.0"):
        request = f"GET /v1/models HTTP/{version}\r\nhost: a\r\nhost: b\r\nauthorization: Bearer k\r\n\r\n"
        assert (await raw(served.port, request.encode())).refusal()[:2] == (400, "invalid_http")


async def test_nginx_as_it_comes_is_refused(serve: Serve):
    """What `proxy_pass http://127.0.0.1:8000` sends tells of the proxy by HTTP/1.0 alone."""
    served = await serve(Script())
    request = f"POST {KEYS} HTTP/1.0\r\nHost: 127.0.0.1:8000\r\nConnection: close\r\n\r\n"
    answer = await raw(served.port, request.encode())
    assert answer.refusal()[:2] == (403, "forbidden")
    assert "tokenring keys create" in answer.error()["message"]


async def test_a_page_of_another_port_cannot_drive_the_api(serve: Serve):
    """What a page of another origin on this machine sends without a preflight is 403, and begins nothing."""
    served = await serve(Script())
    body = chat(stream=False)
    for headers in (
        {"origin": "http://127.0.0.1:9999", "sec-fetch-site": "same-site", "content-type": "text/plain"},
        {"origin": f"http://localhost:{served.port}"},
        {"sec-fetch-site": "cross-site"},
    ):
        answer = await fetch(served.port, "POST", "/api/chat/completions", body, headers)
        assert answer.refusal()[:2] == (403, "forbidden")
        assert "cors_origins" in answer.error()["message"]
    host = f"127.0.0.1:{served.port}"
    own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert (await fetch(served.port, "POST", "/api/chat/completions", body, own)).status == 200
    assert len(served.logged("request")) == 1


async def test_what_forwards_without_a_sign_is_local(serve: Serve):
    """The rule that docs/keys.md states: who reaches the port through a bare forwarder is an admin."""
    served = await serve(Script())

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner = await asyncio.open_connection("127.0.0.1", served.port)
        inner.write(await reader.readuntil(b"\r\n\r\n"))
        writer.write(await inner_reader.readuntil(b"\r\n\r\n"))
        writer.close()
        inner.close()

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as forwarder:
        reader, writer = await asyncio.open_connection(*forwarder.sockets[0].getsockname())
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()
    rule = (ROOT / "docs/keys.md").read_text("utf-8")
    assert "Everything else that arrives on the port is local" in rule


async def test_ordinary_clients_are_local(spawn: Spawn):
    """curl, OpenAI's SDK and the container's health check need no key in open mode."""
    port = await (await spawn("tokens=3")).ready()
    for host in ("localhost", "127.0.0.1"):
        command = ["curl", "-sS", "--fail", "--noproxy", "*", f"http://{host}:{port}/v1/models"]
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, timeout=20)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        message: Any = {"role": "user", "content": "hi"}
        client.chat.completions.create(model="scripted", messages=[message])
    health_check = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/healthz', timeout=4)"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", health_check], check=True)


async def test_readiness_tells_details_to_admins_alone(serve: Serve):
    """`/readyz` says ready or not, and the phase; to an admin key, and in open mode, how the server does."""
    served = await serve(Script(), api_key="k")
    assert (await served.call("GET", "/readyz")).json() == {"status": "ready", "phase": "ready"}
    wrong = await served.call("GET", "/readyz", authorization="Bearer wrong")
    assert wrong.json() == {"status": "ready", "phase": "ready"}
    told = (await served.call("GET", "/readyz", authorization="Bearer k")).json()
    assert {"store", "ledger", "queue", "engine", "live_streams"} <= told.keys()
    served = await serve(Script())
    assert "engine" in (await served.call("GET", "/readyz")).json()
    assert (await served.call("GET", "/readyz", x_forwarded_for="1.2.3.4")).json().keys() == {
        "status",
        "phase",
    }


async def test_a_flood_without_a_key_is_a_few_lines(serve: Serve):
    """Refusals of nobody known are logged ten times a second, and the others counted; a key's are lines."""
    served = await serve(Script(), api_key="k")
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with await Connection.to(served.port) as connection:
        for number in range(300):
            path = "/v1/models" if number % 2 else "/nowhere"
            await connection.request("GET", path)
            assert (await connection.response()).status in (401, 404)
        await connection.request("POST", "/v1/chat/completions", chat(n=0), {"authorization": "Bearer k"})
        assert (await connection.response()).status == 400
    unnamed = [line for line in served.logged("refused") if line["status"] != 400]
    assert len(served.logged("refused")) - len(unnamed) == 1
    assert len(unnamed) <= 10 * (loop.time() - began_s + 2)
    await until(lambda: len(unnamed) + sum(line["requests"] for line in served.logged("refused_more")) == 300)
    assert set(served.logged("refused_more")[0]["errors"]) == {"missing_api_key", "route_not_found"}


async def test_a_key_on_the_command_line_is_warned_of(spawn: Spawn, tmp_path: Any):
    """`--api-key` works and says that others can read it; a file's key is in force and in no command line."""
    process = await spawn("", "--api-key", "s3cret")
    await process.ready()
    assert any("--api-key" in line and "s3cret" not in line for line in process.noise)
    path = tmp_path / "key"
    path.write_text("s3cret\n")
    process = await spawn("", "--api-key-file", str(path), "--data-dir", str(tmp_path / "other"))
    port = await process.ready()
    assert not process.noise
    assert (await fetch(port, "GET", "/v1/models", None, {"authorization": "Bearer s3cret"})).status == 200
    assert (await fetch(port, "GET", "/v1/models")).status == 401


def test_a_key_that_nobody_can_send_ends_the_start(tmp_path: Any):
    """A key with white space is an error that says so, and does not show the key."""
    command = [sys.executable, "-m", "app", "serve", "--engine", "scripted", "--api-key", "two words"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 78
    assert "white space" in done.stderr
    assert "two words" not in done.stderr
