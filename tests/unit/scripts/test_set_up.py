"""scripts/setup: what it repairs, when it does nothing, and what it says when it cannot go on."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from scripts.support import set_up

ROOT = Path(__file__).parents[3]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site-packages of an empty .venv that set_up works on."""
    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    monkeypatch.setattr(set_up, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(set_up, "STAMP", tmp_path / ".venv" / "stamp")
    site = tmp_path / ".venv" / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    site.mkdir(parents=True)
    return site


def add_package(site: Path, name: str) -> Path:
    """Put an installed package of one module in `site`, as pip leaves it; returns the module."""
    module = site / f"{name}.py"
    module.write_text("x = 1\n")
    record = site / f"{name}-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text(
        f"{name}.py,sha256=abc,6\n__pycache__/{name}.pyc,sha256=abc,100\n{name}-1.0.dist-info/RECORD,,\n"
    )
    return module


def quiet(_: str) -> None:
    """Takes progress lines."""


def test_whole_packages_are_left_alone(site: Path) -> None:
    """A package with all its files stays installed, with or without byte code."""
    add_package(site, "whole")
    set_up.forget_damaged(quiet)
    assert (site / "whole-1.0.dist-info").exists()


@pytest.mark.parametrize("damage", ["missing", "truncated", "no record"])
def test_damaged_packages_are_installed_again(site: Path, damage: str) -> None:
    """A package that a killed run left incomplete is forgotten, so that pip installs it again."""
    module = add_package(site, "damaged")
    if damage == "missing":
        module.unlink()
    elif damage == "truncated":
        module.write_text("x")
    else:
        (site / "damaged-1.0.dist-info" / "RECORD").unlink()
    set_up.forget_damaged(quiet)
    assert not (site / "damaged-1.0.dist-info").exists()


def test_leftovers_of_a_killed_upgrade_go(site: Path) -> None:
    """pip's renamed copies (~package) are removed."""
    (site / "~orch").mkdir()
    (site / "~orch" / "__init__.py").touch()
    set_up.forget_damaged(quiet)
    assert not list(site.iterdir())


def test_a_venv_that_does_not_run_is_replaced(site: Path) -> None:
    """A .venv whose interpreter is gone is made anew; one that runs is kept."""
    python = set_up.VENV / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to("/nonexistent/python3")
    (site / "remains.py").touch()
    set_up.make_venv(quiet)
    assert subprocess.run([python, "-c", "import pip"], check=False).returncode == 0
    assert not (site / "remains.py").exists()

    (site / "kept.py").touch()
    set_up.make_venv(quiet)
    assert (site / "kept.py").exists()


def test_current_means_same_requirements_and_same_place(site: Path) -> None:
    """The stamp of a completed run covers its own requirements only, and no other directory."""
    requirements = set_up.ROOT / "cpu.txt"
    requirements.write_text("a==1\n")
    pyproject = set_up.ROOT / "pyproject.toml"
    pyproject.write_text("[build-system]\n[project]\n[tool.setuptools]\n")
    wanted = set_up.fingerprint([requirements])
    assert not set_up.is_current(wanted)

    (set_up.VENV / "bin").mkdir()
    (set_up.VENV / "bin" / "python").symlink_to(sys.executable)
    set_up.STAMP.write_text("\n".join([*wanted, "dev.txt abc"]))
    assert set_up.is_current(wanted)

    requirements.write_text("a==2\n")
    assert not set_up.is_current(set_up.fingerprint([requirements]))
    requirements.write_text("a==1\n")
    pyproject.write_text("[build-system]\n[project]\n[tool.setuptools]\n[tool.ruff]\nline-length=1\n")
    assert set_up.is_current(set_up.fingerprint([requirements]))
    (set_up.VENV / "bin" / "python").unlink()
    assert not set_up.is_current(wanted)


def test_two_runs_take_turns(site: Path) -> None:
    """A second set-up of the same checkout says that it waits, and goes on when the first is done."""
    code = (
        "import pathlib; from scripts.support import set_up\n"
        f"set_up.ROOT = pathlib.Path({str(set_up.ROOT)!r})\n"
        "with set_up.turn(): print('in')"
    )
    with set_up.turn():
        second = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert second.stderr is not None
        assert "waiting" in second.stderr.readline()
        assert second.poll() is None
    out, _ = second.communicate(timeout=30)
    assert out == "in\n"


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: Could not find a version that satisfies the requirement x", "is the network up?"),
        ("urllib3.exceptions.NameResolutionError: Failed to resolve", "is the network up?"),
        ("The virtual environment was not created because ensurepip is not available", "python3-venv"),
        ("something else", "exit status 3"),
    ],
)
def test_a_failed_step_names_the_cause(output: str, cause: str) -> None:
    """The likely cause leads, the command and the end of its output follow."""
    message = set_up.explain(["pip", "install", "x"], 3, ["first line", output])
    assert cause in message.splitlines()[0]
    assert "pip install x" in message
    assert output in message


