"""The options of the commands that ask a server: the address, the key, and refusals that say what to do."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from app.cli import client_options
from app.cli.client_options import KEY_VARIABLE, Refused, Server, Unreachable, Unreadable
from app.settings import SettingsError


@pytest.fixture(autouse=True)
def _without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def server_of(*flags: str) -> Server:
    """The server that these flags name."""
    parser = argparse.ArgumentParser()
    client_options.add_options(parser)
    return Server.of(parser.parse_args(flags))


class Scripted(BaseHTTPRequestHandler):
    """Answers by the path: `/STATUS` with that status."""

    answers: ClassVar[dict[str, tuple[dict[str, str], bytes]]] = {}

    def do_GET(self) -> None:
        headers, body = self.answers.get(self.path, ({}, b""))
        self.send_response(int(self.path[1:4]))
        for name, value in (headers | {"X-Key": self.headers.get("Authorization", "none")}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that answers as `Scripted.answers` says."""
    monkeypatch.setattr(Scripted, "answers", {})
    with HTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def refusal(status: int, error: object, **headers: str) -> tuple[dict[str, str], bytes]:
    """Headers and body of a refusal."""
    return {name.replace("_", "-"): value for name, value in headers.items()}, json.dumps(
        {"error": error}
    ).encode()


def test_the_address_is_this_machine_unless_named():
    """`--url` may leave the scheme, have a slash at its end, and be the address of OpenAI's clients."""
    assert server_of().url == "http://127.0.0.1:8000"
    assert server_of("--url", "node:9000/").url == "http://node:9000"
    assert server_of("--url", "https://node/chat/v1/").url == "https://node/chat"


@pytest.mark.parametrize("url", ["ftp://node", "http://", "http://node:port"])
def test_what_is_no_address_is_an_error_that_shows_one(url: str):
    """A scheme that is not HTTP's, no host, or a port that is none."""
    with pytest.raises(SettingsError, match=r"--url: expected an address as http://127\.0\.0\.1:8000"):
        server_of("--url", url)


def test_the_key_comes_from_a_file_or_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file comes first; white space around a key does not count, and no `repr` shows it."""
    monkeypatch.setenv(KEY_VARIABLE, " tr-1 \n")
    assert server_of().key == "tr-1"
    (tmp_path / "key").write_text("tr-2\n")
    server = server_of("--api-key-file", str(tmp_path / "key"))
    assert server.key == "tr-2"
    assert "tr-2" not in repr(server)


@pytest.mark.parametrize("content", [None, b" \n", b"\xff"])
def test_a_key_file_that_is_none_is_an_error(content: bytes | None, tmp_path: Path):
    """It is not there, empty, or no text."""
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(SettingsError, match="--api-key-file"):
        server_of("--api-key-file", str(tmp_path / "key"))


def test_a_key_that_no_header_can_carry_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """It is refused before a connection, and is not repeated."""
    monkeypatch.setenv(KEY_VARIABLE, "tr-geheim€")
    with pytest.raises(SettingsError, match="the key has characters that no key has") as error:
        server_of()
    assert "geheim" not in str(error.value)


def test_where_no_server_is_the_error_says_how_to_start_one():
    """Nothing listens on port 1."""
    with pytest.raises(Unreachable, match=r"No server answers at http://127\.0\.0\.1:1\. Start one with"):
        Server("http://127.0.0.1:1").call("GET", "/readyz")


def test_an_answer_is_its_json_and_the_key_is_sent(url: str):
    """One request, on a connection of its own."""
    Scripted.answers["/200"] = {}, b'{"ok": true}'
    assert Server(url).call("GET", "/200") == {"ok": True}
    assert Server(url, "tr-1").open("GET", "/204").headers["X-Key"] == "Bearer tr-1"


def test_a_refusal_has_code_message_and_the_time_to_wait(url: str):
    """Control characters of the message reach no terminal."""
    error = {"code": "overloaded", "message": "Full.\x1b[2J"}
    Scripted.answers["/503"] = refusal(503, error, Retry_After="7")
    with pytest.raises(Refused) as refused:
        Server(url).call("GET", "/503")
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "overloaded", 7)
    assert str(refused.value) == "Full.[2J (overloaded)"


def test_a_refusal_for_good_has_no_time_to_wait(url: str):
    """`x-should-retry: false` outweighs `Retry-After`."""
    Scripted.answers["/429"] = refusal(429, {}, Retry_After="7", X_Should_Retry="false")
    with pytest.raises(Refused) as refused:
        Server(url).call("GET", "/429")
    assert refused.value.retry_after_s is None


def test_without_a_key_the_error_says_where_to_put_it(url: str):
    """401 names the variable and the flag."""
    Scripted.answers["/401"] = refusal(401, {"code": "missing_api_key", "message": "Send it as a header."})
    with pytest.raises(Refused, match="Set TOKENRING_API_KEY to your key, or") as refused:
        Server(url).call("GET", "/401")
    assert "header" not in str(refused.value)


@pytest.mark.parametrize("path", ["/200", "/502"])
def test_what_is_no_tokenring_is_an_error(path: str, url: str):
    """A page in HTML, of a proxy or of another program."""
    Scripted.answers[path] = {}, b"<html>"
    with pytest.raises((Unreadable, Refused), match=r"is not Tokenring|The server answered 502"):
        Server(url).call("GET", path)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"null", b'"x"', b"7", b"[" * 100_000])
def test_json_of_another_program_is_an_error(body: bytes, url: str):
    """Every answer that a command reads is an object with something in it."""
    Scripted.answers["/200"] = {}, body
    with pytest.raises(Unreadable):
        Server(url).call("GET", "/200")


def test_a_redirect_names_where_the_server_is(url: str):
    """As a proxy sends who asked it without TLS; it is not followed, as the key would go along."""
    Scripted.answers["/301"] = {"Location": "https://chat.example.org/"}, b""
    with pytest.raises(Refused, match="leads elsewhere, to https://chat"):
        Server(url).call("GET", "/301")


def test_an_address_that_cannot_be_is_not_reached(url: str):
    """A host's name has labels of 1 to 63 letters, and a path no other letters than ASCII's."""
    for address in ("http://a..b", f"http://{'a' * 64}.example", f"{url}/ä"):
        with pytest.raises(Unreachable, match="cannot be reached"):
            Server(address).call("GET", "/200")


def test_a_retry_after_that_is_no_number_is_none(url: str):
    """`isdigit` takes a superscript, which `int` does not."""
    Scripted.answers["/503"] = {"Retry-After": "\u00b2"}, b""
    with pytest.raises(Refused) as refused:
        Server(url).call("GET", "/503")
    assert refused.value.retry_after_s is None
