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
    common.add_argument("--config", type=Path, help="settings file (tokenring.toml, if there is one)")
    common.add_argument("--policy", type=Path, help="policy file (as the settings say)")
    common.add_argument("--level", choices=SAFETY_LEVELS, default="standard", help="as a key of that level")
    common.add_argument("--json", action="store_true", help="print one JSON object")
    check = verbs.add_parser("check", parents=[common], allow_abbrev=False, help="judge one text as a prompt")
    check.add_argument("text", metavar="TEXT", help="the text; - reads standard input")
    measure = verbs.add_parser(
        "eval",
        parents=[common],
        allow_abbrev=False,
        help="recall, false positives, AUC and latency over files",
    )
    measure.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSON lines with text, label, category, source; .gz too",
    )
    measure.add_argument("--kind", choices=("prompt", "output"), default="prompt", help="which rows")
    measure.add_argument("--watched", action="store_true", help="judge outputs as of watched prompts")
    measure.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw them too, by matplotlib")
    measure.add_argument("--limit", type=int, metavar="N", help="only N of the rows, evenly spread")


def run(args: argparse.Namespace, load: Callable[[], Models] | None = None) -> int:
    """Run a command, over the shipped classifiers or others; its exit status. Raises SettingsError."""
    from app.cli import safety_commands  # with numpy and the classifiers: no other command waits for them
    from app.safety.classifiers import bundled_models
    from app.safety.policies.policy import Policies

    flags = {} if args.policy is None else {"safety_policy": str(args.policy)}
    in_force = settings.load(flags, os.environ, args.config)
    path = Path(in_force.safety_policy) if in_force.safety_policy else None
    models = (load or bundled_models.load)()
    policy = Policies(path, models.directory, in_force.safety_country).current.at_level(args.level)
    command = safety_commands.check if args.verb == "check" else safety_commands.evaluate
    status = command(args, policy, models)
    sys.stdout.flush()
    return status
