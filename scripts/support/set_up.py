"""Brings .venv in line with requirements/: the work behind scripts/setup.

Runs on the bare standard library. Whatever an earlier run left behind, killed at any point, the next one
repairs; two at the same time take turns.
"""

import argparse
import csv
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP = VENV / "tokenring-setup"
TORCH = "torch==2.13.0"
# The first Python that works, and the first newer one that does not: SGLang pins outlines, which pins
# outlines_core 0.1.26, whose last wheel is for 3.12.
OLDEST_PYTHON = (3, 11)
TOO_NEW_PYTHON = (3, 13)
LOCKS = {"cpu": "cpu.txt", "gpu": "gpu-lock.txt"}
# What a set-up from nothing writes: into .venv, and as wheels, which pip keeps in its temporary folder until
# a step ends, and in its cache. Measured: docs/log/2026-11.md, 2026-11-27.
VENV_GB = {"cpu": 2.7, "cpu, torch with CUDA": 6.0, "gpu": 10.0, "image": 1.0}
WHEELS_GB = {"cpu": 0.7, "cpu, torch with CUDA": 3.0, "gpu": 4.1, "image": 0.5}
HEARTBEAT_S = 5.0
NOT_COMPILED = r"/(tests?|multimodal_gen|sglang/test|site-packages/pip)/"
# What tests run beside Python, and Debian's package with it.
PROGRAMS = {"chromium": "chromium", "nginx": "nginx-light", "caddy": "caddy", "promtool": "prometheus"}
APT = ["apt-get", "-qq", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"]
APT_AGAIN_S = 24 * 3600
SYSTEM_PROGRAMS = ("/usr/sbin", "/usr/local/sbin")
SYSTEMD = Path("/run/systemd/system")
HINTS = {
    "No space left on device": "the disk is full",
    "NewConnectionError": "the package index cannot be reached: is the network up?",
    "NameResolutionError": "the package index cannot be reached: is the network up?",
    "CERTIFICATE_VERIFY_FAILED": "the index's certificate is not trusted: PIP_CERT names another authority",
    "Could not find a version": "no package index has it: is the network up? (pip's settings apply)",
    "ensurepip": "this Python has no venv module (Debian, Ubuntu: apt install python3-venv)",
}


class SetupError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


def main() -> int:
    """Bring .venv up to date and return the exit status."""
    options = parse(sys.argv[1:])
    profile = options.profile or ("gpu" if is_image() or has_nvidia_gpu() else "cpu")
    names = [profile, "dev"] if options.dev else [profile]
    files = [ROOT / "requirements" / f"{name}.txt" for name in names]
    # An image's own packages are left as they are; elsewhere every version is given.
    lock = None if options.system_site_packages or is_image() else ROOT / "requirements" / LOCKS[profile]
    wanted = fingerprint([*files, *([lock] if lock else [])])
    try:
        if not is_current(wanted):
            check_python(sys.version_info[:2])
            with turn():
                if not is_current(wanted):
                    install(profile, files, lock)
                    STAMP.write_text("\n".join([*wanted, ""]))
        if options.dev:
            add_programs()
    except SetupError as error:
        print(f"tokenring: set-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tokenring: set-up interrupted; the next run continues it", file=sys.stderr)
        return 130
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of scripts/setup."""
    parser = argparse.ArgumentParser(prog="scripts/setup", description="Make .venv fit for this checkout.")
    parser.add_argument("--dev", action="store_true", help="with what checks and tests need")
    parser.add_argument("--profile", choices=["cpu", "gpu"], help="instead of looking for an NVIDIA GPU")
    parser.add_argument(
        "--system-site-packages", action="store_true", help="use what the system's Python has"
    )
    return parser.parse_args(arguments)


def is_image() -> bool:
    """Whether .venv lies over the packages of the system's Python, as in the `gpu` image."""
    try:
        return "include-system-site-packages = true" in (VENV / "pyvenv.cfg").read_text()
    except OSError:
        return False


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver shows this machine a GPU."""
    if Path("/dev/nvidia0").exists():
        return True
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True, check=False).stdout != b""


def fingerprint(files: list[Path]) -> list[str]:
    """One line per thing that .venv depends on; the stamp must hold them all."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = json.dumps([pyproject["build-system"], pyproject["project"], pyproject["tool"]["setuptools"]])
    inputs = {path.name: path.read_bytes() for path in files} | {"package": package.encode()}
    digests = [f"{name} {hashlib.sha256(content).hexdigest()}" for name, content in inputs.items()]
    return [*digests, TORCH, f"at {ROOT}"]


def is_current(wanted: list[str]) -> bool:
    """Whether an earlier run completed for these inputs and its interpreter is still there."""
    try:
        return set(wanted) <= set(STAMP.read_text().splitlines()) and (VENV / "bin" / "python").exists()
    except OSError:
        return False


@contextmanager
def turn() -> Iterator[None]:
    """Hold the lock of this checkout's set-up; the kernel drops it with the process."""
    with (ROOT / ".setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("tokenring: another set-up is running here, waiting for it", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(profile: str, files: list[Path], lock: Path | None) -> None:
    """Do the four steps, each safe to repeat."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"tokenring: {text}  ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)

    requirements = [argument for path in files for argument in ("-r", str(path))]
    pins = sum("==" in line for path in files for line in path.read_text().splitlines())
    machine = "an NVIDIA GPU" if profile == "gpu" else "the CPU"
    say(f"[1/4] .venv with Python {sys.version.split()[0]}, for {machine}")
    STAMP.unlink(missing_ok=True)
    make_venv(say, [] if lock else ["--system-site-packages"])
    check_disk(kind_of_install(profile) if lock else "image")
    forget_damaged(say)
    say(f"[2/4] {TORCH}")
    constraints = ["-c", str(lock)] if lock else []
    pip("install", TORCH, *constraints, say=say)
    say(f"[3/4] {pins} pinned packages")
    # cpu.txt is complete and leaves out what SGLang asks for in vain; gpu.txt lets pip add the rest.
    pip("install", *(["--no-deps"] if profile == "cpu" else constraints), *requirements, say=say)
    for site in VENV.glob("lib/python3.*/site-packages"):
        join_toolkit(site / "nvidia" / "cu13", VENV / "cuda")
    say("[4/4] this checkout, byte code")
    pip("install", "--no-deps", "--no-build-isolation", "--no-index", "-e", str(ROOT), say=say)
    compile_all(say)
    say("installed")


def add_programs() -> None:
    """Install the programs that tests need and the machine lacks; say in one line which are missing still."""
    missing = missing_programs()
    if not missing:
        return
    problem = why_not_apt()
    if problem is None:
        with turn():
            problem = apt_install([PROGRAMS[name] for name in missing])
        missing = missing_programs()
    if missing:
        packages = " ".join(PROGRAMS[name] for name in missing)
        print(
            f"tokenring: without {', '.join(missing)}, whose tests are skipped ({problem});"
            f" on Debian: apt-get install --no-install-recommends {packages}",
            file=sys.stderr,
        )


def missing_programs() -> list[str]:
    """The programs of PROGRAMS that are not on this machine."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_PROGRAMS])
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def why_not_apt() -> str | None:
    """The reason for which nothing is installed by apt here; None where it is."""
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    if os.geteuid() != 0:
        return "only root can install them"
    if SYSTEMD.exists():
        return "their packages would start services on this machine"
    attempt = VENV / "tokenring-apt"
    if attempt.exists() and time.time() - attempt.stat().st_mtime < APT_AGAIN_S:
        return "apt-get failed today; remove .venv/tokenring-apt to try again"
    return None


def apt_install(packages: list[str]) -> str:
    """Install Debian's packages, one by one; returns what went wrong with the last that failed."""

    def say(text: str) -> None:
        print(f"tokenring: apt-get: {text}", file=sys.stderr, flush=True)

    problem = ""
    say(f"installing {', '.join(packages)}, for tests")
    for arguments in (["update"], *(["install", "-y", "--no-install-recommends", name] for name in packages)):
        try:
            run(["env", "DEBIAN_FRONTEND=noninteractive", *APT, *arguments], say)
        except SetupError as error:
            problem = f"apt-get {arguments[0]} failed: {str(error).splitlines()[0]}"
            (VENV / "tokenring-apt").touch()
    return problem


def make_venv(say: Callable[[str], None], options: Sequence[str] = ()) -> None:
    """Create .venv, in place of one whose interpreter or pip is gone."""
    fit = f"import pip, sys; sys.exit(not {OLDEST_PYTHON} <= sys.version_info < {TOO_NEW_PYTHON})"
    probe = [str(VENV / "bin" / "python"), "-Ic", fit]
    if VENV.exists():
        with suppress(OSError):
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return
        say("the .venv found does not run, or has a Python that cannot work: making a new one")
        shutil.rmtree(VENV)
    # Resolved, because the interpreter running this may be the .venv's own link to it.
    run([str(Path(sys.executable).resolve()), "-Im", "venv", *options, str(VENV)], say)


def check_python(version: tuple[int, ...]) -> None:
    """Refuse an interpreter, by its (major, minor), that the pinned packages have no builds for."""
    if not OLDEST_PYTHON <= version < TOO_NEW_PYTHON:
        raise SetupError(
            f"Python {version[0]}.{version[1]} cannot work; 3.11 and 3.12 can:"
            " name one with PYTHON=/path/to/python"
        )


def kind_of_install(profile: str) -> str:
    """The row of VENV_GB and WHEELS_GB: PyPI, which pip asks unless told, has torch with CUDA alone."""
    command = [str(VENV / "bin" / "python"), "-Im", "pip", "config", "list"]
    settings = subprocess.run(command, capture_output=True, check=False, text=True).stdout
    if profile == "cpu" and not re.search(r"\.(index-url|extra-index-url|find-links)=", settings):
        return "cpu, torch with CUDA"
    return profile


def check_disk(kind: str) -> None:
    """Refuse early where a fresh install cannot fit, on whichever disk."""
    if any(VENV.glob("lib/python3.*/site-packages/torch/version.py")):
        return
    for needed_gb, places in disk_needed(kind):
        free_gb = shutil.disk_usage(places[0]).free / 1e9
        if free_gb < needed_gb:
            shown = " and ".join(map(str, places))
            raise SetupError(
                f"{shown}: needs about {needed_gb:.0f} GB of disk, {free_gb:.1f} GB are free;"
                " TMPDIR and PIP_CACHE_DIR name other disks for pip, PIP_NO_CACHE_DIR=1 takes its cache away"
            )


def disk_needed(kind: str) -> list[tuple[float, list[Path]]]:
    """The GB that an install writes to each disk, and the folders that it has there."""
    places = {VENV: VENV_GB[kind], Path(tempfile.gettempdir()): WHEELS_GB[kind]}
    if os.environ.get("PIP_NO_CACHE_DIR", "") in {"", "0", "off", "false", "no"}:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        places[Path(os.environ.get("PIP_CACHE_DIR") or home / "pip")] = WHEELS_GB[kind]
    needed: dict[int, tuple[float, list[Path]]] = {}
    for place, size_gb in places.items():
        there = next(path for path in (place, *place.absolute().parents) if path.exists())
        total_gb, seen = needed.get(there.stat().st_dev, (0.0, []))
        needed[there.stat().st_dev] = (total_gb + size_gb, [*seen, there])
    return list(needed.values())


def join_toolkit(packages: Path, toolkit: Path) -> None:
    """Lay NVIDIA's packages out as a CUDA toolkit: linkers want `lib64`, and names without a version."""
    shutil.rmtree(toolkit, ignore_errors=True)
    if not (packages / "bin" / "nvcc").exists():
        return
    libraries = toolkit / "lib64"
    libraries.mkdir(parents=True)
    for folder in ("bin", "include", "nvvm"):
        (toolkit / folder).symlink_to(packages / folder)
    for library in (packages / "lib").iterdir():
        (libraries / library.name).symlink_to(library)
        bare = libraries / re.sub(r"\.so\.[0-9.]+$", ".so", library.name)
        if not bare.is_symlink():
            bare.symlink_to(library)


def forget_damaged(say: Callable[[str], None]) -> None:
    """Drop the record of each package that a killed run left incomplete, so that pip installs it again."""
    for site in VENV.glob("lib/python3.*/site-packages"):
        for leftover in site.glob("~*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for package in site.glob("*.dist-info"):
            if not is_whole(package):
                say(f"repairing {package.name.removesuffix('.dist-info')}")
                shutil.rmtree(package)


def is_whole(package: Path) -> bool:
    """Whether every file of the package's RECORD is there in its recorded size, byte code aside."""
    try:
        with (package / "RECORD").open(newline="") as record:
            return all(
                (package.parent / name).stat().st_size == int(size)
                for name, _, size in csv.reader(record)
                if size and not name.endswith(".pyc")
            )
    except OSError:
        return False


def pip(*arguments: str, say: Callable[[str], None]) -> None:
    """Run .venv's pip; byte code is made at the end, for all packages at once."""
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--no-color"]
    command, *rest = arguments
    run([str(VENV / "bin" / "python"), "-Im", "pip", command, "--no-compile", *options, *rest], say)


def run(command: list[str], say: Callable[[str], None]) -> None:
    """Run `command`, telling every few seconds what it is at; its output is shown if it fails."""
    lines: list[str] = []
    done = threading.Event()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        heartbeat = threading.Thread(target=beat, args=(lines, done, say), daemon=True)
        heartbeat.start()
        try:
            lines.extend(line.rstrip() for line in process.stdout or ())
        except KeyboardInterrupt:
            process.terminate()
            raise
        finally:
            done.set()
            heartbeat.join()
    if process.returncode != 0:
        raise SetupError(explain(command, process.returncode, lines))


def beat(lines: list[str], done: threading.Event, say: Callable[[str], None]) -> None:
    """Say every few seconds how far a running command is."""
    while not done.wait(HEARTBEAT_S):
        say(f"      {progress(lines)}")


def progress(lines: list[str]) -> str:
    """Where pip is, by its output so far; "working" for other commands."""
    num_packages = sum(
        line.startswith(("Collecting ", "Processing ", "Requirement already")) for line in lines
    )
    if num_packages and any(line.startswith("Installing collected") for line in lines):
        return f"installing {num_packages} packages"
    newest = next((line.strip() for line in reversed(lines) if "Downloading" in line), "")
    size = re.search(r"\([0-9.]+ [kMG]B\)", newest)
    name = re.search(r"Downloading (?:\S*/)?([A-Za-z0-9_.]+-[0-9][^-]*)", newest)
    if name:
        return f"{num_packages} packages found, fetching {name[1]} {size[0] if size else ''}".rstrip()
    return f"{num_packages} packages found" if num_packages else "working"


def explain(command: list[str], status: int, lines: list[str]) -> str:
    """The end of a failed command's output, led by the likely cause."""
    output = "\n".join(lines)
    cause = next((hint for mark, hint in HINTS.items() if mark in output), f"exit status {status}")
    tail = "\n".join(f"    {line}" for line in lines[-12:])
    return f"{cause}\n  {' '.join(command)}\n{tail}\n  run the same command again to continue"


def compile_all(say: Callable[[str], None]) -> None:
    """Byte-compile what the server imports, on all cores: else the first start takes four times as long."""
    site = next(VENV.glob("lib/python3.*/site-packages"))
    command = [str(VENV / "bin" / "python"), "-Im", "compileall", "-q", "-q", "-j", "0", "-x", NOT_COMPILED]
    # A file that no server imports may not compile (templates, other Pythons' syntax): not an error.
    with suppress(SetupError):
        run([*command, str(site), str(ROOT / "app")], say)


if __name__ == "__main__":
    sys.exit(main())
