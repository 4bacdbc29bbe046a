"""The Dockerfile, compose.yaml, the units and the pages start the same server in the same way."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.healthcheck import port

ROOT = Path(__file__).parents[2]
UNITS = ("tokenring", "tokenring-weights")
TARGETS = ("cpu", "gpu")


def stage(target: str) -> list[tuple[str, str]]:
    """The instructions of a target of the Dockerfile, as name and arguments, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    begin = next(i for i, line in enumerate(lines) if line.endswith(f" AS {target}"))
    body = lines[begin:]
    end = next((i for i, line in enumerate(body) if i and line.startswith("FROM")), len(body))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in body[:end])]


def image_environ(target: str) -> dict[str, str]:
    """The variables that the image of a target sets."""
    settings = [word for name, rest in stage(target) if name == "ENV" for word in shlex.split(rest)]
    return dict(word.split("=", 1) for word in settings)


def unit(name: str) -> list[tuple[str, str]]:
    """The lines of a unit, as key and value; a key may come more than once."""
    lines = (ROOT / f"deploy/systemd/{name}.service").read_text("utf-8").splitlines()
    return [(key, value) for key, is_line, value in (line.partition("=") for line in lines) if is_line]


def unit_environ(name: str) -> dict[str, str]:
    """The variables that a unit sets."""
    return dict(value.split("=", 1) for key, value in unit(name) if key == "Environment")


def compose() -> dict[str, Any]:
    """The services of compose.yaml."""
    services: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text("utf-8"))["services"]
    return services


def docker_run(page: str) -> str:
    """The command of a page that starts a server in a container."""
    text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
    [line] = [line for line in re.findall(r"docker run .*", text) if "-p 127.0.0.1:8000:8000" in line]
    return line


PLACES = {
    **{target: (image_environ(target), "/data/") for target in TARGETS},
    **{name: (unit_environ(name), "/var/lib/tokenring") for name in UNITS},
}
"""By image or unit: the variables that it sets, and where its volume is."""
CACHES = """
import json, os, sys
from app.engine.sglang.platform import prepare_process
prepare_process()
assert not {"sglang", "huggingface_hub", "tvm_ffi"} & sys.modules.keys()

def caches():
    from sglang.kernels.jit.utils.compile.cache import cache_root
    from sglang.srt.environ import envs, third_party_cache_defaults
    from tvm_ffi.cpp import extension
    from huggingface_hub import constants
    found = dict(third_party_cache_defaults())
    found["sglang"] = envs.SGLANG_CACHE_DIR.get()
    found["deep_gemm"] = envs.SGLANG_DG_CACHE_DIR.get()
    found["cute_aot"] = envs.SGLANG_CUTE_AOT_CACHE_DIR.get()
    found["jit"] = str(cache_root())
    found["hub"] = constants.HF_HUB_CACHE
    found["home"] = os.path.expanduser("~")
    found["quack"] = os.environ["QUACK_CACHE_DIR"]
    return found

own = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")}
for place, environ in json.loads(sys.argv[1]).items():
    if not (child := os.fork()):
        os.environ.clear()
        os.environ.update(environ | own)
        prepare_process()
        print(json.dumps([place, caches()]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, place
"""


@pytest.fixture(scope="module")
def caches() -> dict[str, dict[str, str]]:
    """By place: the folders of SGLang, Triton, Inductor, CUDA, FlashInfer, DeepGEMM and the hub.

    A process for each, forked when torch is imported and nothing that reads its folders from the variables.
    """
    environs = json.dumps({place: environ for place, (environ, _) in PLACES.items()})
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CACHES, environs]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.timeout(300)  # torch and four times SGLang are imported, beside other tests
@pytest.mark.parametrize("place", PLACES)
def test_what_is_compiled_or_downloaded_outlives_the_process(
    caches: dict[str, dict[str, str]], place: str
) -> None:
    """All these folders are in the volume."""
    found, kept = caches[place], PLACES[place][1]
    assert len(found) == 11
    assert {name: path for name, path in found.items() if not path.startswith(kept)} == {}


def test_both_images_are_started_alike() -> None:
    """The same entry point, health check, user, port and variables; only the GPUs make a difference."""
    cpu, gpu = (dict(stage(target)) for target in TARGETS)
    for name in ("ENTRYPOINT", "HEALTHCHECK", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "WORKDIR"):
        assert cpu[name] == gpu[name], name
    more = set(image_environ("gpu")) - set(image_environ("cpu"))
    assert image_environ("cpu").items() <= image_environ("gpu").items()
    assert more == {
        "TOKENRING_TP",
        "SGLANG_WEIGHT_CACHE_SOCKET_TEMPLATE",
        "SGLANG_WEIGHT_CACHE_READY_TEMPLATE",
    }


