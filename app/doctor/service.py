"""Checks of the installation, and of what the settings name: model, disk, port, data, prices, policy."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sqlite3
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import app
from app.doctor.key_terms import remarks
from app.doctor.subject import (
    GIB,
    Finding,
    Subject,
    failure,
    file_system,
    nearest,
    not_applicable,
    ok,
    torch_is_for_cpu,
    warning,
)
from app.engine_factory import check_models, models_of, names_of
from app.metering.pricing import ANY_MODEL, PriceTable
from app.safety.policies.policy_file import read
from app.settings import SettingsError
from app.store.backup import connected, transaction
from app.store.database import FILE_NAME
from app.store.key_table import now_us
from app.store.keys import all_keys
from app.store.opening import StoreRefused, check_sound, holder

PYTHONS = ((3, 11), (3, 12))
ESSENTIAL = frozenset({"sglang", "torch", "sglang-kernel", "flashinfer-python"})
"""Packages of which another version is not tried with this program at all."""
PIN = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?==([\w.]+)")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
MIN_FREE_BYTES = GIB
"""The store's log and a batch of conversations fit; below it a full disk is near."""
MAX_READING_S = 2.0
"""Seconds for which damage is sought in the store."""
MAX_REMARKS = 5
"""Remarks about keys that one finding has."""
REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs", "fuse.s3fs"})
"""File systems on which SQLite's locks and shared memory cannot be trusted."""


def versions(_: Subject) -> Finding:
    """The installed packages against the exact versions that this program was tried with."""
    python = f"Python {sys.version.split()[0]}"
    if sys.version_info[:2] not in PYTHONS:
        return failure(python, "install Python 3.11 or 3.12 and run scripts/setup")
    other = {}
    for name, wanted in _pins().items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "missing"
        if version.split("+")[0] != wanted:
            other[name] = f"{name} {version}, pinned {wanted}"
    if not other:
        return ok(f"{python}, all packages as pinned")
    detail, advice = "; ".join(other.values()), "run scripts/setup"
    return failure(detail, advice) if ESSENTIAL & set(other) else warning(detail, advice)


def model(subject: Subject) -> Finding:
    """The models that the settings name."""
    try:
        check_models(subject.settings)
    except SettingsError as exc:
        return failure(str(exc), "correct the setting")
    details = []
    for name, model in models_of(subject.settings).items():
        folder = _folder_of(model, subject)
        if folder is None:
            if subject.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
                return failure(
                    f"{name}: {model} is not in HF_HOME, and HF_HUB_OFFLINE forbids to fetch it",
                    "fetch it once with the hub allowed, or mount it and give its path",
                )
            token = "a token" if subject.environ.get("HF_TOKEN") else "no HF_TOKEN"
            details.append(f"{name}: {model} is fetched from the hub, with {token}")
        elif not _weights(folder):
            return failure(f"{name}: {folder} has no weights", "copy the whole model; look for *.safetensors")
        else:
            details.append(f"{name}: {folder}, {_size(folder) / GIB:.1f} GiB")
    if not details:
        is_here = subject.settings.engine == "sglang"
        return ok("the built-in model") if is_here else not_applicable("the model is elsewhere")
    return ok("; ".join(details))


