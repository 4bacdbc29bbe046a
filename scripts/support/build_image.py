"""Builds the Dockerfile's targets with buildah on stand-ins for their base images, and runs what comes out.

For a machine that has neither Docker nor a registry of images, as root, with buildah and debootstrap. Every
instruction is executed by buildah. pip's settings on this machine (index, wheels, certificate) are passed to
the build as arguments and mounts, so that none stays in the image.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from scripts.support.built_image import Image, user_of

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ["cpu", "gpu", "node"]  # both images, and a machine without containers
SUITE = "bookworm"  # the Debian release with Python 3.11
PACKAGES = {"cpu": [], "gpu": ["python3-pip", "g++", "python3.11-dev", "numactl"]}
BASE_ARGUMENT = {"cpu": "PYTHON_IMAGE", "gpu": "SGLANG_IMAGE"}
# What SGLang's published image has, before ours: see its own Dockerfile.
PUBLISHED = ("torch==2.13.0", "sglang==0.5.20", "flashinfer_python[cu13]==0.6.18", "sglang-kernel==0.4.7")
CUBINS = "/usr/local/lib/python3.11/dist-packages/flashinfer_cubin"
STANDS_IN = {
    "cpu": f"Debian {SUITE} with its python3.11 stood in for python:3.11-slim",
    "node": f"Debian {SUITE} without a GPU and without systemd stood in for a node",
    "gpu": f"Debian {SUITE} with its python3.11, the packages of gpu-lock.txt and an empty flashinfer_cubin"
    " stood in for lmsysorg/sglang:v0.5.20: Ubuntu, Python 3.12, a CUDA toolkit, kernels in that package",
}
NOT_RUN = (
    "systemd: the unit's program ran as its user with its variables, and nothing else of the unit",
    "the published base images, and Docker itself: its network, its volumes, --init, its restarts",
    "the interval of HEALTHCHECK (its command was run), and compose.yaml",
    "anything on a GPU: the server of the gpu image ran on the CPU",
)


class Builder:
    """buildah with a store of its own under `work`."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._buildah = ["buildah", "--root", str(work / "store"), "--runroot", str(work / "run")]

    def __call__(self, *arguments: str) -> str:
        """Run buildah and return its standard output; what it says meanwhile is shown."""
        done = subprocess.run([*self._buildah, *arguments], stdout=subprocess.PIPE, check=True, text=True)
        return done.stdout.strip()

    @contextmanager
    def mounted(self, image: str) -> Iterator[tuple[str, Path]]:
        """A container of `image` and its root folder; both are removed afterwards."""
        container = self("from", "--pull-never", image)
        try:
            yield container, Path(self("mount", container))
        finally:
            self("rm", container)


def options_of(arguments: Mapping[str, str], mounts: Iterable[str], variable: str = "--env") -> list[str]:
    """buildah's options for variables and mounts; `bud` takes variables as `--build-arg`."""
    variables = [f"{variable}={name}={value}" for name, value in arguments.items()]
    return [*variables, *(f"--volume={mount}" for mount in mounts)]


def pip_settings() -> tuple[dict[str, str], list[str]]:
    """pip's settings here as build arguments, and the mounts that files among them need.

    Raises CalledProcessError.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, check=True, text=True
    ).stdout
    read: dict[str, str] = {}
    for line in sorted(listed.splitlines(), reverse=True):  # ":env:", which wins, comes last
        name, _, value = line.partition("=")
        read[name.rpartition(".")[2]] = value.strip("'")
    arguments, mounts = {}, []
    for name in ("index-url", "cert", "find-links"):
        value = read.get(name, "")
        if value.startswith("/"):
            inside = f"/run/host/{name}"
            mounts.append(f"{value}:{inside}:ro")
            value = inside
        if value:
            arguments[f"PIP_{name.replace('-', '_').upper()}"] = value
    return arguments, mounts


def bare_root(work: Path, target: str) -> Path:
    """A clean Debian with Python, made once."""
    root = work / f"root-{target}"
    if not root.exists():
        made = work / "making"
        shutil.rmtree(made, ignore_errors=True)
        run("debootstrap", "--variant=minbase", SUITE, str(made))
        packages = ["python3.11", "python3.11-venv", "ca-certificates", *PACKAGES[target]]
        run("chroot", str(made), "apt-get", "update", "-q")
        install = ["apt-get", "install", "-yq", "--no-install-recommends", *packages]
        run("chroot", str(made), "env", "DEBIAN_FRONTEND=noninteractive", *install)
        made.rename(root)
    return root


def base_image(build: Builder, target: str) -> str:
    """The stand-in for the target's base image, made once."""
    name = f"localhost/base-{target}"
    if name in build("images", "--format", "{{.Name}}").splitlines():
        return name
    container = build("from", "scratch")
    try:
        root = Path(build("mount", container))
        run("cp", "-a", f"{bare_root(build.work, target)}/.", str(root))
        if target == "gpu":
            install_published(build, container, root)
        build("commit", "--format", "docker", container, name)
    finally:
        build("rm", container)
    return name