@pytest.mark.parametrize("target", TARGETS)
def test_what_an_image_copies_reaches_the_builder(target: str) -> None:
    """Each source of a COPY exists, and .dockerignore lets it through."""
    passed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [source for name, rest in stage(target) if name == "COPY" for source in rest.split()[:-1]]
    assert {"scripts/weight-cache", "deploy/healthcheck.py"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == path or source.startswith(f"{path}/") for path in passed), source


def test_containers_have_what_a_gpu_needs_wherever_they_are_described() -> None:
    """README.md, docs/deploy.md and compose.yaml: GPUs, memory, limits, and the token of the hub."""
    for page in ("README.md", "docs/deploy.md"):
        words = docker_run(page)
        for flag in ("--gpus all", "--ipc host", "--init", "--cap-add SYS_NICE", "-e HF_TOKEN"):
            assert flag in words, (page, flag)
        assert dict(re.findall(r"--ulimit (\w+)=(-?\d+)", words)) == {"memlock": "-1", "nofile": "65536"}
    service = compose()["tokenring"]
    assert (service["ipc"], service["init"], service["cap_add"]) == ("host", True, ["SYS_NICE"])
    assert service["ulimits"] == {"memlock": -1, "nofile": 65536}
    assert "/models:ro" in docker_run("docs/deploy.md")
    for service in (compose()[name] for name in ("tokenring", "laptop")):
        assert {"HF_TOKEN", "HF_HUB_OFFLINE"} <= set(service["environment"])
        assert any(volume.endswith(":/models:ro") for volume in service["volumes"])
        assert service["ulimits"]["nofile"] == 65536


def test_doctor_is_run_as_the_server_is() -> None:
    """docs/operate.md gives it the unit's limits, variables and settings file, or the container's flags."""
    text = (ROOT / "docs/operate.md").read_text("utf-8").replace("\\\n", " ")
    [command] = re.findall(r"prlimit .* doctor .*", text)
    words = command.split()
    variables = {f"{name}={value}" for name, value in unit_environ("tokenring").items()}
    assert {variable for variable in variables if "WEIGHT" not in variable} <= set(words)
    lines = dict(unit("tokenring"))
    assert (lines["LimitNOFILE"], lines["LimitMEMLOCK"]) == ("65536", "infinity")
    assert {"--nofile=65536", "--memlock=unlimited"} <= set(words)
    assert words[words.index("-u") + 1] == lines["User"]
    assert words[-2:] == lines["ExecStart"].split()[-2:]
    [container] = re.findall(r"docker run .* doctor .*", text)
    flags = re.compile(r"--(?:gpus|ipc|cap-add|ulimit) \S+|-[ve] \S+|--model \S+")
    assert flags.findall(container) == flags.findall(docker_run("docs/deploy.md"))


def test_the_units_give_what_containers_have() -> None:
    """Locked memory, open files, tokens from a file; server and weight cache look for the same sockets."""
    for name in UNITS:
        lines = unit(name)
        assert {("LimitMEMLOCK", "infinity"), ("LimitNOFILE", "65536")} <= set(lines)
        assert ("EnvironmentFile", "-/etc/tokenring/environment") in lines
        wrong_arguments = "78" if name == "tokenring" else "2"  # the other program is SGLang's own
        assert ("RestartPreventExitStatus", wrong_arguments) in lines
    assert unit_environ(UNITS[0]) == unit_environ(UNITS[1])
    assert image_environ("gpu").keys() >= {name for name in unit_environ(UNITS[0]) if "WEIGHT" in name}


@pytest.mark.parametrize("name", UNITS)
def test_systemd_knows_every_line_of_the_units(name: str, tmp_path: Path) -> None:
    """systemd-analyze finds nothing to say of a unit, once its program exists."""
    if not (analyze := shutil.which("systemd-analyze")):
        pytest.skip("this machine has no systemd-analyze")
    text = (ROOT / f"deploy/systemd/{name}.service").read_text("utf-8")
    copy = tmp_path / f"{name}.service"
    copy.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", text, flags=re.MULTILINE))
    done = subprocess.run([analyze, "verify", copy], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if name in line] == []


def test_prometheus_asks_with_a_key() -> None:
    """The scrape has the key file that docs/deploy.md makes."""
    assert f"/dev/stdin {credentials('prometheus.yml')} " in (ROOT / "docs/deploy.md").read_text("utf-8")


def credentials(name: str) -> str:
    """The key file of a configuration of Prometheus."""
    read = yaml.safe_load((ROOT / "deploy/prometheus" / name).read_text("utf-8"))
    return str(read["scrape_configs"][0]["authorization"]["credentials_file"])


