"""The console's files over HTTP: types, sizes, caching, the policy, the libraries; and whom /api/me names."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

from app.api.routes.console import POLICY, _read, load
from app.store.keys import ID_CHARS
from tests.support.servers import ROOT, Serve

CONSOLE = ROOT / "app/api/console"
MAX_GZIPPED_BYTES = 100_000
FILES = {path.relative_to(CONSOLE).as_posix(): path for path in CONSOLE.rglob("*") if path.is_file()}
LOADED = ("index.html", "theme.js", "favicon.svg", "dist/console.css", "dist/console.js")
OUTSIDE = (
    "../openapi.json",
    "js/../../openapi.json",
    "..%2f..%2fopenapi.json",
    "%2e%2e/server.py",
    "/etc/passwd",
)
HTML = {"accept": "text/html,*/*;q=0.8"}


def test_a_browser_loads_at_most_100_kb():
    """All that the page names, gzipped; it loads nothing later."""
    named = re.findall(r'="console/[0-9a-f]+/([^"]+)"', load().page.content.decode())
    assert {"index.html", *named} == set(LOADED)
    sizes = {path: len(gzip.compress(FILES[path].read_bytes(), mtime=0)) for path in LOADED}
    assert sum(sizes.values()) <= MAX_GZIPPED_BYTES, sizes
    assert "import(" not in FILES["dist/console.js"].read_text()


def test_what_is_shipped_is_built_from_these_sources():
    """Each file has the hash that the build recorded: otherwise run scripts/vendor_console."""
    lines = FILES["SHA256SUMS"].read_text().splitlines()
    recorded = {path: digest for digest, path in (line.split("  ") for line in lines)}
    digests = {path: hashlib.sha256(file.read_bytes()).hexdigest() for path, file in FILES.items()}
    assert {path: digest for path, digest in digests.items() if path != "SHA256SUMS"} == recorded


def test_what_an_editor_left_keeps_no_server_from_its_start(tmp_path: Path):
    """Swap files, backups, and a lock that is a link to nowhere."""
    for name in ("main.js", ".main.js.swp", "main.js~", "README"):
        (tmp_path / name).touch()
    (tmp_path / ".#main.js").symlink_to("nowhere")
    assert _read(tmp_path) == [("main.js", b"")]


def test_each_library_is_pinned_and_has_its_licence():
    """The lock has a hash of each package."""
    lock = json.loads((ROOT / "scripts/console_build/package-lock.json").read_text())["packages"]
    assert [path for path, package in lock.items() if path and "integrity" not in package] == []
    licences = FILES["vendor/LICENSES.txt"].read_text()
    for name, version in lock[""]["dependencies"].items():
        assert lock[f"node_modules/{name}"]["version"] == version
        assert f"{name} {version}: {lock[f'node_modules/{name}']['license']}\n" in licences


def test_no_file_is_inline_or_from_another_host():
    """The policy would refuse it. Addresses are relative, so that a proxy may serve the page below a path."""
    page = (CONSOLE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)|<style|style=|\son\w+=", page) == []
    for source in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert source.startswith("console/{version}/"), source


async def test_the_page_leads_to_files_that_browsers_keep(serve: Serve):
    """The page is asked for each time; the path of a file changes with its content."""
    served = await serve(api_key="secret")
    page = await served.call("GET", "/", **HTML)
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["content-security-policy"] == POLICY
    assert page.headers["cache-control"] == "no-cache"
    again = await served.call("GET", "/", **HTML, if_none_match=page.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page.body.decode())
    for address in addresses:
        file = await served.call("GET", f"/{address}", accept_encoding="br, gzip")
        source = (CONSOLE / address.split("/", 2)[2]).read_bytes()
        assert (file.status, gzip.decompress(file.body)) == (200, source), address
        assert "immutable" in file.headers["cache-control"]
        assert file.headers["x-content-type-options"] == "nosniff"
        kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}[
            address.rsplit(".", 1)[-1]
        ]
        assert file.headers["content-type"].startswith(kind)


async def test_a_client_without_gzip_or_a_body_is_answered_too(serve: Serve):
    """HEAD has the length of the GET."""
    served = await serve()
    page = await served.call("GET", "/", **HTML)
    [theme] = re.findall(r'src="(console/[0-9a-f]+/theme.js)"', page.body.decode())
    plain = await served.call("GET", f"/{theme}", accept_encoding="gzip;q=0, br")
    assert plain.body == (CONSOLE / "theme.js").read_bytes()
    assert "content-encoding" not in plain.headers
    head = await served.call("HEAD", f"/{theme}")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == str(len(plain.body))


async def test_curl_gets_a_few_lines(serve: Serve):
    """Who does not ask for HTML is told where the API is."""
    served = await serve(api_key="secret")
    answer = await served.call("GET", "/", accept="*/*")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert b"/openapi.json" in answer.body


async def test_no_other_file_can_be_read(serve: Serve):
    """A path is looked up among the files that were read at the start."""
    served = await serve()
    page = (await served.call("GET", "/", **HTML)).body.decode()
    [version] = set(re.findall(r"console/([0-9a-f]{16})/", page))
    assert (await served.call("GET", f"/console/{version}/js/main.js")).status == 200
    for path in (*OUTSIDE, "index.html", "SHA256SUMS", "js", "js/main.js%00", ""):
        assert (await served.call("GET", f"/console/{version}/{path}")).status == 404, path
    assert (await served.call("GET", "/console/0123456789abcdef/js/main.js")).status == 404


async def test_the_caller_is_told_who_they_are(serve: Serve):
    """Owner, scope, key without its secret; the server's own key is none that is stored."""
    served = await serve(host="127.0.0.1")
    here = (await served.call("GET", "/api/me")).json()
    assert here == {"object": "caller", "owner": "local", "scope": "admin", "open": True, "key": None}
    new = {"name": "phone", "owner": "ann", "budget_usd": 5, "tier": "interactive"}
    text = (await served.call("POST", "/api/admin/keys", new)).json()["key"]
    answer = await served.call("GET", "/api/me", authorization=f"Bearer {text}")
    told = answer.json()
    assert (told["owner"], told["scope"], told["open"]) == ("ann", "chat", False)
    assert told["key"]["id"] == text[:ID_CHARS]
    assert {name: told["key"][name] for name in ("name", "budget_usd", "tier")} == {
        "name": "phone",
        "budget_usd": 5.0,
        "tier": "interactive",
    }
    assert text not in answer.body.decode()
    assert answer.headers["cache-control"] == "no-store"
    assert (await served.call("GET", "/api/me")).status == 401
    with_setting = await serve(api_key="secret")
    own = (await with_setting.call("GET", "/api/me", authorization="Bearer secret")).json()
    assert (own["scope"], own["open"], own["key"]) == ("admin", False, None)