def tensor_parallel(subject: Subject) -> Finding:
    """The GPUs that share each model: whether SGLang can divide it so, whether it fits, which stay idle."""
    settings, gpus = subject.settings, subject.gpus.seen
    if settings.engine != "sglang":
        return not_applicable("the model is elsewhere")
    details, idle = [], ""
    for name, model in {"model": settings.model, **models_of(settings)}.items():
        table, tp = {"small_model": ("small", 1), "safety_guard_model": ("guard", 1)}.get(
            name, ("sglang", settings.tp)
        )
        arguments = settings.engine_args.get(table, {})
        try:
            chosen = _ranks(model, arguments, tp, table, subject)
        except SettingsError as exc:
            return failure(str(exc), "set one of these numbers, or 0 for the largest that works")
        if chosen is None:
            details.append(f"{name}: known once it is fetched")
            continue
        details.append(f"{name}: {chosen}")
        folder = _folder_of(model, subject)
        share = _size(folder) / chosen if folder else 0
        if gpus and share > min(gpu.memory_bytes for gpu in gpus) > 0:
            return failure(
                f"{name}: {share / GIB:.0f} GiB of weights for each of {chosen} GPUs do not fit",
                "set tp higher, or serve a smaller or quantised model",
            )
        if table == "sglang" and chosen < len(gpus) and not arguments:
            idle = f"{len(gpus) - chosen} of {len(gpus)} GPUs stay idle"
    if idle:
        more = "set tp = 0, which takes as many as the model allows; " if settings.tp else ""
        return warning(f"{'; '.join(details)}; {idle}", f"{more}run replicas: dp_size in [engine.sglang]")
    return ok("; ".join(details))


def disk(subject: Subject) -> Finding:
    """The room for the store."""
    folder = subject.settings.data_dir
    free = psutil.disk_usage(str(nearest(folder))).free
    detail = f"{free / GIB:.1f} GiB free for the data directory"
    return ok(detail) if free >= MIN_FREE_BYTES else failure(detail, f"make room on the disk of {folder}")


def port(subject: Subject) -> Finding:
    """The address to listen on."""
    settings = subject.settings
    where = f"{settings.host}:{settings.port}"
    if not settings.port:
        return ok(f"{settings.host}, any free port")
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
            probe.listen(1)
        except OSError as exc:
            listener, server = _listener(settings.port), holder(settings.data_dir)
            served = server is not None and server.pid and not subject.starting
            if listener == os.getpid() or (server and served and listener in (server.pid, None)):
                return ok(f"{where}, taken by the server on the data directory")
            by = f" by {_named(listener)}" if listener else ""
            return failure(
                f"{where} cannot be bound: {exc.strerror}{by}",
                "stop that program, or choose another --port or --host",
            )
    return ok(f"{where}, free")


def data_folder(subject: Subject) -> Finding:
    """The data directory: whether this user can write it, on what it lies, and which server uses it."""
    folder = subject.settings.data_dir
    advice = f"chown it to user {os.getuid()}, or choose another --data-dir"
    if nearest(folder) == folder.absolute() and not folder.is_dir():
        return failure(f"{folder} is not a directory", "choose another --data-dir")
    closed = [p for p in (nearest(folder), *folder.glob("*.db*")) if not os.access(p, os.W_OK)]
    if closed:
        return failure(f"user {os.getuid()} cannot write {closed[0]}", advice)
    if (kind := file_system(folder)) in REMOTE:
        return failure(f"{folder} is on {kind}, which SQLite cannot lock", "put --data-dir on a local disk")
    server = holder(folder)
    if server is None or server.pid == os.getpid():
        if reason := _refusal(folder):
            return failure(reason, 'see "When the server refuses to start" in docs/storage.md')
        return ok(f"{folder}, {'not in use' if server is None else 'used by this server'}")
    by = _named(server.pid) if server.pid else "a process that cannot be seen from here"
    status = failure if subject.starting else warning
    return status(f"{folder} is used by {by}", "a second server needs another --data-dir, or stop that one")


def _refusal(folder: Path) -> str:
    """The reason for which `serve` would not open the store, or empty; damage is sought for a while."""
    if not (folder / FILE_NAME).exists():
        return ""
    try:
        with connected(folder, older=True) as connection:
            ends_s = time.monotonic() + MAX_READING_S
            connection.set_progress_handler(lambda: time.monotonic() > ends_s, 10_000)
            with contextlib.suppress(sqlite3.OperationalError):
                check_sound(connection, folder / FILE_NAME)
    except StoreRefused as exc:
        return str(exc)
    return ""