def install_published(build: Builder, container: str, root: Path) -> None:
    """Put what SGLang's image has into the system's Python of a container."""
    shutil.copy(ROOT / "requirements" / "gpu-lock.txt", root / "gpu-lock.txt")
    pip = [
        "python3.11",
        "-m",
        "pip",
        "install",
        "--break-system-packages",
        "--no-cache-dir",
        "--no-compile",
    ]
    command = [*pip, "-q", "--progress-bar=off", "-c", "/gpu-lock.txt", *PUBLISHED]
    build("run", "--isolation", "chroot", *options_of(*pip_settings()), container, "--", *command)
    (root / "gpu-lock.txt").unlink()
    cubins = root / CUBINS.lstrip("/")
    (cubins / "cubins" / "some").mkdir(parents=True)
    code = 'import pathlib\n__version__ = "0.6.18"\n\ndef get_cubin_dir():\n'
    (cubins / "__init__.py").write_text(f"{code}    return str(pathlib.Path(__file__).parent / 'cubins')\n")


def build_target(build: Builder, target: str) -> str:
    """Execute the Dockerfile up to `target`, and return the image's name."""
    base = base_image(build, target)
    name = f"localhost/tokenring:{target}"
    arguments, mounts = pip_settings()
    arguments[BASE_ARGUMENT[target]] = base
    options = [
        "--format",
        "docker",
        "--isolation",
        "chroot",
        "--layers=false",
        "--pull-never",
        "--target",
        target,
    ]
    build("bud", *options, *options_of(arguments, mounts, "--build-arg"), "-t", name, str(ROOT))
    return name


def check(build: Builder, target: str, name: str) -> list[str]:
    """Start the image in the ways that docs/deploy.md tells; returns what failed."""
    with build.mounted(name) as (_, root):
        image = Image.read(build("inspect", "--type", "image", name), root)
        failed = []
        for title, test in checks(target).items():
            began = time.monotonic()
            try:
                test(image)
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                failed.append(f"{target}: {title}")
                print(f"FAILED  {target}: {title}: {error}", flush=True)
            else:
                print(f"ok      {target}: {title} ({time.monotonic() - began:.0f} s)", flush=True)
        return failed


def check_node(build: Builder) -> list[str]:
    """Follow docs/deploy.md on a clean root without a container; returns what failed."""
    name = "docs/deploy.md's commands for systemd make a service that answers a chat and stops with 0"
    began = time.monotonic()
    with build.mounted(base_image(build, "cpu")) as (container, root):
        try:
            node = make_node(build, container, root)
            with node.run() as server:
                server.wait_until_ready()
                assert "200" in server.chat()
                assert server.stop() == 0, "exit status"
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            print(f"FAILED  node: {name}: {error}", flush=True)
            return [name]
    print(f"ok      node: {name} ({time.monotonic() - began:.0f} s)", flush=True)
    return []


def node_commands(page: str) -> tuple[str, list[str]]:
    """The settings file of docs/deploy.md, "systemd", and its commands, less those that ask systemd itself.

    The built-in model takes the place of the page's.
    """
    section = page.partition("\n### systemd\n")[2]
    commands, settings, keys = re.findall(r"```(?:text|toml)\n(.*?)```", section, re.DOTALL)[:3]
    asks_systemd = ("systemctl ", "journalctl ")
    script = [line for line in (commands + keys).splitlines() if not line.startswith(asks_systemd)]
    return re.sub(r"^(served_)?model.*\n", "", settings, flags=re.MULTILINE), script


