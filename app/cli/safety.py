"""`tokenring safety`: judge one text, or measure the screens over files of labelled ones. Needs no server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from app import settings
from app.core import SAFETY_LEVELS
from app.metering.traffic import Histogram
from app.safety.categories import name_of
from app.safety.classifiers import bundled_models as shipped
from app.safety.classifiers.bundled_models import Models
from app.safety.counters import HOLD_BACK_S, SafetyCounters
from app.safety.evaluation import prompts as evaluation
from app.safety.evaluation.plot import plot
from app.safety.evaluation.prompts import Judged, Row
from app.safety.evaluation.replies import NotedModel, halts, stream
from app.safety.policies.policy import Policies, Policy
from app.safety.screens.prompt_screen import PromptScreen
from app.safety.verdict import Verdict, harm, stricter

EXIT_OK = 0
_TIMEOUT_S = 600.0
_FIRST = "Good morning."
"""Judged ahead of what is timed: the first run of the encoder sets it up."""
_LISTED = 20
"""Categories in the table of `eval`, the most frequent ones: files may have their own names for them."""
_SHOWN = 3
"""Categories that `check` names beside the one that decided."""


LoadModels = Callable[[], Models]


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
    check.set_defaults(run=_check)
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
    measure.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the figures too")
    measure.add_argument("--limit", type=int, metavar="N", help="only N of the rows, evenly spread")
    measure.set_defaults(run=_eval)


def run(args: argparse.Namespace, load: LoadModels | None = None) -> int:
    """Run a command, over the shipped classifiers or others; its exit status. Raises SettingsError."""
    flags = {} if args.policy is None else {"safety_policy": str(args.policy)}
    in_force = settings.load(flags, os.environ, args.config)
    path = Path(in_force.safety_policy) if in_force.safety_policy else None
    models = (load or shipped.load)()
    policy = Policies(path, models.directory, in_force.safety_country).current.tightened(args.level)
    status: int = args.run(args, policy, models)
    sys.stdout.flush()
    return status


def _screen(models: Models) -> closing[PromptScreen]:
    counters = SafetyCounters(Histogram(HOLD_BACK_S))
    return closing(PromptScreen(models.prompts, counters, sure_below=models.sure_below, timeout_s=_TIMEOUT_S))


def _check(args: argparse.Namespace, policy: Policy, models: Models) -> int:
    text = sys.stdin.read() if args.text == "-" else args.text
    with _screen(models) as screen:
        asyncio.run(_judge(screen, policy, _FIRST))
        first, second, fast_ms, full_ms = asyncio.run(_judge(screen, policy, text))
    verdict = stricter(first, second)
    found = {
        "action": verdict.action,
        "category": verdict.category,
        "category_name": verdict.category and name_of(verdict.category),
        "score": round(verdict.score, 4),
        "threshold": round(verdict.threshold, 4),
        "stage": verdict.stage,
        "policy_hash": policy.hash,
        "fast_ms": round(fast_ms, 2),
        "full_ms": round(full_ms, 2),
        "scores": {c: round(p, 4) for c, p in second.scores.items()},
        "message": policy.notice(verdict.category) if verdict.blocked else None,
    }
    print(json.dumps(found, ensure_ascii=False) if args.json else _said(found))
    return EXIT_OK


async def _judge(screen: PromptScreen, policy: Policy, text: str) -> tuple[Verdict, Verdict, float, float]:
    """Both verdicts on a text, and their milliseconds."""
    messages = [{"role": "user", "content": text}]
    began_s = time.perf_counter()
    first = screen.ngram_verdict(messages, policy)
    between_s = time.perf_counter()
    second = await screen.full_verdict(messages, policy)
    ended_s = time.perf_counter()
    return first, second, 1000 * (between_s - began_s), 1000 * (ended_s - between_s)


def _said(found: dict[str, Any]) -> str:
    top = sorted(found["scores"].items(), key=lambda item: -item[1])[:_SHOWN]
    by = f"{found['category']} {found['category_name']}" if found["category"] else "no category"
    sign = ">=" if found["action"] else "<"
    score = f"{found['score']:.3f} {sign} {found['threshold']:.3f}"
    times = f"n-grams {found['fast_ms']:.1f} ms, with the encoder {found['full_ms']:.1f} ms"
    lines = [
        f"{found['action'] or 'pass'}: {by}, {score} ({found['stage']})",
        "highest: " + ", ".join(f"{c} {name_of(c)} {p:.3f}" for c, p in top),
        f"{times}, policy {found['policy_hash']}",
    ]
    if found["message"]:
        lines.append(f"told: {found['message']}")
    return "\n".join(lines)


def _eval(args: argparse.Namespace, policy: Policy, models: Models) -> int:
    rows, skipped = evaluation.read(args.files, args.kind)
    if args.limit is not None:
        rows = _spread(rows, args.limit)
    measure = _prompts if args.kind == "prompt" else _replies
    judged, figures = measure(args, policy, models, rows)
    report = {
        "files": [str(path) for path in args.files],
        "kind": args.kind,
        "rows": len(rows),
        "skipped": dict(skipped),
        "policy_hash": policy.hash,
        **figures,
    }
    if args.plot is not None:
        try:
            args.plot.write_text(plot(report, evaluation.roc(judged)), "utf-8")
        except OSError as exc:
            raise settings.SettingsError(f"--plot: {exc}") from exc
    print(json.dumps(report) if args.json else "\n".join(_table(report)))
    return EXIT_OK


def _prompts(
    args: argparse.Namespace, policy: Policy, models: Models, rows: Sequence[Row]
) -> tuple[list[Judged], dict[str, Any]]:
    if args.watched:
        raise settings.SettingsError("--watched: is for --kind output")
    with _screen(models) as screen:
        judged = asyncio.run(_judge_all(screen, policy, rows, _progress(len(rows))))
    return judged, evaluation.report(judged)


def _replies(
    args: argparse.Namespace, policy: Policy, models: Models, rows: Sequence[Row]
) -> tuple[list[Judged], dict[str, Any]]:
    model, told, streamed = NotedModel(models.answers), _progress(len(rows)), []
    for number, row in enumerate(rows, start=1):
        streamed.append(stream(model, policy, row, watched=args.watched))
        told(number)
    judged = [each.judged for each in streamed]
    return judged, evaluation.report(judged, ("token", "reply")) | {"halts": halts(streamed)}


async def _judge_all(
    screen: PromptScreen, policy: Policy, rows: Sequence[Row], told: Callable[[int], None]
) -> list[Judged]:
    judged = []
    await _judge(screen, policy, _FIRST)
    for number, row in enumerate(rows, start=1):
        first, second, fast_ms, full_ms = await _judge(screen, policy, row.text)
        verdict = stricter(first, second)
        judged.append(Judged(row, harm(second.scores), verdict.action, fast_ms, full_ms))
        told(number)
    return judged


def _spread(rows: Sequence[Row], limit: int) -> list[Row]:
    step = max(len(rows) / max(limit, 1), 1.0)
    return [rows[int(i * step)] for i in range(min(limit, len(rows)))]


def _progress(total: int) -> Callable[[int], None]:
    """Says on a terminal how far it is."""

    def told(number: int) -> None:
        if number % 50 == 0 or number == total:
            end = "\n" if number == total else ""
            print(f"\r{number} of {total}", end=end, file=sys.stderr, flush=True)

    return told if sys.stderr.isatty() else lambda _number: None


def _table(report: dict[str, Any]) -> list[str]:
    """A line for all rows, each source and each category, under heads."""
    heads = ("", "harmful", "benign", "blocked", "fpr", "watched", "fpr", "auc", "ap", "@1%", "@5%")
    rows = [heads, _figures("all", report["pooled"])]
    rows += [_figures(name, report["sources"][name]) for name in report["sources"]]
    categories = report["categories"]
    often = sorted(categories, key=lambda name: -categories[name]["harmful"])[:_LISTED]
    rows += [_figures(name, categories[name]) for name in categories if name in often]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    times = report["latency_ms"]
    lines += [f"{name}: p50 {times[name]['p50']} ms, p99 {times[name]['p99']} ms" for name in times]
    for name, values in report.get("halts", {}).items():
        lines.append(f"{name} of halted harmful rows: p50 {values['p50']:.0f}, p90 {values['p90']:.0f}")
    if len(categories) > _LISTED:
        lines.append(f"and {len(categories) - _LISTED} rarer categories: see --json")
    lines += [f"left out: {number} rows, {why}" for why, number in report["skipped"].items()]
    return lines


def _figures(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    rates = [figures[how][which] for how in ("blocked", "watched") for which in ("recall", "fpr")]
    at = figures["recall_at_fpr"]
    return (
        name,
        str(figures["harmful"]),
        str(figures["benign"]),
        *(_percent(rate and rate["rate"]) for rate in rates),
        *("" if figures[n] is None else f"{figures[n]:.3f}" for n in ("auc", "ap")),
        _percent(at["0.01"]),
        _percent(at["0.05"]),
    )


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.1f}%"
