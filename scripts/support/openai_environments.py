"""Environments of their own for OpenAI's SDKs, against which tests/e2e checks the API.

`.venv-openai-newest` holds the newest `openai` the registry has (looked for once a day),
`tests/e2e/openai_sdk/node_modules` the pinned one from npm. Both are made when first needed.

usage: python -m scripts.support.openai_environments
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEWEST = ROOT / ".venv-openai-newest"
NODE_DIRECTORY = ROOT / "tests/e2e/openai_sdk"
MAX_AGE_S = 24 * 3600
# What pip and npm print when there is no way to the registry, and not when it lacks something.
UNREACHABLE = re.compile(
    "NewConnectionError|ConnectTimeoutError|NameResolutionError|Temporary failure in name resolution"
    "|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ENETUNREACH|ETIMEDOUT"
)


class Offline(Exception):
    """The registry cannot be reached and there is nothing from an earlier run."""


def newest_python() -> Path:
    """The interpreter that has the newest `openai`. Raises Offline, RuntimeError."""
    python, stamp = NEWEST / "bin/python", NEWEST / ".made"
    with _locked("openai-newest"):
        if _younger_than(stamp, MAX_AGE_S):
            return python
        usable = stamp.exists()
        if not usable:
            shutil.rmtree(NEWEST, ignore_errors=True)
            _run([sys.executable, "-m", "venv", "--without-pip", str(NEWEST)])
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        try:
            _run([*pip, "install", "--quiet", "--upgrade", "openai"])
        except Offline:
            if not usable:
                raise
            return python
        stamp.touch()
    return python


def node_driver() -> list[str]:
    """The command that runs the Node SDK's driver. Raises as `node_command`."""
    return node_command(NODE_DIRECTORY / "driver.mjs")


def node_command(script: Path) -> list[str]:
    """The command that runs a script with the packages of the lock file beside it.

    Raises Offline, RuntimeError, FileNotFoundError.
    """
    directory = script.parent
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise FileNotFoundError("node and npm")
    wanted = hashlib.sha256((directory / "package-lock.json").read_bytes()).hexdigest()
    stamp = directory / "node_modules/.made"
    with _locked(f"openai-node-{directory.name}"):
        if not stamp.exists() or stamp.read_text() != wanted:
            _run([npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(directory)])
            stamp.write_text(wanted)
    return [node, str(script)]


def _younger_than(stamp: Path, age_s: float) -> bool:
    return stamp.exists() and time.time() - stamp.stat().st_mtime < age_s


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    if UNREACHABLE.search(done.stderr):
        raise Offline(done.stderr.strip().splitlines()[-1])
    raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """One process at a time, of all test runs in this checkout."""
    with (ROOT / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Make both environments now."""
    print(newest_python())
    print(" ".join(node_driver()))


if __name__ == "__main__":
    main()
