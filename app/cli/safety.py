"""`tokenring safety`: judge, explain or measure texts, report on a server's traffic. Needs no server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from app import settings
from app.cli import flags, tables
from app.cli.flags import Commands, command, flag
from app.cli.store import print_store_in_use
from app.core import SAFETY_LEVELS
from app.safety.text.groups import GROUPINGS
from app.store.database import FILE_NAME

if TYPE_CHECKING:
    from app.safety.classifiers.bundled_models import Models
    from app.safety.policies.policy import Policy


UNDER = ("recorded", "observe", "enforce", "strict")
"""The policies that a report can be grouped under: what was recorded, or a level of keys."""


def add_commands(commands: Commands[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Add `safety` and its verbs to the parser of the command line."""
    top = commands.add_parser(
        "safety", help="judge or explain a text, measure the screens, report on your own traffic"
    )
    verbs = top.add_subparsers(dest="verb", required=True)
    policy = argparse.ArgumentParser(add_help=False)
    flag(policy, "--policy", "policy file (default: by the settings)", Path)
    judging = flags.common(data_dir=False), policy
    check = command(verbs, "check", "judge one text as a prompt", None, *judging)
    flag(check, "text", "the text; - reads standard input", metavar="TEXT")
    why = "which text, sentences, words and models decide, and what each policy would do"
    explain = command(verbs, "explain", why, None, *judging)
    flag(
        explain,
        "file",
        "a file with the text (default: standard input)",
        metavar="FILE",
        nargs="?",
        default="-",
    )
    flag(explain, "--request", "the file is a request body, or its messages, in JSON", bool)
    what = "what the policy made of your own traffic, and what others would have"
    _add_report(command(verbs, "report", what, None, common, policy))
    figures = "measure recall, false positives, AUC and latency on labelled files"
    measure = command(verbs, "eval", figures, None, *judging)
    _add_eval(measure)
    for parser in (check, explain, measure):
        level = "safety level of a key (default: standard)"
        flag(parser, "--level", level, SAFETY_LEVELS, default="standard")


def _add_eval(measure: argparse.ArgumentParser) -> None:
    files = "file of JSON lines with the fields text, label, category, source; may be gzipped (.gz)"
    flag(measure, "files", files, Path, "FILE", nargs="+")
    kinds = "rows to measure: prompts or answers (default: prompt)"
    flag(measure, "--kind", kinds, ("prompt", "output"), default="prompt")
    flag(measure, "--watched", "with --kind output: judge answers as those to watched prompts", bool)
    flag(measure, "--plot", "also draw the results as SVG; needs matplotlib", Path, "FILE.svg")
    flag(measure, "--limit", "measure N rows only, evenly spread over the files (default: all)", int, "N")


def _add_report(report: argparse.ArgumentParser) -> None:
    flags.add_period(report)
    names = f"any of {','.join(GROUPINGS)} (default: category,key)"
    flag(report, "--by", names, _groupings, "NAMES", default=("category", "key"))
    under = "the policy that the tables by category, key and the like are of (default: as recorded)"
    flag(report, "--under", under, UNDER, default=UNDER[0])
    flag(report, "--block-fpr", "the same with this target, as 0.005; a row of its own", float, "RATE")


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
    overrides = {} if args.policy is None else {"safety_policy": str(args.policy)}
    if args.verb == "report" and args.data_dir is not None:
        overrides["data_dir"] = str(args.data_dir)
    in_force = settings.load(overrides, os.environ, args.config)
    return _report(args, in_force) if args.verb == "report" else _judge(args, in_force, load)


def _report(args: argparse.Namespace, in_force: settings.Settings) -> int:
    from app.cli.safety_report import run_report

    if (in_force.data_dir / FILE_NAME).exists():
        print_store_in_use(in_force.data_dir)
    return run_report(args, _policy(in_force, None), in_force.data_dir)


def _judge(args: argparse.Namespace, in_force: settings.Settings, load: Callable[[], Models] | None) -> int:
    # With numpy and the classifiers: no other command waits for them.
    from app.cli import safety_commands, safety_explain
    from app.safety.classifiers import bundled_models

    with tables.working("loading the classifiers"):
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

    return Policies.of(in_force, models or MODELS).current
