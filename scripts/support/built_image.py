"""A built image as Docker would run it: its own process ids, network and mounts, its user, its variables."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

READY_S = 600.0
HEALTHY_S = 60.0
STOP_S = 90.0
KEY = "tr-image-check-0123456789abcdef"
CHAT = {"model": "default", "max_tokens": 8, "messages": [{"role": "user", "content": "What is Tokenring?"}]}
# $0 is the image's root. What follows replaces the shell, so that it has process id 1, as in a container.
SANDBOX = """
ip link set lo up && mount -t proc proc "$0/proc" && mount -t sysfs -o ro sysfs "$0/sys" || exit 125
mount --rbind /dev "$0/dev" || exit 125
exec chroot "$@"
"""
FETCH = """
import sys, urllib.error, urllib.request
headers = {"Authorization": "Bearer " + sys.argv[2], "Content-Type": "application/json"}
request = urllib.request.Request(sys.argv[1], sys.argv[3].encode() or None, headers)
try:
    with urllib.request.urlopen(request, timeout=60) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError:
    print(0)
"""


@dataclass(frozen=True, slots=True)
class Image:
    """A root folder, and what the Dockerfile says of how to run it."""

    root: Path
    environ: dict[str, str]
    entrypoint: list[str]
    health: list[str]
    folder: str
    user: str
    stop_signal: signal.Signals

    @classmethod
    def read(cls, inspected: str, root: Path) -> "Image":
        """Read what `buildah inspect` prints of an image in Docker's format."""
        config: dict[str, Any] = json.loads(inspected)["Docker"]["config"]
        test = config["Healthcheck"]["Test"]
        assert test[0] == "CMD"
        return cls(
            root=root,
            environ=dict(variable.split("=", 1) for variable in config["Env"]),
            entrypoint=config["Entrypoint"],
            health=test[1:],
            folder=config["WorkingDir"],
            user=user_of(root, config["User"]),
            stop_signal=signal.Signals[config["StopSignal"]],
        )

    def command(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
        """The arguments of `chroot` that run a command as the image does."""
        variables = [f"{name}={value}" for name, value in (self.environ | dict(environ or {})).items()]
        return [
            f"--userspec={self.user}",
            str(self.root),
            "env",
            "-i",
            "-C",
            self.folder,
            *variables,
            *command,
        ]

    @contextmanager
    def run(
        self,
        *arguments: str,
        entrypoint: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Iterator["Container"]:
        """A container of this image, as `docker run` starts it; it is killed afterwards."""
        variables = {"TOKENRING_API_KEY": KEY, **(environ or {})}
        command = self.command([*(entrypoint or self.entrypoint), *arguments], variables)
        isolated = [
            "unshare",
            "--mount",
            "--pid",
            "--net",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            SANDBOX,
            str(self.root),
        ]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [*isolated, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=errors
            )
            container = Container(self, variables, process, out, errors)
            try:
                yield container
            finally:
                with suppress(ChildProcessError, ProcessLookupError):
                    os.kill(container.pid, signal.SIGKILL)  # and with it all that has ids of its own there
                process.wait()


def user_of(root: Path, name: str) -> str:
    """Number of a user and of the user's group, as `chroot --userspec` takes them."""
    users = (line.split(":") for line in (root / "etc/passwd").read_text().splitlines())
    return next(f"{fields[2]}:{fields[3]}" for fields in users if fields[0] == name)


class Container:
    """A running container."""

    def __init__(
        self,
        image: Image,
        environ: Mapping[str, str],
        process: subprocess.Popen[bytes],
        out: IO[bytes],
        errors: IO[bytes],
    ) -> None:
        self._image = image
        self._environ = environ
        self._process = process
        self._files = {"out": out, "errors": errors}

    @property
    def pid(self) -> int:
        """The id, outside, of the process that has id 1 inside. Raises ChildProcessError: it has ended."""
        while self._process.poll() is None:
            children = (
                Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
            )
            if children:
                return int(children[0])
        raise ChildProcessError(f"ended with status {self._process.returncode}: {self.errors()}")

    def wait(self) -> int:
        """The exit status, once the command has ended."""
        return self._process.wait(READY_S)

    def stop(self) -> int:
        """Stop it as Docker does, and return the exit status."""
        os.kill(self.pid, self._image.stop_signal)
        return self._process.wait(STOP_S)

    def output(self) -> str:
        """Standard output so far."""
        return self._read("out")

    def errors(self) -> str:
        """The end of standard error so far."""
        return self._read("errors")[-2000:]

    def _read(self, name: str) -> str:
        file = self._files[name]
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")

    def health(self, environ: Mapping[str, str] | None = None) -> int:
        """The exit status of HEALTHCHECK's command, run inside with its variables, as Docker does."""
        entered = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "chroot"]
        command = [*entered, *self._image.command(self._image.health, {**self._environ, **(environ or {})})]
        return subprocess.run(command, capture_output=True, check=False).returncode

    def get(self, port: int, path: str, body: str = "") -> tuple[int, str]:
        """Status and body of a request from inside the container's network; status 0: nobody listens."""
        entered = ["nsenter", "--target", str(self.pid), "--net", sys.executable, "-c", FETCH]
        url = f"http://127.0.0.1:{port}{path}"
        done = subprocess.run([*entered, url, KEY, body], capture_output=True, check=True, text=True)
        status, _, text = done.stdout.partition(" ")
        return int(status), text.strip()

    def chat(self) -> str:
        """Status and text of a short answer."""
        status, body = self.get(8000, "/v1/chat/completions", json.dumps(CHAT))
        return f"{status} {body}"

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded."""
        self._wait(lambda: self.get(8000, "/readyz")[0] == 200, READY_S)

    def wait_for_health(self) -> None:
        """Wait until HEALTHCHECK passes."""
        self._wait(lambda: self.health() == 0, HEALTHY_S)

    def _wait(self, done: Any, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not after {limit_s:.0f} s: {self.errors()}")
            time.sleep(0.5)
