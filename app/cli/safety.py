"""`tokenring safety`: judge, explain or measure texts, report on a server's traffic. Needs no server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from app import settings
from app.cli.store import reader_left, tell_store
from app.core import SAFETY_LEVELS
from app.safety.text.groups import GROUPINGS
from app.store.database import FILE_NAME

if TYPE_CHECKING:
    from app.safety.classifiers.bundled_models import Models
    from app.safety.policies.policy import Policy


UNDER = ("recorded", "observe", "enforce", "strict")
"""The policies that a report can be grouped under: what was recorded, or a level of keys."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `safety` and its verbs to the parser of the command line."""
    top = commands.add_parser(
        "safety", help="judge or explain a text, measure the screens, report on your own traffic"
    )
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
    explain = verbs.add_parser(
        "explain",
        parents=[common],
        allow_abbrev=False,
        help="which text, sentences, words and models decide, and what each policy would do",
    )
    explain.add_argument(
        "file", metavar="FILE", nargs="?", default="-", help="a file with the text (default: standard input)"
    )
    explain.add_argument(
        "--request", action="store_true", help="the file is a request body, or its messages, in JSON"
    )
    _add_report(verbs)
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


def _add_report(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = verbs.add_parser(
        "report",
        allow_abbrev=False,
        help="what the policy made of your own traffic, and what others would have",
    )
    report.add_argument("--data-dir", type=Path, help="the server's data directory (as the settings say)")
    report.add_argument("--config", type=Path, help="settings file (tokenring.toml, if there is one)")
    report.add_argument("--policy", type=Path, help="policy file (as the settings say)")
    report.add_argument("--period", help="a UTC month or day, as 2026-11 or 2026-11-20 (default: this month)")
    report.add_argument("--from", dest="first", metavar="DAY", help="instead of a period, the first day")
    report.add_argument("--to", dest="last", metavar="DAY", help="and the last one (default: today)")
    report.add_argument(
        "--by",
        type=_groupings,
        default=("category", "key"),
        metavar="NAMES",
        help=f"any of {','.join(GROUPINGS)} (default: category,key)",
    )
    report.add_argument(
        "--under",
        choices=UNDER,
        default=UNDER[0],
        help="the policy that the tables by category, key and the like are of (default: as recorded)",
    )
    report.add_argument(
        "--block-fpr",
        type=float,
        metavar="RATE",
        help="the same with this target, as 0.005; a row of its own",
    )
    report.add_argument("--json", action="store_true", help="print one JSON object")


def _groupings(text: str) -> tuple[str, ...]:
    """The names of a comma list. Raises argparse.ArgumentTypeError."""
    for name in text.split(","):
        if name not in GROUPINGS:
            raise argparse.ArgumentTypeError(f"expected any of {','.join(GROUPINGS)}; got {name!r}")
    return tuple(dict.fromkeys(text.split(",")))


def run(args: argparse.Namespace, load: Callable[[], Models] | None = None) -> int:
    """Run a command, over the shipped classifiers or others; its exit status.

    Raises SettingsError, StoreRefused, ServingError.
    """
    flags = {} if args.policy is None else {"safety_policy": str(args.policy)}
    if args.verb == "report" and args.data_dir is not None:
        flags["data_dir"] = str(args.data_dir)
    in_force = settings.load(flags, os.environ, args.config)
    try:
        status = _report(args, in_force) if args.verb == "report" else _judge(args, in_force, load)
        sys.stdout.flush()
    except BrokenPipeError:
        return reader_left()
    return status


def _report(args: argparse.Namespace, in_force: settings.Settings) -> int:
    from app.cli.safety_report import run_report

    if (in_force.data_dir / FILE_NAME).exists():
        tell_store(in_force.data_dir)
    return run_report(args, _policy(in_force, None), in_force.data_dir)


def _judge(args: argparse.Namespace, in_force: settings.Settings, load: Callable[[], Models] | None) -> int:
    # With numpy and the classifiers: no other command waits for them.
    from app.cli import safety_commands, safety_explain
    from app.safety.classifiers import bundled_models

    models = (load or bundled_models.load)()
    policy = _policy(in_force, models.directory).at_level(args.level)
    if args.verb == "explain":
        return safety_explain.run_explain(args, policy, models, in_force.safety_guard_model)
    if args.verb == "eval":
        return safety_commands.evaluate(args, policy if args.level == "observe" else policy.enforced, models)
    return safety_commands.check(args, policy, models)


def _policy(in_force: settings.Settings, models: Path | None) -> Policy:
    """The policy of the settings, by the calibration of these classifiers, or of those that are shipped."""
    from app.safety.policies.calibration import MODELS
    from app.safety.policies.policy import Policies

    path = Path(in_force.safety_policy) if in_force.safety_policy else None
    return Policies(
        path,
        models or MODELS,
        in_force.safety_country,
        in_force.safety_contact,
        observe=in_force.safety == "observe",
    ).current
