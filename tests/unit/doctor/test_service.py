"""Each fault of an installation, and of what its settings name, is named with what to do."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.core import KeyTerms
from app.doctor import service
from app.doctor.subject import GIB, ok
from app.engine.sglang.args import BUILTIN_MODEL
from app.store.backup import make_missing, transaction
from app.store.database import FILE_NAME
from app.store.keys import create, revoke
from app.store.opening import StoreRefused, prepare, refusal

HOLD = (
    "import sys; from app.store.opening import lock; from pathlib import Path; held = lock(Path(sys.argv[1]))"
)
"""A program that has a data directory, as a server has it, until its standard input ends."""


@pytest.fixture
def server(fake: Any) -> Iterator[int]:
    """A process that holds the data directory, and its id."""
    code = f"{HOLD}; print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(fake.settings["data_dir"])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.communicate("")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which this process listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def model_of(folder: Path, **config: Any) -> str:
    """A model's folder with this configuration over the built-in model's."""
    shutil.copytree(BUILTIN_MODEL, folder)
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    return str(folder)


def test_other_versions_than_the_pins(fake: Any, installed: Callable[..., None]) -> None:
    """Another SGLang is a failure, another version of a lesser package a warning; both say the pin."""
    installed(orjson="1.0.0")
    finding = service.versions(fake.subject)
    assert (finding.status, finding.advice) == ("warning", "run scripts/setup")
    assert finding.detail.startswith("orjson 1.0.0, pinned ")
    installed(sglang="0.5.19")
    finding = service.versions(fake.subject)
    assert (finding.status, finding.detail) == ("failure", "sglang 0.5.19, pinned 0.5.20")


def test_another_python(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 lacks a wheel of what SGLang needs."""
    monkeypatch.setattr("app.doctor.service.sys.version_info", (3, 13))
    finding = service.versions(fake.subject)
    assert (finding.status, "3.12" in finding.advice) == ("failure", True)


@pytest.mark.parametrize("setting", ["model", "small_model", "safety_guard_model"])
def test_a_model_that_is_not_there(fake: Any, setting: str) -> None:
    """A path to nothing is a failure of the setting that has it."""
    fake.settings[setting] = "/nowhere/llama-guard-4"
    finding = service.model(fake.subject)
    assert finding.status == "failure"
    assert finding.detail.startswith(f"{setting}: there is no folder /nowhere/llama-guard-4")


def test_a_folder_without_weights(fake: Any) -> None:
    """A copy that was cut short has no *.safetensors."""
    folder = fake.file("model/config.json", "{}").parent
    fake.settings["model"] = str(folder)
    finding = service.model(fake.subject)
    assert (finding.status, "*.safetensors" in finding.advice) == ("failure", True)
    assert service.disk(fake.subject).status == "ok"


def test_a_model_of_the_hub(fake: Any) -> None:
    """What is not fetched yet needs the hub; offline that is a failure."""
    fake.settings["model"] = "org/model"
    assert "no HF_TOKEN" in service.model(fake.subject).detail
    fake.environ["HF_HUB_OFFLINE"] = "1"
    assert service.model(fake.subject).status == "failure"
    fake.file(".cache/huggingface/hub/models--org--model/snapshots/1/config.json", "{}")
    fake.file(".cache/huggingface/hub/models--org--model/snapshots/1/model.safetensors")
    assert service.model(fake.subject).status == "ok"


@pytest.mark.parametrize(
    ("config", "tp", "status", "words"),
    [
        ({}, 0, "warning", "model: 4; 4 of 8 GPUs stay idle"),
        ({"num_attention_heads": 28, "num_key_value_heads": 4}, 0, "warning", "model: 4; 4 of 8"),
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, 0, "ok", "model: 8"),
        ({"num_attention_heads": 28, "num_key_value_heads": 4}, 8, "failure", "tp can be 1, 2, 4"),
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, 16, "failure", "GPUs for 8 ranks"),
    ],
)
def test_a_tp_that_does_not_divide_the_model(
    fake: Any, config: dict[str, Any], tp: int, status: str, words: str
) -> None:
    """An impossible number is a failure with those that work, and idle GPUs are a warning."""
    fake.gpus(8)
    fake.settings |= {"model": model_of(fake.root / "model", **config), "tp": tp}
    finding = service.tensor_parallel(fake.subject)
    assert (finding.status, words in finding.detail) == (status, True)


