"""What a model wrote, on a terminal: every language, and nothing that drives the terminal."""

from __future__ import annotations

import io

import pytest

from app.cli.terminal import has_style, printable


@pytest.mark.parametrize(
    "text",
    [
        "Grüße\n\tein",
        "مرحبا\u200f",
        "你好世界",
        "\U0001f469\u200d\U0001f467",
        "\u200c",
        "\u2066isolated\u2069",
    ],
)
def test_text_of_any_language_stays(text: str):
    """Joiners, marks and isolates of writing direction belong to a language."""
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jgone", "[2Jgone"),
        ("\x1b]52;c;cm0gLXJm\x07", "]52;c;cm0gLXJm"),
        ("\x9b31mred\x85", "31mred"),
        ("password: \rroot# \x08\x7f", "password: root# "),
        ("a\r\nb", "a\nb"),
        ("rm -rf \u202e/ oge", "rm -rf / oge"),
        ("half \ud83d a character", "half  a character"),
        ("null\x00", "null"),
    ],
)
def test_what_drives_a_terminal_is_gone(text: str, shown: str):
    """Escapes, C1, carriage returns, backspaces, overrides of direction."""
    assert printable(text) == shown


def test_only_a_terminal_has_styles(monkeypatch: pytest.MonkeyPatch):
    """A pipe has none, and no terminal whose user set NO_COLOR or that can do nothing."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = io.StringIO()
    assert not has_style(terminal)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert has_style(terminal)
    monkeypatch.setenv("TERM", "dumb")
    assert not has_style(terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_style(terminal)