def prices(subject: Subject) -> Finding:
    """The price list of the settings file."""
    entries = subject.settings.prices
    try:
        PriceTable.parse(entries)
    except SettingsError as exc:
        return failure(str(exc), "correct [[prices]] in the settings file")
    served = names_of(subject.settings)
    other = sorted({entry["model"] for entry in entries} - {*served, ANY_MODEL}) if served else []
    if other:
        return warning(f"no model is called {', '.join(map(repr, other))}", "correct the names in [[prices]]")
    return ok(f"{len(entries)} entries") if entries else not_applicable("none: answers cost nothing")


def keys(subject: Subject) -> Finding:
    """Remarks on the keys: models that are not there, budgets without prices."""
    folder = subject.settings.data_dir
    try:
        with transaction(folder) as connection:
            stored = [key for key in all_keys(connection) if key.status(now_us()) == "active"]
    except StoreRefused as exc:
        return not_applicable(str(exc))
    named = [(key, remark) for key in stored for remark in remarks(key.terms, subject.settings, folder)]
    if not named:
        return ok(f"{len(stored)} valid")
    details = [f"{key.id} ({key.terms.name}): {remark}" for key, remark in named[:MAX_REMARKS]]
    more = [f"and {len(named) - MAX_REMARKS} more"] if len(named) > MAX_REMARKS else []
    return warning(" ".join([*details, *more]), "change the key (`tokenring keys update`) or the settings")


def policy(subject: Subject) -> Finding:
    """The safety policy."""
    settings = subject.settings
    if settings.safety == "off":
        return not_applicable("safety is off")
    if not settings.safety_policy:
        return ok("the built-in policy")
    try:
        read(Path(settings.safety_policy))
    except SettingsError as exc:
        return failure(str(exc), "correct the policy file")
    return ok(settings.safety_policy)


def _pins() -> Mapping[str, str]:
    """The exact versions: of the package's metadata, and of requirements/ where that is beside it."""
    lines = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        lines += [line for line in metadata.requires("tokenring") or () if "extra ==" not in line]
    file = Path(app.__file__).parents[1] / "requirements" / ("cpu.txt" if torch_is_for_cpu() else "gpu.txt")
    with contextlib.suppress(OSError):
        lines += file.read_text("utf-8").splitlines()
    return {match[1].lower().replace("_", "-"): match[2] for line in lines if (match := PIN.match(line))}


def _ranks(model: str, arguments: Mapping[str, Any], tp: int, table: str, subject: Subject) -> int | None:
    """The ranks that a start would take; None where the model's configuration is not here yet."""
    from app.engine.sglang import ranks  # late, as the commands over the store start without the engine
    from app.engine.sglang.args import SGLangOptions

    options = SGLangOptions(model=model, table=table)
    rest = {name: value for name, value in arguments.items() if name != "tp_size"}
    asked = arguments.get("tp_size", tp) if table != "sglang" else tp
    folder = _folder_of(options.model_path, subject)
    if folder is None or not (folder / "config.json").is_file():
        return None
    return ranks.choose(ranks.config_of(folder), rest, asked, len(subject.gpus.seen), options.tp_setting)


def _folder_of(model: str, subject: Subject) -> Path | None:
    """The folder or file of a model; of a hub id the newest that was fetched, None without one."""
    if not model or Path(model).exists():
        return Path(model) if model else None
    hub = subject.folder("HF_HOME", ".cache/huggingface") / "hub"
    hub = Path(subject.environ.get("HF_HUB_CACHE", hub))
    fetched = (hub / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json")
    newest = max(fetched, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else newest.parent


def _weights(model: Path) -> list[Path]:
    """The files of weights in a model's folder; a model may be one file itself."""
    return [model] if model.is_file() else [file for kind in WEIGHTS for file in model.glob(kind)]


def _size(model: Path) -> int:
    return sum(file.stat().st_size for file in _weights(model))


def _listener(port: int) -> int | None:
    """The process that listens on a port; None where it is another user's."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("inet"):
            if (
                connection.status == psutil.CONN_LISTEN
                and getattr(connection.laddr, "port", 0) == port
                and connection.pid
            ):
                return int(connection.pid)
    return None


def _named(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return f"process {pid} ({psutil.Process(pid).name()})"
    return f"process {pid}"
