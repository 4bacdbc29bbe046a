"""LiteLLM's proxy in front of SGLang's own server: the usual gateway, as a third server of `bench serve`.

It runs in an environment of its own below `build/`, made at the first use. It has one worker, no database, no
callbacks and no telemetry, so that it keeps no keys, budgets, usage or conversations, and screens nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.benchmarks.machine import ROOT
from scripts.benchmarks.processes import CpuUse, ServerProcess

VERSION = "1.106.2"
FOLDER = ROOT / "build" / f"litellm-{VERSION}"
MODEL = "bench"
KEY = "sk-bench"
"""Without a master key this version does not start."""
ENVIRONMENT = {
    "LITELLM_MASTER_KEY": KEY,
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
}
INSTALL_S = 900
PEER_KEY = "none"
"""SGLang's own server asks for no key; LiteLLM's client needs one to send."""


class ProxiedServer(ServerProcess):
    """A proxy and the server behind it, which is running already: they are thawed and counted together."""

    def __init__(self, name: str, behind: ServerProcess, port: int, folder: Path, model: str) -> None:
        config = folder / "litellm.json"
        config.write_text(_config(behind.port, model))
        command = [str(FOLDER / "bin" / "python"), "-m", "litellm.proxy.proxy_cli"]
        command += ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--num_workers", "1", "--telemetry", "False"]
        super().__init__(name, command, port, folder / f"{name}.log", ready_path="/health/liveliness")
        self._behind = behind

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Start the proxy alone."""
        super().start({**ENVIRONMENT, **(environment or {})})

    def cpu(self) -> CpuUse:
        """CPU used so far by both trees."""
        return super().cpu() + self._behind.cpu()

    def freeze(self) -> None:
        """SIGSTOP both trees."""
        super().freeze()
        self._behind.freeze()

    def thaw(self) -> None:
        """SIGCONT both trees."""
        self._behind.thaw()
        super().thaw()


def install(folder: Path = FOLDER) -> None:
    """Make the environment unless it is there. Ends the command where the package cannot be had."""
    done = folder / "installed"
    if done.exists():
        return
    print(f"installing LiteLLM {VERSION} into {folder}, once; this takes some minutes", file=sys.stderr)
    commands = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"litellm[proxy]=={VERSION}"],
    )
    try:
        for command in commands:
            subprocess.run(command, check=True, timeout=INSTALL_S, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as exc:
        shutil.rmtree(folder, ignore_errors=True)
        lines = str(getattr(exc, "stderr", "") or exc).strip().splitlines()
        raise SystemExit(
            f"LiteLLM {VERSION} cannot be installed here: {lines[-1]}\n"
            "Run this once where the package index can be reached, or leave --with-litellm out."
        ) from exc
    done.touch()


def _config(port: int, model: str) -> str:
    """The proxy's configuration; YAML reads JSON."""
    upstream = {"model": f"openai/{model}", "api_base": f"http://127.0.0.1:{port}/v1", "api_key": PEER_KEY}
    return json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": upstream}]})
