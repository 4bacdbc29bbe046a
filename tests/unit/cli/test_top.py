"""`tokenring top`: what is shown of the live requests, and what is said where there is nothing to show."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import pytest

from app.cli import top
from app.cli.client_options import Refused, Server, Unreachable
from app.cli.main import main
from app.settings import SettingsError

LIVE: dict[str, Any] = {
    "state": "ready",
    "degraded": {"step": "short", "pressure": 0.6},
    "engine": {"restarts": 2},
    "samples": [{"tokens_per_s": 1234.5}],
    "models": [
        {
            "model": "llama",
            "ready": True,
            "running": 3,
            "queued": {"interactive": {"requests": 0}, "standard": {"requests": 2}},
            "kv": {"used_tokens": 500, "max_tokens": 2000},
            "ttft_s": {"p50": 0.1, "p99": 1.25},
            "tpot_s": {"p50": 0.012, "p99": 0.05},
            "hit_rate": 0.5,
        }
    ],
}
REQUEST: dict[str, Any] = {
    "id": "chatcmpl-0123456789",
    "key_name": "Ann's \x1b[2Jlaptop",
    "owner": "ann",
    "model": "llama",
    "phase": "queue",
    "phase_s": 0.42,
    "age_s": 185.0,
    "position": 2,
    "prompt_tokens": 1200,
    "cached_tokens": 0,
    "completion_tokens": 0,
    "tokens_per_s": None,
    "readers": 0,
    "stops_in_s": 12.3,
    "cancelled": None,
}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server answers, by path; an exception is raised."""
    listed = {"data": [REQUEST], "total": 1, "has_more": False}
    answers: dict[str, Any] = {"/api/admin/live": LIVE, "/api/admin/requests?limit=100": listed}

    def call(_server: Server, _method: str, path: str) -> Any:
        if isinstance(answers[path], Exception):
            raise answers[path]
        return answers[path]

    monkeypatch.setattr(Server, "call", call)
    return answers


@pytest.mark.usefixtures("answers")
def test_without_a_terminal_one_table_is_printed(capsys: pytest.CaptureFixture[str]):
    """The server's state, then a line for each request, and no control character of a key's name."""
    assert main(["top"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    first, second, _, heads, row = out.splitlines()
    assert first == (
        "http://127.0.0.1:8000  ready  1 live  1,234 tokens/s  degraded: short  2 restarts of the engine"
    )
    assert second == (
        "llama  3 running  waiting: standard 2  KV 25% of 2,000  TTFT p50 0.1 p99 1.25 s"
        "  TPOT p50 12 p99 50 ms  cache 50%"
    )
    assert heads.split()[:4] == ["id", "key", "model", "phase"]
    cells = "chatcmpl-0123456789 Ann's [2Jlaptop llama queue 0.4s 3m05s 2 1,200 0 0 0 stops in 12 s"
    assert " ".join(row.split()) == cells


def test_a_server_with_nothing_to_do_says_so(answers: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    """In place of an empty table."""
    answers["/api/admin/requests?limit=100"] = {"data": [], "total": 0, "has_more": False}
    assert main(["top"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no live requests"


@pytest.mark.usefixtures("answers")
def test_json_is_one_object(capsys: pytest.CaptureFixture[str]):
    """As the server answered."""
    assert main(["top", "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert (view["object"], view["requests"]["data"], view["live"]) == ("top", [REQUEST], LIVE)


def refused(status: int, message: str) -> Refused:
    """The server's refusal."""
    return Refused(status, {"error": {"message": message, "code": "forbidden"}}, {})


@pytest.mark.parametrize(
    ("problem", "advice"),
    [
        (refused(403, "This needs an admin key."), "Set TOKENRING_API_KEY to one"),
        (refused(404, "No such route."), "is no Tokenring server, or an older one"),
        (refused(401, "No key."), "--api-key-file"),
        (Unreachable("No server answers."), "No server answers."),
    ],
)
def test_a_server_that_does_not_tell_is_an_error_with_advice(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str], problem: Exception, advice: str
):
    """On standard error, with exit status 2."""
    answers["/api/admin/live"] = problem
    assert main(["top", "--once"]) == 2
    captured = capsys.readouterr()
    assert advice in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "1e9"])
def test_an_interval_is_some_seconds(text: str):
    """Less would be a load on the server."""
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected 0\.2 to 3600"):
        top._interval_s(text)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0.0s"), (9.96, "10.0s"), (59.9, "59s"), (61, "1m01s"), (7620, "2h07m")]
)
def test_durations_are_short(seconds: float, shown: str):
    """A column of them is narrow."""
    assert top._duration(seconds) == shown


class Terminal:
    """A screen that ends with Ctrl-C after some looks."""

    def __init__(self, looks: int) -> None:
        self.left, self.shown = looks, 0

    def sleep(self, _seconds: float) -> None:
        """Count a look."""
        self.shown += 1
        if self.shown == self.left:
            raise KeyboardInterrupt


def test_a_screen_stays_while_the_server_is_away_and_ends_with_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It says that what it shows is old; afterwards the cursor is back, and so is the other screen."""
    view = {"url": "http://x", "live": LIVE, "requests": {"data": [REQUEST], "total": 1, "has_more": False}}
    looks: list[Callable[[], Any]] = [lambda: view]

    def look(_server: Server) -> Any:
        if looks:
            return looks.pop()()
        raise SettingsError("it is away")

    terminal = Terminal(3)
    monkeypatch.setattr(top, "look", look)
    monkeypatch.setattr("app.cli.top.time.sleep", terminal.sleep)
    monkeypatch.setattr("app.cli.top.signal.signal", lambda *_: None)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    top._refresh(Server("http://x"), view, 1.0)
    out = capsys.readouterr().out
    assert terminal.shown == 3
    assert "it is away" in out
    assert "what follows is old" in out
    assert "23456789" in out
    assert out.endswith("\x1b[?1049l")
    assert "\x1b[?25h" in out
