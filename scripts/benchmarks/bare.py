"""`bench bare`: the peer, SGLang's own HTTP server on the same model, platform and engine flags as ours."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from scripts.benchmarks import engine_args
from scripts.benchmarks.machine import ROOT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench bare`."""
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="", help="path or hub id (default: the built-in model)")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    engine_args.add_argument(parser)
    parser.add_argument(
        "--print", action="store_true", help="print the command as a JSON list, start nothing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the peer's command, or become it; then there is nothing to return to."""
    with contextlib.redirect_stdout(sys.stderr):  # SGLang's import may print; stdout is the list alone
        passed = engine_args.parse(arguments.engine_args)
        command = _command(arguments.model, arguments.port, arguments.tp, passed)
    if not arguments.print:
        os.chdir(ROOT)
        os.execvp(command[0], command)  # noqa: S606  the command is ours
    print(json.dumps(command))
    return 0


def peer_command(
    model: str, port: int, *, tp: int = 1, server_args: Mapping[str, Any] | None = None
) -> list[str]:
    """The peer's command, made in a process of its own: it takes SGLang's import, hundreds of MB."""
    options = ["--model", model, "--port", str(port), "--tp", str(tp), "--print"]
    options += engine_args.options(server_args or {})
    printed = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks", "bare", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if printed.returncode:
        raise RuntimeError(f"bench bare --print failed:\n{printed.stderr[-2000:]}")
    command: list[str] = json.loads(printed.stdout)
    return command


def _command(model: str, port: int, tp: int, server_args: Mapping[str, Any]) -> list[str]:
    from app.engine.sglang.args import SGLangOptions
    from app.engine.sglang.platform import prepare_process
    from scripts.benchmarks.bare_server import bare_server_command

    prepare_process()
    return bare_server_command(SGLangOptions(model=model, tp=tp, server_args=server_args), port)