def test_a_failing_command_raises_with_its_output(site: Path) -> None:
    """What a step printed before it failed is in the error."""
    with pytest.raises(set_up.SetupError, match="the disk is full"):
        set_up.run([sys.executable, "-c", "raise SystemExit('No space left on device')"], quiet)


def test_too_small_a_disk_is_refused_before_anything_is_downloaded(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says how much is needed and how much is free; one that has torch is not asked again."""
    monkeypatch.setitem(set_up.VENV_GB, "cpu", 10**9)
    with pytest.raises(set_up.SetupError, match=r"about 10000000\d\d GB of disk, [0-9.]+ GB are free"):
        set_up.check_disk("cpu")
    (site / "torch").mkdir()
    (site / "torch" / "version.py").touch()
    set_up.check_disk("cpu")


@pytest.mark.parametrize(
    ("profile", "settings", "kind"),
    [
        ("cpu", {}, "cpu, torch with CUDA"),
        ("cpu", {"PIP_CERT": "/ca.pem"}, "cpu, torch with CUDA"),
        ("cpu", {"PIP_FIND_LINKS": "/wheels"}, "cpu"),
        ("cpu", {"PIP_EXTRA_INDEX_URL": "https://example.org/cpu"}, "cpu"),
        ("gpu", {}, "gpu"),
    ],
)
def test_where_pip_knows_only_its_default_index_torch_has_cuda(
    profile: str, settings: dict[str, str], kind: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such an install writes three times as much."""
    (set_up.VENV / "bin").mkdir()
    (set_up.VENV / "bin" / "python").symlink_to(sys.executable)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert set_up.kind_of_install(profile) == kind
    assert {*set_up.VENV_GB} == {*set_up.WHEELS_GB} >= {kind}


def test_what_pip_writes_beside_the_venv_counts(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels lie in the temporary folder and in pip's cache; those on one disk are added up."""
    monkeypatch.delenv("PIP_NO_CACHE_DIR", raising=False)
    monkeypatch.setenv("PIP_CACHE_DIR", str(site / "not" / "yet"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(site))
    [(all_gb, places)] = set_up.disk_needed("gpu")
    assert all_gb == set_up.VENV_GB["gpu"] + 2 * set_up.WHEELS_GB["gpu"]
    assert places == [set_up.VENV, site, site]

    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/proc")
    assert sorted(gb for gb, _ in set_up.disk_needed("gpu")) == [
        set_up.WHEELS_GB["gpu"],
        set_up.VENV_GB["gpu"],
    ]


def test_a_venv_over_the_systems_packages_stays_one(site: Path) -> None:
    """In the `gpu` image a set-up without flags, as scripts/weight-cache asks for, finds everything done."""
    assert not set_up.is_image()
    (set_up.VENV / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = true\n")
    assert set_up.is_image()
    (set_up.VENV / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    assert not set_up.is_image()


def test_a_set_up_without_flags_has_nothing_to_do_in_the_gpu_image(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU in sight too: the folder is root's there, so that any write would fail."""
    (set_up.ROOT / "requirements").mkdir()
    (set_up.ROOT / "requirements" / "gpu.txt").write_text("a==1\n")
    (set_up.ROOT / "pyproject.toml").write_text("[build-system]\n[project]\n[tool.setuptools]\n")
    (set_up.VENV / "bin").mkdir()
    (set_up.VENV / "bin" / "python").symlink_to(sys.executable)
    (set_up.VENV / "pyvenv.cfg").write_text("include-system-site-packages = true\n")
    set_up.STAMP.write_text("\n".join(set_up.fingerprint([set_up.ROOT / "requirements" / "gpu.txt"])))
    monkeypatch.setattr(sys, "argv", ["set_up.py"])
    monkeypatch.setattr(set_up, "has_nvidia_gpu", lambda: False)
    assert set_up.main() == 0
    assert not (set_up.ROOT / ".setup.lock").exists()


def test_nvidias_packages_become_a_toolkit(site: Path) -> None:
    """Compilers find bin, include, nvvm and lib64, and libraries also under a name without a version."""
    packages, toolkit = site / "nvidia" / "cu13", set_up.VENV / "cuda"
    set_up.join_toolkit(packages, toolkit)
    assert not toolkit.exists()

    for name in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "lib/libcudadevrt.a"):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(name)
    for _ in range(2):
        set_up.join_toolkit(packages, toolkit)
    assert (toolkit / "bin" / "nvcc").read_text() == "bin/nvcc"
    assert (toolkit / "include" / "cuda.h").exists()
    assert (toolkit / "nvvm" / "bin" / "cicc").exists()
    assert (toolkit / "lib64" / "libcudart.so").read_text() == "lib/libcudart.so.13"
    assert {path.name for path in (toolkit / "lib64").iterdir()} == {
        *("libcudart.so", "libcudart.so.13", "libcudadevrt.a"),
    }


def run_setup(tmp_path: Path, pythons: dict[str, str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/setup alone, where PATH has only stand-ins for Python: what each does, in bash, by name."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "setup").write_text((ROOT / "scripts" / "setup").read_text())
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("dirname", "bash"):
        (tools / tool).symlink_to(f"/usr/bin/{tool}")
    for name, does in pythons.items():
        (tools / name).write_text(f"#!/bin/bash\n{does}\n")
        (tools / name).chmod(0o755)
    return subprocess.run(
        ["/usr/bin/bash", scripts / "setup"],
        env={**os.environ, "PATH": str(tools), "PYTHON": "", **env},
        capture_output=True,
        text=True,
        check=False,
    )


UNFIT = 'case "$2" in *sys.exit*) exit 1 ;; *) printf 3.13 ;; esac'
FIT = 'case "$2" in *set_up.py) echo "set up by $0" ;; esac'


def test_without_a_python_setup_names_what_it_needs(tmp_path: Path) -> None:
    """scripts/setup on a machine without a Python that runs says which it needs, and stops."""
    result = run_setup(tmp_path, {"python3": "exit 127"})
    assert result.returncode == 1
    assert "needs Python 3.11 or 3.12, found none" in result.stderr
    assert "cannot work" not in result.stderr


def test_a_python_that_cannot_work_is_named(tmp_path: Path) -> None:
    """Where the only Python is too new, its version and what it lacks are told before anything is fetched."""
    result = run_setup(tmp_path, {"python3": UNFIT})
    assert result.returncode == 1
    assert "python3 is Python 3.13, which cannot work" in result.stderr
    assert "outlines_core" in result.stderr
    assert result.stdout == ""


def test_an_older_python_beside_one_too_new_is_taken(tmp_path: Path) -> None:
    """python3 may be too new, where python3.12 is there."""
    result = run_setup(tmp_path, {"python3": UNFIT, "python3.12": FIT})
    assert result.stdout.startswith("set up by ")
    assert "python3.12" in result.stdout


def test_the_python_asked_for_is_not_replaced(tmp_path: Path) -> None:
    """PYTHON that cannot work is an error, though another could."""
    result = run_setup(tmp_path, {"mine": UNFIT, "python3.12": FIT}, PYTHON="mine")
    assert result.returncode == 1
    assert "mine is Python 3.13, which cannot work" in result.stderr


@pytest.mark.parametrize("version", [(3, 10), (3, 13), (3, 14)])
def test_set_up_refuses_a_python_without_builds(version: tuple[int, int]) -> None:
    """An interpreter outside the range is refused by its version, whoever starts set_up.py."""
    with pytest.raises(set_up.SetupError, match=rf"Python 3\.{version[1]} cannot work; 3.11 and 3.12 can"):
        set_up.check_python(version)


@pytest.mark.parametrize("version", [(3, 11), (3, 12)])
def test_set_up_takes_each_python_that_works(version: tuple[int, int]) -> None:
    """Both versions that all pinned packages have builds for."""
    set_up.check_python(version)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "working"),
        (["Collecting torch==2.13.0"], "1 packages found"),
        (
            ["Collecting a", "Collecting b", "  Downloading https://x/y/b-1.2-py3-none-any.whl (2.5 MB)"],
            "2 packages found, fetching b-1.2 (2.5 MB)",
        ),
        (
            [
                "Processing /wheels/a-1-py3-none-any.whl",
                "Requirement already satisfied: b",
                "Installing collected packages: a",
            ],
            "installing 2 packages",
        ),
    ],
)
def test_progress_tells_what_pip_is_at(lines: list[str], told: str) -> None:
    """How many packages, which one is being fetched, or that they are being installed."""
    assert set_up.progress(lines) == told


@pytest.fixture
def machine(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's programs: nginx and promtool without Chromium and Caddy, and an apt-get that fails."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in {"nginx": "", "promtool": "", "apt-get": "echo no network; exit 100"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    (programs / "env").symlink_to("/usr/bin/env")
    (programs / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(set_up, "SYSTEM_PROGRAMS", ())
    monkeypatch.setattr(set_up, "SYSTEMD", tmp_path / "systemd")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return programs


def test_what_apt_cannot_install_is_named_in_one_line(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The set-up goes on, and asks apt-get again a day later only."""
    for reason in ("apt-get install failed: exit status 100", "apt-get failed today"):
        set_up.add_programs()
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"tokenring: without chromium, caddy, whose tests are skipped ({reason}")
        assert last.endswith("apt-get install --no-install-recommends chromium caddy")


def test_what_is_missing_is_installed_by_its_package(machine: Path) -> None:
    """One package after another, after an update; what is there is left alone."""
    (machine / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {machine}/asked\n')
    set_up.add_programs()
    asked = (machine / "asked").read_text().split()
    assert [word for word in asked if word in {"update", "install", *set_up.PROGRAMS.values()}] == [
        "update",
        *("install", "chromium"),
        *("install", "caddy"),
    ]


def test_apt_is_asked_by_root_where_it_starts_no_service(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Elsewhere the line says what to type."""
    set_up.SYSTEMD.mkdir()
    set_up.add_programs()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    set_up.add_programs()
    first, second = capsys.readouterr().err.splitlines()
    assert "(their packages would start services on this machine)" in first
    assert "(only root can install them)" in second
