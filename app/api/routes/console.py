"""The web console: the page at `/` and its files, read when the server starts and the same for everybody."""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Mapping
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import PurePath
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from app.errors import NotFound

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self';"
    " font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page runs its own scripts alone, talks to this server alone, and is shown in no frame."""
_HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_PAGE = "index.html"
_SUMS = "SHA256SUMS"
_BUILT = {"style": "dist/console.css", "script": "dist/console.js"}
_SOURCES = {"style": "css/console.css", "script": "js/main.js"}
"""What the page loads for `?sources`, and in a checkout whose sources were changed after the last build."""
_FOR_OTHERS = """Tokenring {version}

In a browser, the web console is at this address. The API is under /v1 and /api; its document is at
/openapi.json. Whether the server takes requests: /readyz
"""


class _File(NamedTuple):
    """A file's bytes, as they are and gzipped."""

    content: bytes
    gzipped: bytes
    media_type: str


class Console(NamedTuple):
    """All files of the console, and the page in its two forms."""

    version: str
    """A digest of all files. What lies under it never changes, so that browsers keep it."""
    page: _File
    page_of_sources: _File
    files: dict[str, _File]


@functools.cache
def load() -> Console:
    """The console of this program; it takes 50 ms, once."""
    contents = dict(_read(resources.files("app.api").joinpath("console")))
    version = hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()[:16]
    parts = _BUILT if _is_built(contents.pop(_SUMS, b""), contents) else _SOURCES
    page = contents.pop(_PAGE).decode()
    return Console(
        version,
        page=_file(_PAGE, page.format(version=version, **parts).encode()),
        page_of_sources=_file(_PAGE, page.format(version=version, **_SOURCES).encode()),
        files={path: _file(path, content) for path, content in contents.items()},
    )


def _read(folder: Traversable, path: str = "") -> list[tuple[str, bytes]]:
    """The path of each of our files below the folder, and its content; an editor may have left others."""
    files: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            files += _read(entry, f"{path}{entry.name}/")
        elif entry.name == _SUMS or (PurePath(entry.name).suffix in _TYPES and entry.name[0] != "."):
            files.append((path + entry.name, entry.read_bytes()))
    return files


def _is_built(sums: bytes, contents: Mapping[str, bytes]) -> bool:
    """Whether the files are those of the last build (scripts/vendor_console)."""
    lines = [f"{hashlib.sha256(contents[path]).hexdigest()}  {path}\n" for path in sorted(contents)]
    return "".join(lines).encode() == sums


def _file(path: str, content: bytes) -> _File:
    return _File(content, gzip.compress(content, mtime=0), _TYPES[path[path.rindex(".") :]])


class ConsoleRoutes:
    """Handlers of `/` and of `/console/{version}/{path}`. Browsers ask for the page each time."""

    def __init__(self, console: Console) -> None:
        self._console = console

    async def page(self, request: Request) -> Response:
        """GET /: the page, to a client that takes HTML; a few lines about this server to others."""
        if "text/html" not in request.headers.get("accept", ""):
            text = _FOR_OTHERS.format(version=metadata.version("tokenring"))
            return Response(text, media_type="text/plain", headers={"vary": "accept"})
        etag = f'"{self._console.version}"'
        headers = {"cache-control": "no-cache", "etag": etag, "vary": "accept, accept-encoding"}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=_HEADERS | headers)
        console = self._console
        page = console.page_of_sources if "sources" in request.query_params else console.page
        return _response(request, page, headers)

    async def file(self, request: Request) -> Response:
        """GET: one of the console's files. Raises NotFound, of another version's files too."""
        parameters = request.path_params
        file = self._console.files.get(parameters["path"])
        if file is None or parameters["version"] != self._console.version:
            raise NotFound("This version of the console has no such file; load the page again.")
        headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
        return _response(request, file, headers)


def _response(request: Request, file: _File, headers: dict[str, str]) -> Response:
    """A file, gzipped where the client takes that."""
    codings = request.headers.get("accept-encoding", "").replace(" ", "").split(",")
    if "gzip" not in codings:
        return Response(file.content, media_type=file.media_type, headers=_HEADERS | headers)
    gzipped = {"content-encoding": "gzip"}
    return Response(file.gzipped, media_type=file.media_type, headers=_HEADERS | headers | gzipped)
