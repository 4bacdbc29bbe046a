"""The work of `tokenring safety check` and `eval`. Imports numpy and the classifiers."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from app import settings
from app.cli import tables
from app.metering.traffic import Histogram
from app.safety.categories import name_of
from app.safety.classifiers.bundled_models import Models
from app.safety.counters import HOLD_BACK_S, SafetyCounters
from app.safety.evaluation import prompts as evaluation
from app.safety.evaluation import themed_svg
from app.safety.evaluation.explain import verdict_as_json
from app.safety.evaluation.plot import plot
from app.safety.evaluation.prompts import Judged, Row
from app.safety.evaluation.replies import Streamed, halts, stream
from app.safety.policies.policy import Policy
from app.safety.prompt.prompt_screen import PromptScreen
from app.safety.verdict import Verdict, harm, stricter

EXIT_OK = 0
_TIMEOUT_S = 600.0
_FIRST = "Good morning."
"""A text that is judged before the timed ones, because the encoder's first run sets it up."""
_LISTED = 20
"""Categories in the table of `eval`: the most frequent ones, because files may name any number."""
_SHOWN = 3
"""Categories with the highest scores that `check` prints."""


def screen_of(models: Models) -> closing[PromptScreen]:
    """A screen that has time, closed at the end of a `with`."""
    counters = SafetyCounters(Histogram(HOLD_BACK_S))
    return closing(PromptScreen(models.prompts, counters, sure_below=models.sure_below, timeout_s=_TIMEOUT_S))


def check(args: argparse.Namespace, policy: Policy, models: Models) -> int:
    """`tokenring safety check`: print the verdict on one text."""
    text = sys.stdin.read() if args.text == "-" else args.text
    with screen_of(models) as screen:
        asyncio.run(_judge(screen, policy, _FIRST))
        first, second, fast_ms, full_ms = asyncio.run(_judge(screen, policy, text))
    verdict = stricter(first, second)
    result = {
        **verdict_as_json(verdict),
        "observed": verdict.observed,
        "policy_hash": policy.hash,
        "fast_ms": round(fast_ms, 2),
        "full_ms": round(full_ms, 2),
        "scores": {c: round(p, 4) for c, p in second.scores.items()},
        "message": policy.notice(verdict) if verdict.blocked else None,
    }
    print(json.dumps(result, ensure_ascii=False) if args.json else _as_text(result))
    return EXIT_OK


async def _judge(screen: PromptScreen, policy: Policy, text: str) -> tuple[Verdict, Verdict, float, float]:
    """The verdicts of the n-grams and of both classifiers, and the milliseconds of each."""
    messages = [{"role": "user", "content": text}]
    began_s = time.perf_counter()
    first = screen.ngram_verdict(messages, policy)
    between_s = time.perf_counter()
    second = await screen.full_verdict(messages, policy)
    ended_s = time.perf_counter()
    return first, second, 1000 * (between_s - began_s), 1000 * (ended_s - between_s)


def _as_text(result: dict[str, Any]) -> str:
    top = sorted(result["scores"].items(), key=lambda item: -item[1])[:_SHOWN]
    times = f"n-grams {result['fast_ms']:.1f} ms, with the encoder {result['full_ms']:.1f} ms"
    lines = [
        verdict_line(result),
        "highest: " + ", ".join(f"{c} {name_of(c)} {p:.3f}" for c, p in top),
        f"{times}, policy {result['policy_hash']}",
    ]
    if result["message"]:
        lines.append(f"told: {result['message']}")
    return "\n".join(lines)


def verdict_line(verdict: Mapping[str, Any]) -> str:
    """A verdict as JSON has it, as one line."""
    observed = verdict.get("observed")
    action = f"{verdict['action'] or 'pass'}{f' (observed: {observed})' if observed else ''}"
    category = f"{verdict['category']} {verdict['category_name']}" if verdict["category"] else "no category"
    sign = ">=" if verdict["action"] or observed else "<"
    return (
        f"{action}: {category}, {verdict['score']:.3f} {sign} {verdict['threshold']:.3f} ({verdict['stage']})"
    )


def evaluate(args: argparse.Namespace, policy: Policy, models: Models) -> int:
    """`tokenring safety eval`: print the figures over files of labelled rows. Raises SettingsError."""
    if args.plot is not None and not themed_svg.is_available():
        raise settings.SettingsError("--plot: needs matplotlib: .venv/bin/python -m pip install matplotlib")
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
    with screen_of(models) as screen:
        judged = asyncio.run(_judge_all(screen, policy, rows))
    return judged, evaluation.report(judged)


def _replies(
    args: argparse.Namespace, policy: Policy, models: Models, rows: Sequence[Row]
) -> tuple[list[Judged], dict[str, Any]]:

    async def stream_all() -> list[Streamed]:
        return [await stream(models, policy, row, watched=args.watched) for row in tables.progress(rows)]

    streamed = asyncio.run(stream_all())
    judged = [each.judged for each in streamed]
    return judged, evaluation.report(judged, ("token", "reply")) | {"halts": halts(streamed)}


async def _judge_all(screen: PromptScreen, policy: Policy, rows: Sequence[Row]) -> list[Judged]:
    judged = []
    await _judge(screen, policy, _FIRST)
    for row in tables.progress(rows):
        first, second, fast_ms, full_ms = await _judge(screen, policy, row.text)
        verdict = stricter(first, second)
        judged.append(Judged(row, harm(second.scores), verdict.action, fast_ms, full_ms))
    return judged


def _spread(rows: Sequence[Row], limit: int) -> list[Row]:
    step = max(len(rows) / max(limit, 1), 1.0)
    return [rows[int(i * step)] for i in range(min(limit, len(rows)))]


def _table(report: dict[str, Any]) -> list[str]:
    """The table of figures: one line for all rows, for each source and for each category."""
    heads = ("", "harmful", "benign", "blocked", "fpr", "watched", "fpr", "auc", "ap", "@1%", "@5%")
    rows = [_figures("all", report["pooled"])]
    rows += [_figures(name, report["sources"][name]) for name in report["sources"]]
    categories = report["categories"]
    often = sorted(categories, key=lambda name: -categories[name]["harmful"])[:_LISTED]
    rows += [_figures(name, categories[name]) for name in categories if name in often]
    lines = [tables.text(heads, rows, left=0)]
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
