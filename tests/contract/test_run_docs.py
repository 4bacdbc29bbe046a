"""Pages and files for operators: commands parse, settings load, metrics exist, stop times are long enough."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app import settings
from app.api.metrics.tables import METRICS
from app.cli.main import main, parser
from app.engine.sglang.allowed_args import refusal_of
from app.metering.pricing import PriceTable

ROOT = Path(__file__).parents[2]
PAGES = (
    *(
        "abuse",
        "billing",
        "commands",
        "deploy",
        "keys",
        "litellm",
        "metrics",
        "models",
        "open-webui",
        "operate",
    ),
    *("remote", "settings", "sizing", "storage", "upgrade"),
)
FENCED = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"(?:^|[ /])tokenring ((?:serve|settings|keys|usage|backup|conversations|safety)\b.*)$", re.MULTILINE
)
STOP_SLACK_S = 60
"""docs/operate.md: a stop timeout is at least this much longer than `drain_timeout_s`."""
UNIT = ROOT / "deploy/systemd/tokenring.service"


def text_of(page: str) -> str:
    """A page of docs/."""
    return (ROOT / "docs" / f"{page}.md").read_text("utf-8")


def blocks(page: str, *languages: str) -> Iterator[str]:
    """The fenced blocks of a page in these languages."""
    return (body for language, body in FENCED.findall(text_of(page)) if language in languages)


def commands(page: str, *languages: str) -> list[str]:
    """The arguments of each `tokenring` command in a page's blocks, continued lines joined."""
    joined = (body.replace("\\\n", " ") for body in blocks(page, *(languages or ("sh", "text"))))
    return [line for body in joined for line in COMMAND.findall(body)]


def unit() -> configparser.SectionProxy:
    """The section [Service] of the systemd unit, with the last value of each key."""
    read = configparser.ConfigParser(strict=False, interpolation=None)
    read.read(UNIT)
    return read["Service"]


def default(name: str) -> float:
    """The default of a setting that is a number."""
    return float(next(s.default for s in settings.table() if s.name == name))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_the_page_is_one_that_the_command_line_takes(page: str) -> None:
    """Flags and verbs of the documented commands exist, in this order."""
    for line in commands(page):
        parser().parse_args(shlex.split(line, comments=True))


@pytest.mark.parametrize("page", ["billing", "commands", "deploy", "keys", "storage", "upgrade"])
def test_the_commands_that_need_no_id_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of a `sh` block ends with 0 on a new store, in the order of the page."""
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "create", "--name", "first", "--init"]) == 0
    runnable = commands(page, "sh")
    assert runnable
    for line in runnable:
        assert main(shlex.split(line.replace("/backups/", "backup-of-"), comments=True)) == 0, line


def test_the_pages_have_commands() -> None:
    """The search for commands finds those that are known to stand there."""
    documented = [line for page in PAGES for line in commands(page)]
    assert "usage --verify" in documented
    assert any(line.startswith("serve --engine remote") for line in documented)
    assert len(documented) >= 20


@pytest.mark.parametrize("page", ["settings", "billing", "deploy", "models"])
def test_every_settings_file_of_the_page_loads(page: str, tmp_path: Path) -> None:
    """Each TOML block is a settings file that `serve` accepts, prices and arguments of SGLang included."""
    examples = list(blocks(page, "toml"))
    assert examples
    for number, example in enumerate(examples):
        file = tmp_path / f"{number}.toml"
        file.write_text(example)
        loaded = settings.load({}, {}, file)
        PriceTable.parse(loaded.prices)
        assert not any(map(refusal_of, loaded.engine_args.get("sglang", {})))


@pytest.mark.parametrize("page", PAGES)
def test_every_metric_that_the_page_names_exists(page: str) -> None:
    """A name that begins with tokenring_ is a metric's, or the beginning of several."""
    known = {metric.name for metric in METRICS}
    for name in set(re.findall(r"tokenring_[a-z_]+", text_of(page))):
        bare = name.removesuffix("_bucket").removesuffix("_count")
        assert bare in known or (name.endswith("_") and any(k.startswith(name) for k in known)), name


def test_the_systemd_unit_starts_what_the_command_line_takes_and_waits_long_enough() -> None:
    """Its command parses; it stops Tokenring alone, later than streams may take, and repeats no refusal."""
    service = unit()
    _, _, arguments = service["ExecStart"].partition(" -m app ")
    parser().parse_args(shlex.split(arguments))
    assert float(service["TimeoutStopSec"]) >= default("drain_timeout_s") + STOP_SLACK_S
    assert (service["KillMode"], service["RestartPreventExitStatus"]) == ("mixed", "78")


def services() -> dict[str, Any]:
    """The services of compose.yaml."""
    read: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text("utf-8"))
    services: dict[str, Any] = read["services"]
    return services


def docker_runs() -> list[str]:
    """The `docker run` commands that start a server, in README.md and docs/deploy.md."""
    texts = [(ROOT / "README.md").read_text("utf-8"), text_of("deploy")]
    joined = [text.replace("\\\n", " ") for text in texts]
    runs = [line for text in joined for line in re.findall(r"docker run .*", text)]
    return [line for line in runs if "-p 127.0.0.1:8000:8000" in line]


def test_containers_are_stopped_later_than_streams_may_take() -> None:
    """compose.yaml, and `docker run` in README.md and docs/deploy.md: Docker's own 10 s would cut streams."""
    assert len(docker_runs()) == 2
    times = [services()[name]["stop_grace_period"].removesuffix("s") for name in ("tokenring", "laptop")]
    times += [re.findall(r"--stop-timeout (\d+)", line)[0] for line in docker_runs()]
    assert min(map(float, times)) >= default("drain_timeout_s") + STOP_SLACK_S


def test_a_server_that_ended_is_started_again_wherever_it_runs() -> None:
    """After the engine's end, exit status 3, and after a crash, as suspended streams wait; not for ever."""
    assert {service["restart"] for service in services().values()} == {"on-failure:20"}
    assert all("--restart on-failure:20" in line for line in docker_runs())
    assert unit()["Restart"] == "on-failure"
    assert unit()["OOMPolicy"] == "continue"  # else the kernel's kill of one scheduler ends the unit


def test_no_container_is_killed_while_its_engine_restarts() -> None:
    """Its health check asks whether the process lives; the engine's state is `/readyz`, which only routes."""
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    checks = re.findall(r"^HEALTHCHECK .*CMD (.*)$", dockerfile, re.MULTILINE)
    assert checks == ['["python", "deploy/healthcheck.py"]'] * 2
    assert "/healthz" in (ROOT / "deploy/healthcheck.py").read_text("utf-8")
    assert dockerfile.count("STOPSIGNAL SIGTERM") == 2
    assert all("healthcheck" not in service for service in services().values())
    assert "/readyz" not in UNIT.read_text("utf-8")


def test_deployed_variables_are_settings() -> None:
    """Each TOKENRING_ variable of compose.yaml, the Dockerfile and docs/deploy.md is a setting's."""
    files = ("deploy/compose.yaml", "Dockerfile", "docs/deploy.md", "docs/keys.md")
    text = "".join((ROOT / name).read_text("utf-8") for name in files)
    assert set(re.findall(r"TOKENRING_[A-Z_]+", text)) <= {s.env for s in settings.table()}
