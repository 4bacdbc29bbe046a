"""What the commands that ask a running server share: where it is, the key, one request, errors that help."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.cli.flags import flag
from app.cli.terminal import printable
from app.settings import SettingsError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "TOKENRING_API_KEY"
CONNECT_TIMEOUT_S = 5.0
TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 64 * 1024**2


class Unreachable(Exception):
    """No server answers, or the connection broke; the message says what to do."""


class NoServer(Unreachable):
    """No connection was made, so nothing was asked."""


class Unreadable(Exception):
    """Something answers that is no server of ours."""

    def __init__(self) -> None:
        super().__init__("What answers there is not Tokenring, or something on the way to it; check --url.")


class Refused(Exception):
    """The server's refusal. `retry_after_s` is None where waiting does not help."""

    def __init__(self, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        error = body.get("error")
        self.status = status
        self.error: dict[str, Any] = error if isinstance(error, dict) else {}
        self.code = str(self.error.get("code") or f"http_{status}")
        self.message = str(self.error.get("message") or f"The server answered {status}.")
        if status < 400:
            self.message = f"--url leads elsewhere, to {headers.get('location')}; name that server."
        if self.code == "missing_api_key":
            self.message = "The server asks for an API key."  # its own words are for programs
        after = headers.get("retry-after", "")
        may_retry = after.isdecimal() and headers.get("x-should-retry") != "false"
        self.retry_after_s = int(after) if may_retry else None
        super().__init__(f"{printable(self.message)} ({printable(self.code)}){self._advice()}")

    def _advice(self) -> str:
        if self.status == 401:
            return (
                f"\nSet {KEY_VARIABLE} to your key, or name a file that holds it with --api-key-file."
                " An operator makes keys with `tokenring keys create`."
            )
        return ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where the server is, and which key to use."""
    flag(
        parser, "--url", f"address of the server (default: {DEFAULT_URL})", metavar="URL", default=DEFAULT_URL
    )
    file = f"file that holds your key (default: the variable {KEY_VARIABLE})"
    flag(parser, "--api-key-file", file, Path, "FILE")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, and the key to ask it with. A request has a connection of its own."""

    url: str
    key: str = field(default="", repr=False)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Server:
        """The server of the flags. Raises SettingsError."""
        url = args.url if "://" in args.url else f"http://{args.url}"
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            raise SettingsError(f"--url: expected an address as {DEFAULT_URL}, got {args.url!r}")
        url = url.rstrip("/").removesuffix("/v1")  # as OpenAI's clients have it
        return cls(url, _key(args.api_key_file))

    def call(self, method: str, path: str, body: Any = None, *, timeout_s: float = TIMEOUT_S) -> Any:
        """The JSON object of an answer. Raises Unreachable, Unreadable, Refused."""
        response = self.open(method, path, body, timeout_s=timeout_s)
        try:
            return parse(response.read(_MAX_ANSWER_BYTES))
        except (OSError, http.client.HTTPException) as exc:
            raise Unreachable(f"The connection to {self.url} broke: {exc}.") from exc
        finally:
            response.close()

    def open(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> http.client.HTTPResponse:
        """An answer whose body is not read yet; `timeout_s` bounds each wait. Raises Unreachable, Refused."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        sent = {"Accept": "application/json", "Connection": "close", **(headers or {})}
        if self.key:
            sent["Authorization"] = f"Bearer {self.key}"
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        connection = kind(str(parts.hostname), parts.port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
        except ConnectionRefusedError as exc:
            raise NoServer(_start_one(self.url)) from exc
        except (OSError, UnicodeError) as exc:  # a name that cannot be one of a host
            raise NoServer(f"{self.url} cannot be reached: {_reason(exc)}.") from exc
        try:
            connection.sock.settimeout(timeout_s)
            connection.request(method, parts.path + path, content, sent)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException, UnicodeError) as exc:
            connection.close()
            raise Unreachable(f"{self.url} cannot be reached: {_reason(exc)}.") from exc
        if response.status >= 300:
            raise _refusal(response)
        return response


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises Unreadable."""
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise Unreadable from exc
    if not isinstance(answer, dict) or not answer:
        raise Unreadable
    return answer


def _refusal(response: http.client.HTTPResponse) -> Refused:
    with response:
        try:
            body = json.loads(response.read(_MAX_ANSWER_BYTES))
        except (OSError, http.client.HTTPException, ValueError, RecursionError):
            body = {}
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Refused(response.status, body if isinstance(body, dict) else {}, headers)


def _reason(exc: Exception) -> str:
    if isinstance(exc, TimeoutError):
        return "it did not answer in time"
    if isinstance(exc, socket.gaierror):
        return "there is no such host"
    return str(exc) or type(exc).__name__


def _start_one(url: str) -> str:
    return (
        f"No server answers at {url}. Start one with `tokenring serve` (in a clone: `scripts/serve`),"
        " or name another with --url."
    )


def _key(file: Path | None) -> str:
    """The key of the file or the variable, or empty. Raises SettingsError, which does not quote it."""
    key, source = os.environ.get(KEY_VARIABLE, "").strip(), KEY_VARIABLE
    if file is not None:
        source = f"--api-key-file {file}"
        try:
            key = file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise SettingsError(f"{source}: {type(exc).__name__}; it must be readable text") from exc
        if not key:
            raise SettingsError(f"{source}: the file is empty; write the key into it")
    if not (key.isascii() and key.isprintable()):
        raise SettingsError(f"{source}: the key has characters that no key has")
    return key
