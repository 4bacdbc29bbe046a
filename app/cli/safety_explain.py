"""Behind `tokenring safety explain`: why a text is judged as it is. Prints words of the text, logs none."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from app.cli import tables
from app.cli.safety_commands import screen_of
from app.safety.classifiers.bundled_models import Models
from app.safety.evaluation.explain import as_json, explain
from app.safety.policies.policy import Policy
from app.settings import SettingsError

EXIT_OK = 0
_SHOWN = 5
"""Categories in the table, those of the highest scores; JSON has all."""


def run_explain(args: argparse.Namespace, policy: Policy, models: Models) -> int:
    """Print what decides the verdict on a file or on standard input. Raises SettingsError."""
    text = _read(args.file)
    with screen_of(models) as screen:
        try:
            explanation = asyncio.run(explain(text, policy, screen, models))
        except ValueError as exc:
            raise SettingsError(f"{args.file}: {exc}") from exc
    result = as_json(text, explanation, policy)
    print(json.dumps(result, ensure_ascii=False) if args.json else "\n".join(_lines(result)))
    return EXIT_OK


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{name}: {exc}") from exc


def _lines(result: dict[str, Any]) -> list[str]:
    category = f"{result['category']} {result['category_name']}" if result["category"] else "no category"
    sign = ">=" if result["action"] else "<"
    score = f"{result['score']:.3f} {sign} {result['threshold']:.3f}"
    lines = [f"{result['action'] or 'pass'}: {category}, {score} ({result['stage']})"]
    span = result["span"]
    if span is not None:
        lines.append(
            f"decided by characters {span['start']} to {span['end']}: {' '.join(span['text'].split())}"
        )
    top = sorted(result["scores"].items(), key=lambda item: -max(item[1]["ngrams"], item[1]["full"]))
    rows = [(f"{c} {s['name']}", f"{s['ngrams']:.3f}", f"{s['full']:.3f}") for c, s in top[:_SHOWN]]
    lines += ["", tables.text(("score", "n-grams", "with the encoder"), rows, left=1)]
    if result["words"]:
        words = ", ".join(f"{entry['words']} {entry['logit']:+.2f}" for entry in result["words"])
        lines += ["", f"words for the n-grams: {words}"]
    decisions = [(name, action or "pass") for name, action in result["policies"].items()]
    lines += ["", tables.text(("policy", "would"), decisions)]
    return lines
