"""A machine whose programs, settings and files the test decides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.doctor import subject
from app.doctor.subject import Subject, gpus_of, later
from app.settings import Settings

GPU_LINE = "{index}, NVIDIA H200, {driver}, 143771, {used}"


class FakeMachine:
    """A folder as `/`, programs in its bin, and a server's settings and environment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        self.environ = {"PATH": str(self.bin), "HOME": str(root)}
        self.settings: dict[str, Any] = {"data_dir": root / "data", "port": 0}
        self.starting = False

    def program(self, name: str, script: str = "") -> Path:
        """Put a program on PATH; it is a script of /bin/sh."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def gpus(self, number: int, *, driver: str = "580.82.07", used_mib: int = 4, then: str = "") -> None:
        """Have nvidia-smi list so many GPUs; `then` answers other calls."""
        lines = [GPU_LINE.format(index=i, driver=driver, used=used_mib) for i in range(number)]
        listing = "\n".join(lines)
        self.program("nvidia-smi", f"case $1 in --query*) echo '{listing}';; *) {then or 'exit 9'};; esac")

    def file(self, path: str, text: str = "") -> Path:
        """Write a file below the root."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    @property
    def subject(self) -> Subject:
        """What doctor looks at."""
        environ = dict(self.environ)
        listing = later(lambda: gpus_of(environ))
        return Subject(Settings(**self.settings), environ, listing, self.starting, self.root)


@pytest.fixture
def fake(tmp_path: Path) -> FakeMachine:
    """A machine without a GPU."""
    return FakeMachine(tmp_path)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have packages be installed in these versions: `installed(torch="2.13.0")`."""
    from importlib import metadata

    true_version = metadata.version

    def install(**versions: str) -> None:
        monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or true_version(name))

    return install


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands have a fifth of a second."""
    monkeypatch.setattr(subject, "COMMAND_S", 0.2)
