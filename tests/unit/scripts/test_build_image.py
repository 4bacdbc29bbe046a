"""scripts/build_image: how an image is run, what the build sees of pip, what of the page is followed."""

from __future__ import annotations

import json
import signal
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import cast

import pytest

from scripts.support.build_image import ROOT, TARGETS, checks, node_commands, options_of, pip_settings
from scripts.support.built_image import Image

CONFIG = {
    "Env": ["PATH=/opt/bin:/bin", "A=b=c"],
    "Entrypoint": ["python", "-m", "app"],
    "Healthcheck": {"Test": ["CMD", "python", "check.py"]},
    "WorkingDir": "/opt/tokenring",
    "User": "tokenring",
    "StopSignal": "SIGTERM",
}


def test_an_image_is_run_as_its_configuration_says(tmp_path: Path) -> None:
    """As its user, in its folder, with its variables and no others; those of the run win."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/:/sh\ntokenring:x:10001:10002::/:/sh\n")
    image = Image.read(json.dumps({"Docker": {"config": CONFIG}}), tmp_path)
    assert (image.entrypoint, image.health) == (["python", "-m", "app"], ["python", "check.py"])
    assert image.stop_signal is signal.SIGTERM
    assert image.command(["sh"], {"A": "d"}) == [
        *("--userspec=10001:10002", str(tmp_path), "env", "-i", "-C", "/opt/tokenring"),
        *("PATH=/opt/bin:/bin", "A=d", "sh"),
    ]


def test_the_build_gets_pips_settings_and_no_path_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are mounted under /run/host; an address is passed as it is; a variable goes before the file."""
    file = tmp_path / "pip.conf"
    file.write_text("[global]\ncert = /etc/other.pem\nindex-url = https://example.org/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_CERT", "/etc/mine.pem")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    arguments, mounts = pip_settings()
    assert arguments == {
        "PIP_INDEX_URL": "https://example.org/simple",
        "PIP_CERT": "/run/host/cert",
        "PIP_FIND_LINKS": "/run/host/find-links",
    }
    assert mounts == ["/etc/mine.pem:/run/host/cert:ro", f"{tmp_path}:/run/host/find-links:ro"]


def test_the_commands_of_the_page_are_followed_in_its_order() -> None:
    """A user, a checkout with its packages, a settings file, a unit, an admin key; systemd is left out."""
    settings, script = node_commands((ROOT / "docs/deploy.md").read_text("utf-8"))
    assert tomllib.loads(settings) == {"data_dir": "/var/lib/tokenring/data", "tp": 0}
    order = ("useradd --system", "scripts/setup", "tokenring.toml", "tokenring.service", "keys create")
    found = [next(number for number, line in enumerate(script) if part in line) for part in order]
    assert found == sorted(found)
    assert not any("systemctl" in line for line in script)


def test_every_target_is_checked() -> None:
    """The checks of the GPU image are those of the other, and two more; the third target is a node."""
    assert TARGETS == ["cpu", "gpu", "node"]
    assert [*checks("gpu")][:-2] == [*checks("cpu")]


class Ended:
    """An image whose every run ends with one status and one line on standard error."""

    def __init__(self, status: int, line: str) -> None:
        self.status, self.line = status, line

    @contextmanager
    def run(self, *_: str, **__: object) -> Iterator[Ended]:
        yield self

    def wait(self) -> int:
        return self.status

    def output(self) -> str:
        return ""

    def errors(self) -> str:
        return self.line


@pytest.mark.parametrize(
    ("status", "line", "passes"),
    [
        (78, "argument --port: not a number", True),
        (2, "argument --port: not a number", False),
        (78, "Traceback", False),
    ],
)
def test_a_wrong_setting_must_end_with_78_and_be_named(status: int, line: str, passes: bool) -> None:
    """A supervisor repeats every other status, and a person needs the flag's name."""
    [check] = [check for title, check in checks("cpu").items() if "wrong setting" in title]
    with nullcontext() if passes else pytest.raises(AssertionError):
        check(cast("Image", Ended(status, line)))


def test_buildah_takes_variables_in_two_spellings() -> None:
    """`run` takes --env, `bud` takes --build-arg; mounts are the same in both."""
    assert options_of({"A": "b"}, ["/x:/y:ro"]) == ["--env=A=b", "--volume=/x:/y:ro"]
    assert options_of({"A": "b"}, [], "--build-arg") == ["--build-arg=A=b"]
