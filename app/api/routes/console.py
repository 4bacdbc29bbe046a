"""The web console: the page at `/` and its files, read when the server starts and the same for everybody."""

from __future__ import annotations

import gzip
import hashlib
from importlib import metadata, resources
from importlib.resources.abc import Traversable
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
_VERSION = b"{version}"
_MODULES = b"{modules}"
_FOR_OTHERS = """Tokenring {version}

In a browser, the web console is at this address. The API is under /v1 and /api; its document is at
/openapi.json. Whether the server takes requests: /readyz
"""


class _File(NamedTuple):
    """A file's bytes, as they are and gzipped."""

    content: bytes
    gzipped: bytes
    media_type: str


class ConsoleRoutes:
    """Handlers of `/` and of `/console/{version}/{path}`.

    The version is a digest of all files. What lies under it never changes, so that browsers keep it; they ask
    for the page each time.
    """

    def __init__(self) -> None:
        contents = dict(_read(resources.files("app.api").joinpath("console")))
        self.version = hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()[:16]
        page = contents.pop(_PAGE)
        modules = [
            f'<link rel="modulepreload" href="console/{self.version}/{path}">'
            for path in sorted(contents)
            if path.endswith(".js")
        ]
        page = page.replace(_VERSION, self.version.encode())
        self._page = _file(_PAGE, page.replace(_MODULES, "\n".join(modules).encode()))
        self._files = {path: _file(path, content) for path, content in contents.items()}

    async def page(self, request: Request) -> Response:
        """GET /: the page, to a client that takes HTML; a few lines about this server to others."""
        if "text/html" not in request.headers.get("accept", ""):
            text = _FOR_OTHERS.format(version=metadata.version("tokenring"))
            return Response(text, media_type="text/plain", headers={"vary": "accept"})
        headers = {
            "cache-control": "no-cache",
            "etag": f'"{self.version}"',
            "vary": "accept, accept-encoding",
        }
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=_HEADERS | headers)
        return _response(request, self._page, headers)

    async def file(self, request: Request) -> Response:
        """GET: one of the console's files. Raises NotFound, of another version's files too."""
        parameters = request.path_params
        file = self._files.get(parameters["path"])
        if file is None or parameters["version"] != self.version:
            raise NotFound("This version of the console has no such file; load the page again.")
        headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
        return _response(request, file, headers)


def _read(folder: Traversable, path: str = "") -> list[tuple[str, bytes]]:
    """The path of each file below the folder, and its content."""
    files: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            files += _read(entry, f"{path}{entry.name}/")
        elif any(entry.name.endswith(suffix) for suffix in _TYPES):
            files.append((path + entry.name, entry.read_bytes()))
    return files


def _file(path: str, content: bytes) -> _File:
    return _File(content, gzip.compress(content, mtime=0), _TYPES[path[path.rindex(".") :]])


def _response(request: Request, file: _File, headers: dict[str, str]) -> Response:
    """A file, gzipped where the client takes that."""
    codings = request.headers.get("accept-encoding", "").replace(" ", "").split(",")
    if "gzip" not in codings:
        return Response(file.content, media_type=file.media_type, headers=_HEADERS | headers)
    gzipped = {"content-encoding": "gzip"}
    return Response(file.gzipped, media_type=file.media_type, headers=_HEADERS | headers | gzipped)
