"""`tokenring safety`: judge one text, or measure the screens over files of labelled ones. Needs no server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from app import settings
from app.core import SAFETY_LEVELS

if TYPE_CHECKING:
    from app.safety.classifiers.bundled_models import Models


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `safety` and its verbs to the parser of the command line."""
    top = commands.add_parser("safety", help="judge a text, or measure the screens over labelled ones")
    verbs = top.add_subparsers(dest="verb", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, help="settings file (default: tokenring.toml, if it exists)")
    common.add_argument("--policy", type=Path, help="policy file (default: by the settings)")
    common.add_argument(
        "--level", choices=SAFETY_LEVELS, default="standard", help="safety level of a key (default: standard)"
    )
    common.add_argument("--json", action="store_true", help="print one JSON object")
    check = verbs.add_parser("check", parents=[common], allow_abbrev=False, help="judge one text as a prompt")
    check.add_argument("text", metavar="TEXT", help="the text; - reads standard input")
    measure = verbs.add_parser(
        "eval",
        parents=[common],
        allow_abbrev=False,
        help="measure recall, false positives, AUC and latency on labelled files",
    )
    measure.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="file of JSON lines with the fields text, label, category, source; may be gzipped (.gz)",
    )
    measure.add_argument(
        "--kind",
        choices=("prompt", "output"),
        default="prompt",
        help="rows to measure: prompts or answers (default: prompt)",
    )
    measure.add_argument(
        "--watched", action="store_true", help="with --kind output: judge answers as those to watched prompts"
    )
    measure.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="also draw the results as SVG; needs matplotlib"
    )
    measure.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="measure N rows only, evenly spread over the files (default: all)",
    )


def run(args: argparse.Namespace, load: Callable[[], Models] | None = None) -> int:
    """Run a command, over the shipped classifiers or others; its exit status. Raises SettingsError."""
    from app.cli import safety_commands  # with numpy and the classifiers: no other command waits for them
    from app.safety.classifiers import bundled_models
    from app.safety.policies.policy import Policies

    flags = {} if args.policy is None else {"safety_policy": str(args.policy)}
    in_force = settings.load(flags, os.environ, args.config)
    path = Path(in_force.safety_policy) if in_force.safety_policy else None
    models = (load or bundled_models.load)()
    policy = Policies(path, models.directory, in_force.safety_country).current.tightened(args.level)
    command = safety_commands.check if args.verb == "check" else safety_commands.evaluate
    status = command(args, policy, models)
    sys.stdout.flush()
    return status