def test_prometheus_reads_its_configurations() -> None:
    """promtool knows every line of both, and finds the alerts beside them."""
    if not (promtool := shutil.which("promtool")):
        pytest.skip("this machine has no promtool (apt install prometheus)")
    for name in ("prometheus.yml", "compose.yml"):
        command = [promtool, "check", "config", "--syntax-only", ROOT / "deploy/prometheus" / name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


MONITORING = ("prometheus", "grafana")


def test_monitoring_is_a_profile_with_pinned_images() -> None:
    """Prometheus and Grafana run where they are asked for, in exact versions, for this machine alone."""
    for name in MONITORING:
        service = compose()[name]
        assert service["profiles"] == ["monitoring"]
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_monitoring_has_no_password_of_its_own() -> None:
    """Key and password come from variables, as secrets; a server alone starts without either."""
    whole = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text("utf-8"))
    assert whole["secrets"] == {
        "tokenring_key": {"environment": "TOKENRING_API_KEY"},
        "grafana_password": {"environment": "GRAFANA_PASSWORD"},
    }
    [secret] = whole["services"]["prometheus"]["secrets"]
    assert credentials("compose.yml") == f"/run/secrets/{secret}"
    grafana = whole["services"]["grafana"]
    [secret] = grafana["secrets"]
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == f"/run/secrets/{secret}"
    assert f"test -s /run/secrets/{secret} &&" in grafana["entrypoint"][-1]
    # `:?` would refuse `docker compose up` without the profile too.
    assert ":?" not in (ROOT / "deploy/compose.yaml").read_text("utf-8")


def test_what_monitoring_mounts_is_there() -> None:
    """Each file and folder exists; Grafana is shown its source and the dashboard where they are mounted."""
    mounts = dict(
        volume.removesuffix(":ro").split(":", 1)
        for name in MONITORING
        for volume in compose()[name]["volumes"]
        if volume.startswith(".")
    )
    for source in mounts:
        assert (ROOT / "deploy" / source).exists(), source
    grafana = ROOT / "deploy/grafana/provisioning"
    [source] = yaml.safe_load((grafana / "datasources/prometheus.yml").read_text("utf-8"))["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    [provider] = yaml.safe_load((grafana / "dashboards/tokenring.yml").read_text("utf-8"))["providers"]
    assert provider["options"]["path"] == mounts["./grafana/dashboards"]
    assert {"tokenring", "laptop"} == set(scraped("compose.yml")) & set(compose())


def scraped(name: str) -> list[str]:
    """The hosts that a configuration of Prometheus looks up."""
    read = yaml.safe_load((ROOT / "deploy/prometheus" / name).read_text("utf-8"))
    names: list[str] = read["scrape_configs"][0]["dns_sd_configs"][0]["names"]
    return names


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (["python", "-m", "app", "serve"], {}, "8000"),
        (["python", "-m", "app", "serve"], {"TOKENRING_PORT": "9000"}, "9000"),
        (["python", "-m", "app", "serve", "--port", "9001"], {"TOKENRING_PORT": "9000"}, "9001"),
        (["init", "--", "python", "-m", "app", "serve", "--port=9002", ""], {}, "9002"),
        (["serve", "--port", "1", "--port", "2"], {}, "2"),
    ],
)
def test_the_health_check_follows_the_port(
    arguments: list[str], environ: dict[str, str], expected: str
) -> None:
    """The last flag of process 1, then the variable, then 8000."""
    assert port(arguments, environ) == expected


@pytest.fixture
def server() -> Iterator[int]:
    """A server that answers 200 to /healthz; yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            del args

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield served.server_address[1]
        served.shutdown()
        thread.join()


def test_the_health_check_asks_the_server(server: int) -> None:
    """It ends with 0 where /healthz answers, and with 1 and the reason where nobody listens."""
    script = ROOT / "deploy/healthcheck.py"
    for number, status, said in ((server, 0, ""), (1, 1, "Connection refused")):
        environ = os.environ | {"TOKENRING_PORT": str(number)}
        done = subprocess.run(
            [sys.executable, script], env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == status
        assert said in done.stderr


def test_caddy_in_compose_has_the_caddyfile_and_reaches_the_server():
    """The file beside compose.yaml names its service, at the port of the image, and a file that is there."""
    file = yaml.safe_load((ROOT / "deploy/compose.caddy.yaml").read_text("utf-8"))
    caddy = file["services"]["caddy"]
    service, _, number = caddy["environment"]["UPSTREAM"].partition(":")
    assert service in compose()
    assert number == image_environ("gpu")["TOKENRING_PORT"]
    mounted = caddy["volumes"][0].split(":")[0]
    text = (ROOT / "deploy" / mounted).read_text("utf-8")
    assert all(name in text for name in ("{$SITE:", "{$UPSTREAM:"))
    assert "TOKENRING_TRUSTED_PROXIES" in file["services"][service]["environment"]
