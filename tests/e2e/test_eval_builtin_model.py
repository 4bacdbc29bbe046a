"""The measure of the built-in model, over HTTP."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from scripts.training.builtin_model import evaluate


class OneAnswer(BaseHTTPRequestHandler):
    """An OpenAI-shaped server whose model says the same to everybody."""

    asked: list[dict[str, object]]

    def do_GET(self) -> None:
        """List one model."""
        self._reply(200 if self.path == "/v1/models" else 404, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        """Answer a chat."""
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        message = {"role": "assistant", "content": "Run `scripts/check`."}
        self._reply(200 if self.path == "/v1/chat/completions" else 404, {"choices": [{"message": message}]})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""

    def _reply(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, object]]]]:
    """Give a server's address, and the bodies it was asked with."""
    asked: list[dict[str, object]] = []
    handler = type("Handler", (OneAnswer,), {"asked": asked})
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", asked
        http.shutdown()
        thread.join()


def test_asks_every_question_of_the_server(
    server: tuple[str, list[dict[str, object]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every question is asked once, greedily, and the answers are counted."""
    url, asked = server
    assert evaluate.main(["--base-url", f"{url}/v1", "--json", "--min", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["right"] == 1
    assert len(asked) == 40
    assert all((body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 160) for body in asked)


def test_too_low_a_score_fails(server: tuple[str, list[dict[str, object]]]) -> None:
    """A score under `--min` gives status 1."""
    assert evaluate.main(["--base-url", f"{server[0]}/v1", "--min", "2"]) == 1


def test_a_refusal_is_an_error_of_its_own(
    server: tuple[str, list[dict[str, object]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that refuses gives status 2 and is quoted."""
    assert evaluate.main(["--base-url", f"{server[0]}/wrong"]) == 2
    assert "answered 404" in capsys.readouterr().err
