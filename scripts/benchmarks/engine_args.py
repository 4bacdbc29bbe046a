"""SGLang's own arguments on a tool's command line: `--engine-arg NAME=VALUE`, as in `[engine.sglang]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any


def add_argument(parser: argparse.ArgumentParser) -> None:
    """The option `--engine-arg`, which may come several times."""
    parser.add_argument(
        "--engine-arg",
        dest="engine_args",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of SGLang, such as attention_backend=triton; the value is JSON, or else text",
    )


def parse(pairs: Sequence[str]) -> dict[str, Any]:
    """The arguments by name. Raises SystemExit for one without a value, which ends the command."""
    arguments = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise SystemExit(f"--engine-arg {pair}: must be NAME=VALUE")
        try:
            arguments[name] = json.loads(text)
        except json.JSONDecodeError:
            arguments[name] = text
    return arguments


def options(arguments: Mapping[str, Any]) -> list[str]:
    """The command-line options that give these arguments to another tool."""
    return [
        option
        for name, value in arguments.items()
        for option in ("--engine-arg", f"{name}={json.dumps(value)}")
    ]


def config(arguments: Mapping[str, Any]) -> str:
    """The same as a configuration file of the server. TOML writes scalars and lists as JSON does."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in arguments.items()]
    return "\n".join(["[engine.sglang]", *lines, ""])
