"""The command line: usage errors are sentences, not tracebacks."""

from __future__ import annotations

import argparse
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version

import pytest
import structlog

from app.cli.main import EXIT_USAGE, main, parser
from app.settings import EXIT_CONFIG, table


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """`serve` sets up logging for its process: put it back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_every_setting_is_a_flag_of_serve():
    """`serve` takes one flag per setting."""
    for setting in table():
        value = setting.choices[0] if setting.choices else "7"
        args = parser().parse_args(["serve", setting.flag, value])
        assert getattr(args, setting.name) == value


@pytest.mark.parametrize("flags", [["--resume", "5"], ["--nope", "1"], ["--engine", "vllm"]])
def test_unknown_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]):
    """A flag that is unknown, or only begins like one, is a usage error."""
    with pytest.raises(SystemExit) as exit_:
        parser().parse_args(["serve", *flags])
    assert exit_.value.code == EXIT_USAGE
    assert flags[0] in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` is the installed one, and needs no command."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"tokenring {version('tokenring')}\n")


@pytest.mark.parametrize(("argv", "status"), [([], 2), (["nonsense"], 2), (["serve", "--nonsense"], 78)])
def test_a_wrong_command_line_has_its_own_status(argv: list[str], status: int) -> None:
    """Only commands that a supervisor repeats end with 78; without a command it is 2."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == status


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "--port"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
        (["--engine", "scripted", "--port", "0", "--scripted", "speed=9"], "speed"),
        (["--engine", "scripted", "--port", "0", "--scripted", "rate=fast"], "rate"),
        (["--engine", "scripted", "--port", "0", "--scripted", "fault=explode"], "fault"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_wrong_settings_end_the_command(flags, words, capsys, monkeypatch, tmp_path):
    """A setting that cannot be honoured ends `serve` with status 78, and its last line names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOKENRING_API_KEY", raising=False)
    assert main(["serve", *flags]) == EXIT_CONFIG
    lines = capsys.readouterr().err.strip().splitlines()
    assert words in lines[-1]
    assert lines[-1].startswith("tokenring: ")


def test_a_bad_price_ends_the_command(capsys, monkeypatch, tmp_path):
    """A price that cannot be read ends `serve` before it takes requests, with a line that names the entry."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenring.toml").write_text('[[prices]]\nmodel = "llama"\ninput = "0.0000001"\noutput = 1')
    assert main(["serve", "--engine", "scripted", "--port", "0"]) == EXIT_CONFIG
    assert "entry 1 (llama): input" in capsys.readouterr().err.splitlines()[-1]


def test_port_in_use_is_said(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path):
    """A port that another program holds is an error in words."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--engine", "scripted", "--port", str(port)]) == EXIT_CONFIG
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_command_starts_without_the_libraries_that_it_does_not_need():
    """`--help`, `keys` and `usage` load neither the classifiers' numpy nor pydantic, SGLang or a plot."""
    slow = {"matplotlib", "numpy", "onnxruntime", "pydantic", "sglang", "sklearn", "torch"}
    code = f"import sys, app.cli.main as m; m.parser(); print(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "[]\n"


def test_the_server_starts_without_the_libraries_that_it_does_not_need():
    """Without a policy file, prices and an issuer nothing is checked or asked; plots are for commands."""
    slow = {"aiohttp", "matplotlib", "pydantic", "sglang", "sklearn", "torch"}
    code = (
        "import sys, app.api.server, app.runtime; from app.safety.policies.policy_file import read;"
        " from app.metering.pricing import PriceTable; read(None); PriceTable.parse(());"
        f" print(sorted({slow} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "[]\n"


def test_every_flag_of_every_command_has_a_help_text() -> None:
    """No flag, argument or subcommand is listed without words."""
    left = [parser()]
    silent = []
    while left:
        commands = left.pop()
        for action in commands._actions:  # argparse has no public list
            if isinstance(action, argparse._SubParsersAction):
                left += action.choices.values()
                silent += [choice.dest for choice in action._choices_actions if not choice.help]
            elif not action.help:
                silent.append(f"{commands.prog} {action.dest}")
    assert silent == []