@pytest.mark.parametrize(("table", "setting"), [("small", "small_model"), ("guard", "safety_guard_model")])
def test_a_child_s_tp(fake: Any, table: str, setting: str) -> None:
    """`tp_size` of a model beside the main one is checked like `tp`."""
    fake.settings |= {setting: str(BUILTIN_MODEL), "engine_args": {table: {"tp_size": 3}}}
    finding = service.tensor_parallel(fake.subject)
    assert (finding.status, finding.detail.startswith(f"[engine.{table}] tp_size: 3 GPUs")) == (
        "failure",
        True,
    )


def test_weights_that_do_not_fit(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights larger than the memory of their GPUs are a failure before they are loaded."""
    fake.gpus(1)
    fake.settings["model"] = str(BUILTIN_MODEL)
    monkeypatch.setattr(service, "_size", lambda _: 200 * GIB)
    finding = service.tensor_parallel(fake.subject)
    assert (finding.status, "200 GiB" in finding.detail, "tp higher" in finding.advice) == (
        "failure",
        True,
        True,
    )


def test_a_full_disk(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than 1 GiB for the store is a failure."""
    monkeypatch.setattr("app.doctor.service.psutil.disk_usage", lambda _: SimpleNamespace(free=GIB // 2))
    finding = service.disk(fake.subject)
    assert (finding.status, "make room" in finding.advice) == ("failure", True)


def test_a_port_that_another_program_has(fake: Any, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is named by its process id."""
    fake.settings["port"] = taken
    assert service.port(fake.subject).status == "ok"  # it is this process, as in a start that failed
    ours = os.getpid()
    monkeypatch.setattr("app.doctor.service.os.getpid", lambda: ours + 1)
    finding = service.port(fake.subject)
    assert (finding.status, "--port" in finding.advice) == ("failure", True)
    assert f" by process {ours} (" in finding.detail


def test_the_port_of_the_running_server(
    fake: Any, taken: int, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its own server a taken port is well; for one that starts it is not."""
    fake.settings["port"] = taken
    monkeypatch.setattr(service, "_listener", lambda _: server)
    assert service.port(fake.subject).status == "ok"
    fake.starting = True
    assert service.port(fake.subject).status == "failure"


def test_an_address_of_another_machine(fake: Any) -> None:
    """An address that this machine does not have cannot be listened on."""
    fake.settings |= {"host": "203.0.113.7", "port": 8000}
    assert service.port(fake.subject).status == "failure"


def test_a_data_directory_that_a_server_uses(fake: Any, server: int) -> None:
    """The server is named; for another one that starts it is a failure."""
    finding = service.data_folder(fake.subject)
    assert (finding.status, f"process {server} (" in finding.detail) == ("warning", True)
    fake.starting = True
    assert service.data_folder(fake.subject).status == "failure"


def test_a_data_directory_after_its_server(fake: Any) -> None:
    """The id that a dead server left in the lock file is nobody."""
    fake.file("data/lock", "1\n")
    assert service.data_folder(fake.subject).status == "ok"


def test_a_data_directory_that_cannot_be_used(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in its place, a folder of somebody else and a network disk are failures."""
    fake.settings["data_dir"] = fake.file("file")
    assert "not a directory" in service.data_folder(fake.subject).detail
    fake.settings["data_dir"] = fake.root / "new" / "data"
    assert service.data_folder(fake.subject).status == "ok"
    mount = SimpleNamespace(mountpoint=str(fake.root), fstype="nfs4")
    with monkeypatch.context() as patch:
        patch.setattr("app.doctor.subject.psutil.disk_partitions", lambda **_: [mount])
        assert "local disk" in service.data_folder(fake.subject).advice
    monkeypatch.setattr("app.doctor.service.os.access", lambda *_: False)
    finding = service.data_folder(fake.subject)
    assert (finding.status, "chown" in finding.advice) == ("failure", True)


def refused(store: Path) -> str:
    """The words in which a server refuses a store."""
    try:
        with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as connection:
            prepare(connection, store)
    except StoreRefused as exc:
        return str(exc)
    except sqlite3.Error as exc:
        return refusal(store, exc)
    return ""


@pytest.mark.parametrize("fault", ["newer", "random", "page"])
def test_a_store_that_serve_refuses(fake: Any, fault: str) -> None:
    """Of a newer version, no database, or damaged inside: a failure, in the words of `serve`."""
    folder = fake.settings["data_dir"]
    make_missing(folder)
    assert service.data_folder(fake.subject).status == "ok"
    store = folder / FILE_NAME
    if fault == "newer":
        with transaction(folder, write=True) as c:
            c.execute("INSERT INTO migrations VALUES ('999_later', '')")
    else:
        content = store.read_bytes()
        kept = content[:8192] if fault == "page" else b""
        store.write_bytes(kept + bytes(range(256)) * ((len(content) - len(kept)) // 256))
    finding = service.data_folder(fake.subject)
    assert (finding.status, finding.detail) == ("failure", refused(store))


def test_wrong_prices(fake: Any) -> None:
    """A price that cannot be read is a failure that names its entry; none at all is not applicable."""
    assert service.prices(fake.subject).status == "not_applicable"
    fake.settings["prices"] = [{"model": "llama", "input": "0.0000001", "output": 1}]
    finding = service.prices(fake.subject)
    assert (finding.status, "entry 1 (llama): input" in finding.detail) == ("failure", True)


def test_a_price_of_no_model(fake: Any) -> None:
    """A price whose model the settings do not name bills nothing, and is a warning; `*` is any model."""
    fake.settings |= {"engine": "scripted", "prices": [{"model": "*", "input": 1, "output": 1}]}
    assert service.prices(fake.subject).status == "ok"
    fake.settings["prices"] = [{"model": "lama", "input": 1, "output": 1}]
    finding = service.prices(fake.subject)
    assert (finding.status, "'lama'" in finding.detail) == ("warning", True)


def test_keys_that_name_what_is_not_there(fake: Any) -> None:
    """A valid key's unknown model is named with the key; a revoked one's is nobody's concern."""
    fake.settings["engine"] = "scripted"
    assert service.keys(fake.subject).status == "not_applicable"
    folder = fake.settings["data_dir"]
    make_missing(folder)
    with transaction(folder, write=True) as c:
        revoked = create(c, KeyTerms("old", models=("gone",)), 1).key
        revoke(c, revoked.id, 2)
    assert service.keys(fake.subject) == ok("0 valid")
    with transaction(folder, write=True) as c:
        ids = [create(c, KeyTerms("new", models=(f"m{n}",)), 1).key.id for n in range(6)]
    finding = service.keys(fake.subject)
    assert finding.status == "warning"
    assert f"{ids[0]} (new): No model is called 'm0'" in finding.detail
    assert finding.detail.endswith("and 1 more")


def test_a_wrong_policy(fake: Any) -> None:
    """A policy file with an unknown category is a failure that names the file."""
    assert service.policy(fake.subject).status == "ok"
    path = fake.file("policy.toml", '[categories.nonsense]\naction = "flag"\n')
    fake.settings["safety_policy"] = str(path)
    finding = service.policy(fake.subject)
    assert (finding.status, str(path) in finding.detail, "nonsense" in finding.detail) == (
        "failure",
        True,
        True,
    )
    fake.settings["safety"] = "off"
    assert service.policy(fake.subject).status == "not_applicable"
