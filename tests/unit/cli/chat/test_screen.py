"""An answer on a screen: its text, what has to be said, and nothing that drives the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from app.cli.chat.answer import Answer, Piece
from app.cli.chat.screen import Screen, remarks, usage_line


def answer_of(*chunks: Mapping[str, Any]) -> Answer:
    """An answer of these events."""
    answer = Answer()
    for number, chunk in enumerate(chunks, 1):
        list(answer.take(number, json.dumps({"choices": [], **chunk}).encode()))
    return answer


def test_a_hostile_model_does_not_drive_the_terminal(capsys: pytest.CaptureFixture[str]):
    """Neither in one piece nor cut between two."""
    screen = Screen()
    for text in ("a\x1b", "]0;title\x07b", "\x9b2J", "\u202ec"):
        screen.show(Piece("content", text))
    screen.notice("\x1b[2J")
    screen.end()
    out, err = capsys.readouterr()
    assert (out, err) == ("a]0;titleb2Jc\n", "[[2J]\n")


def test_on_a_terminal_reasoning_is_dim_and_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A notice begins a line, and the text continues on the next."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    screen = Screen()
    screen.show(Piece("reasoning", "hm"))
    screen.show(Piece("content", "a"))
    screen.notice("Lost.")
    screen.show(Piece("content", "b"))
    screen.end()
    out, err = capsys.readouterr()
    assert out == "\x1b[2mhm\x1b[22m\n\na\nb\n"
    assert err == "\x1b[2m[Lost.]\x1b[22m\n"


def test_in_a_pipe_there_is_the_answer_alone(capsys: pytest.CaptureFixture[str]):
    """A notice in its middle breaks no line of it."""
    screen = Screen()
    screen.show(Piece("reasoning", "hm"))
    screen.show(Piece("content", "a"))
    screen.notice("Lost.")
    screen.show(Piece("content", "b\n"))
    screen.end()
    assert capsys.readouterr() == ("ab\n", "[Lost.]\n")


def test_an_ordinary_end_needs_no_words():
    """`stop`."""
    assert remarks(answer_of({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})) == []


def test_a_halt_names_its_category():
    """And that the rest is not kept back somewhere."""
    results = [{"categories": {"violent_crimes": True, "hate": False}}]
    halted = answer_of(
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "content_filter"}]},
        {"moderation": {"output": {"results": results}}},
    )
    assert remarks(halted) == [
        "The safety policy stopped the answer (violent_crimes); nothing of the rest was sent."
    ]


def test_an_error_says_what_to_do():
    """With its code, so that docs/errors.md can be asked."""
    failed = answer_of({"error": {"code": "engine_restarted", "message": "It could not continue."}})
    assert remarks(failed) == ["It could not continue. (engine_restarted) /retry asks for another answer."]


def test_a_budget_is_said_in_the_servers_words():
    """Not as a limit of length that the user chose."""
    cut = answer_of(
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
        {"budget": {"message": "Used up."}},
    )
    assert remarks(cut, is_stopped=True) == ["Used up.", "Stopped."]


def test_the_usage_line_has_what_was_counted():
    """Cached tokens and reconnects if there are any, the conversation if one is kept."""
    counts = {
        "prompt_tokens": 1200,
        "completion_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 1000},
    }
    answer = answer_of({"model": "m", "conversation_id": "conv_1", "usage": counts})
    assert usage_line(answer, 1.25) == "m · 1,200 tokens in (1,000 cached) · 22 out · 1.2 s · conv_1"
    answer.opened("chatcmpl-1")
    assert usage_line(answer_of({"model": "m"}), 0.5) == "m · 0.5 s"
    assert "resumed" in usage_line(answer, 1.25)
