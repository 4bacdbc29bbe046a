"""All commands keep the same promises: `--json`, exit statuses, errors in a line, and help for each."""

from __future__ import annotations

import argparse
import json
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.main import EXIT_USAGE, main, parser
from app.safety.classifiers import bundled_models
from app.store.backup import make_missing
from tests.support.servers import shipped_models

PROCESSES = frozenset({"serve", "node"})
"""They run until they are stopped, and print logs."""
OVER_STORE = {
    "usage": "usage",
    "backup": "backup copy.db",
    "conversations export": "conversations export",
    "conversations purge": "conversations purge --deleted-before 1",
    "keys create": "keys create --name ann",
    "keys list": "keys list",
    "keys update": "keys update ID --rpm 5",
    "keys rotate": "keys rotate ID",
    "keys expire": "keys expire ID",
    "keys revoke": "keys revoke ID",
    "safety report": "safety report",
}
"""Each command over a store, as it is typed; ID is a key's."""
ALONE = {
    "doctor": "doctor --model scripted --engine scripted",
    "settings": "settings",
    "safety check": "safety check hello",
    "safety explain": "safety explain text.txt",
    "safety eval": "safety eval rows.jsonl",
}
"""Each command that needs neither store nor server."""
OF_SERVER = {"chat": "chat hello", "top": "top"}
"""Each command that asks a server."""


def commands(top: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """All commands by name, those of groups too."""
    groups = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    for group in groups:
        for word, below in group.choices.items():
            yield from commands(below, f"{name} {word}".strip())
    if not groups:
        yield name, top


def flags_of(command: argparse.ArgumentParser) -> set[str]:
    """The flags of a command."""
    return {flag for action in command._actions for flag in action.option_strings}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with the files that commands read, and a process without settings."""
    monkeypatch.chdir(tmp_path)
    for name in ("TOKENRING_API_KEY", "TOKENRING_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(bundled_models, "load", shipped_models)
    monkeypatch.setattr("sys.stdin", None)
    (tmp_path / "text.txt").write_text("hello")
    rows = [{"text": f"hello {label}", "label": label, "category": "S1", "source": "own"} for label in (0, 1)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_each_command_has_a_row_here():
    """A new command is walked too."""
    assert {name for name, _ in commands(parser())} == {*OVER_STORE, *ALONE, *OF_SERVER, *PROCESSES}


def test_each_command_prints_json_on_request():
    """Whatever prints a result has `--json`."""
    assert {name for name, command in commands(parser()) if "--json" not in flags_of(command)} == PROCESSES


def test_each_flag_has_help():
    """`--help` says what each flag and argument is for."""
    for name, command in commands(parser()):
        assert [action.dest for action in command._actions if not action.help] == [], name


@pytest.mark.parametrize("line", OVER_STORE.values(), ids=OVER_STORE)
def test_without_a_store_a_command_says_where_it_looked(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    """Status 2, nothing on standard output, no new store, and a line that names `--data-dir`."""
    assert main(shlex.split(line.replace("ID", "tr-000000000000"))) == EXIT_USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tokenring: ")
    assert str(folder / "data") in err
    assert "--data-dir" in err
    assert not (folder / "data").exists()


def made_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The id of a key in a new store."""
    make_missing(folder / "data")
    assert main(["keys", "create", "--name", "bob", "--json"]) == 0
    key_id: str = json.loads(capsys.readouterr().out)["id"]
    return key_id


@pytest.mark.parametrize("line", OVER_STORE.values(), ids=OVER_STORE)
def test_with_a_store_standard_output_is_one_json_object(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    """Status 0; what else there is to say is on standard error."""
    key_id = made_key(folder, capsys)
    assert main([*shlex.split(line.replace("ID", key_id)), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


@pytest.mark.parametrize("line", ALONE.values(), ids=ALONE)
def test_alone_standard_output_is_one_json_object(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    """Status 0, or 1 if doctor finds a failure on this machine."""
    status = main([*shlex.split(line), "--json"])
    assert status == 0 or (status == 1 and line.startswith("doctor"))
    assert isinstance(json.loads(capsys.readouterr().out), dict)


@pytest.mark.parametrize("line", OF_SERVER.values(), ids=OF_SERVER)
def test_without_a_server_a_command_says_how_to_start_one(
    line: str, folder: Path, capfd: pytest.CaptureFixture[str]
):
    """Status 2 at once, nothing on standard output."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main([*shlex.split(line), "--url", f"http://127.0.0.1:{port}"]) == EXIT_USAGE
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"tokenring: No server answers at http://127.0.0.1:{port}. Start one with")


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch, folder: Path):
    """Status 130, as shells have it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.cli.store.settings_of", interrupt)
    assert main(["usage"]) == 130