def make_node(build: Builder, container: str, root: Path) -> Image:
    """Do what docs/deploy.md says under "systemd", and return the service; `git clone` copies this tree."""
    settings, script = node_commands((ROOT / "docs" / "deploy.md").read_text("utf-8"))
    (root / "root/tokenring.toml").write_text(settings)
    git = root / "usr/local/bin/git"
    git.write_text('#!/bin/sh\n[ "$1" = clone ] && cp -a /run/host/tree "$3"\n')
    git.chmod(0o755)
    arguments, mounts = pip_settings()
    tree = build.work / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    run("sh", "-c", f"tar -c --null -T - | tar -x -C {shlex.quote(str(tree))}", stdin=files)
    passed = options_of(arguments, [*mounts, f"{tree}:/run/host/tree:ro"])
    lines = "\n".join(["set -e", "cd /root", "mkdir -p /etc/systemd/system", *script])
    build("run", "--isolation", "chroot", *passed, container, "--", "sh", "-c", lines)
    unit = (root / "etc/systemd/system/tokenring.service").read_text()
    service = [line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#")]
    named = dict(service)
    variables = dict(value.split("=", 1) for key, value in service if key == "Environment")
    return Image(
        root=root,
        environ={"PATH": "/usr/bin:/bin", **variables},
        entrypoint=shlex.split(named["ExecStart"]),
        health=[],
        folder=named["WorkingDirectory"],
        user=user_of(root, named["User"]),
        stop_signal=signal.Signals[named["KillSignal"]],
    )


def checks(target: str) -> dict[str, Callable[[Image], None]]:
    """The checks of a target's image, by what holds if they pass."""
    named = ["keys", "create", "--init", "--name", "ops", "--scope", "admin"]
    may_write = "touch /data/x && ! touch /opt/tokenring/x"
    titled: dict[str, Callable[[Image], None]] = {
        "a chat is answered, HEALTHCHECK passes, caches lie in the volume, SIGTERM ends with 0": serves,
        "HEALTHCHECK follows --port": partial(follows_the_port, arguments=["--port", "9000"]),
        "HEALTHCHECK follows TOKENRING_PORT": partial(follows_the_port, environ={"TOKENRING_PORT": "9000"}),
        "`--entrypoint tokenring … keys create --init` writes to /data": partial(
            ends, status=0, says="tr-", arguments=named, entrypoint=["tokenring"]
        ),
        "a wrong setting is named, and ends with the status that no restart mends": partial(
            ends, status=78, says="--port", arguments=["--port", "many"]
        ),
        "the user 10001 may write /data, and not the program": partial(
            ends, status=0, arguments=["-c", may_write], entrypoint=["sh"]
        ),
    }
    if target == "gpu":
        missing = f"mkdir {CUBINS}/cubins/some/new && touch {CUBINS}/cubins/some/new/x && ! touch {CUBINS}/x"
        titled |= {
            "FlashInfer may write a kernel that its package lacks": partial(
                ends, status=0, arguments=["-c", missing], entrypoint=["sh"]
            ),
            "scripts/weight-cache sets nothing up, and asks for a model": has_the_weight_cache,
        }
    return titled


def serves(image: Image) -> None:
    """Start the entry point, ask for a chat and for health, look for caches, and stop it."""
    with image.run() as container:
        container.wait_until_ready()
        assert "200" in container.chat()
        assert container.health() == 0, "HEALTHCHECK"
        assert (image.root / "data" / "tokenring.db").exists(), "no store in /data"
        assert container.stop() == 0, "exit status"
    home = image.root / "home"
    assert not list(home.rglob(".cache")), "a cache in /home"


def follows_the_port(
    image: Image, arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> None:
    """Start the image with port 9000: it is healthy, and nobody listens on 8000."""
    with image.run(*arguments, environ=environ) as container:
        container.wait_for_health()
        assert container.get(9000, "/healthz")[0] == 200
        assert container.get(8000, "/healthz")[0] == 0, "8000 answers"


def ends(
    image: Image,
    *,
    status: int,
    says: str = "",
    arguments: Sequence[str] = (),
    entrypoint: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> None:
    """Run the image until it ends: with this exit status, and with these words in its output."""
    with image.run(*arguments, entrypoint=entrypoint, environ=environ) as container:
        assert container.wait() == status, container.errors()
        assert says in container.output() + container.errors(), container.errors()


def has_the_weight_cache(image: Image) -> None:
    """Run scripts/weight-cache without the arguments that it needs."""
    ends(image, status=2, says="--model-path", entrypoint=["scripts/weight-cache"])


def run(*command: str, stdin: bytes = b"") -> None:
    """Run a command that must succeed, in the checkout; its output is shown only if it does not."""
    done = subprocess.run(
        command, cwd=ROOT, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode != 0:
        output = done.stdout.decode(errors="replace")[-2000:]
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{output}")


def main(argv: Sequence[str] | None = None) -> int:
    """Build and check the targets asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/build_image", description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument(
        "--work", type=Path, help="folder for roots and images, kept (default: a temporary one)"
    )
    options = parser.parse_args(argv)
    missing = [
        program for program in ("buildah", "debootstrap", "nsenter", "ip") if not shutil.which(program)
    ]
    if missing or os.geteuid() != 0:
        print(f"needs root, and these programs: {', '.join(missing) or 'all are there'}", file=sys.stderr)
        return 2
    work = options.work or Path(tempfile.mkdtemp(prefix="tokenring-image-"))
    work.mkdir(parents=True, exist_ok=True)
    targets = options.target or TARGETS
    failed: list[str] = []
    try:
        build = Builder(work.resolve())
        for target in targets:
            if target == "node":
                failed += check_node(build)
                continue
            began = time.monotonic()
            name = build_target(build, target)
            print(
                f"ok      {target}: every instruction was executed ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
            failed += check(build, target, name)
    finally:
        if not options.work:
            run("buildah", "--root", str(work / "store"), "--runroot", str(work / "run"), "rm", "-a")
            shutil.rmtree(work)
    for line in (*(STANDS_IN[target] for target in targets), *(f"not run: {line}" for line in NOT_RUN)):
        print(f"note    {line}")
    print(f"{len(failed)} checks failed" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
