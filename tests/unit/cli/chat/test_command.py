"""Where the question of `tokenring chat` comes from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from app.cli.chat.command import _question
from app.cli.main import EXIT_USAGE, main
from app.errors import BadRequest

Pipe = Callable[[bytes], None]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    """Puts a text into a pipe that is standard input."""
    opened: list[IO[str]] = []

    def put(content: bytes) -> None:
        readable, writable = os.pipe()
        os.write(writable, content)
        os.close(writable)
        opened.append(os.fdopen(readable))
        monkeypatch.setattr("sys.stdin", opened[-1])

    yield put
    for file in opened:
        file.close()


def test_a_pipe_goes_below_the_question(pipe: Pipe):
    """Either may be absent."""
    pipe("世界\n".encode())
    assert _question("sum up:") == "sum up:\n\n世界"
    pipe(b"alone")
    assert _question(None) == "alone"
    pipe(b" \n")
    assert _question("alone") == "alone"
    pipe(b"")
    assert _question(None) is None


def test_a_file_is_read_and_devices_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`< /dev/null`, as of a service, is no text; nor is a closed standard input."""
    (tmp_path / "text").write_text("a file")
    with (tmp_path / "text").open() as file, Path("/dev/null").open() as null:
        monkeypatch.setattr("sys.stdin", file)
        assert _question(None) == "a file"
        monkeypatch.setattr("sys.stdin", null)
        assert _question("hi") == "hi"
        monkeypatch.setattr("sys.stdin", None)
        assert _question("hi") == "hi"


def test_what_is_no_text_is_an_error(pipe: Pipe):
    """An image in a pipe."""
    pipe(b"\x89PNG\xff")
    with pytest.raises(BadRequest, match="--image sends an image"):
        _question(None)


def test_an_argument_is_utf_8_whatever_the_locale_is(monkeypatch: pytest.MonkeyPatch):
    """Python hands over bytes that the locale lacks as halves of characters."""
    monkeypatch.setattr("sys.stdin", None)
    assert _question("é".encode().decode("ascii", "surrogateescape")) == "é"


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_not_sent(
    question: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As of a script whose variable is empty."""
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", question, "--url", "127.0.0.1:1"]) == EXIT_USAGE
    assert "The question is empty" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--json"], ["--no-store"]])
def test_without_a_question_and_a_terminal_nothing_can_be_done(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Before any server is asked."""
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", *flags, "--url", "127.0.0.1:1"]) == EXIT_USAGE
    assert "There is no question." in capsys.readouterr().err
