"""Behind `tokenring safety explain`: why a request is judged as it is. Prints words of it, logs none."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from app.cli import tables
from app.cli.safety_commands import screen_of, verdict_line
from app.safety.classifiers.bundled_models import Models
from app.safety.evaluation.explain import explain
from app.safety.policies.policy import Policy
from app.settings import SettingsError

EXIT_OK = 0
_SHOWN = 5
"""Categories and texts in a table, those of the highest scores; JSON has all."""
_SCORES = ("score", "n-grams", "with the encoder", "watch at", "block at")


def run_explain(args: argparse.Namespace, policy: Policy, models: Models, guard: str = "") -> int:
    """Print what decides the verdict on a file or on standard input; `guard` is the settings' guard model.

    Raises SettingsError.
    """
    text = _read(args.file)
    body = _body(text, args.file) if args.request else {"messages": [{"role": "user", "content": text}]}
    with screen_of(models) as screen, tables.working("reading the text"):
        try:
            result = asyncio.run(explain(body, policy, screen, models))
        except ValueError as exc:
            raise SettingsError(f"{args.file}: {exc}") from exc
    result["guard"] = guard or None
    print(json.dumps(result, ensure_ascii=False) if args.json else "\n".join(_lines(result)))
    return EXIT_OK


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{name} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc


def _body(text: str, name: str) -> dict[str, Any]:
    """The request body of a file, or the one of a list of messages. An error does not repeat the text."""
    try:
        body = json.loads(text)
    except ValueError:
        raise SettingsError(f"{name}: is no JSON") from None
    body = {"messages": body} if isinstance(body, list) else body
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise SettingsError(f"{name}: expected a request body with messages, or a list of messages")
    return dict(body)


def _lines(result: dict[str, Any]) -> list[str]:
    """The verdict, what allows or refuses, the text and its sentences, and then tables."""
    lines = [verdict_line(result["classified"])]
    if result["lifted"]:
        lines[0] = f"{result['action'] or 'pass'}: `allow` lifts what the classifiers say: {lines[0]}"
    if len(result["texts"]) > 1:
        lines.append(f"decided by {result['texts'][0]['name']}")
    span = result["span"]
    if span is not None:
        lines.append(
            f"decided by characters {span['start']} to {span['end']}: {' '.join(span['text'].split())}"
        )
    lines += ["", *_others(result), "", tables.text(_SCORES, _score_rows(result), left=1)]
    if result["models"]:
        rows = [(name, f"{logit:+.2f}") for name, logit in result["models"].items()]
        lines += ["", tables.text(("model alone", "logit of harm"), rows, left=1)]
    if result["words"]:
        words = ", ".join(f"{entry['words']} {entry['logit']:+.2f}" for entry in result["words"])
        lines += ["", f"words for the n-grams: {words}"]
    if len(result["texts"]) > 1:
        texts = [(text["name"], verdict_line(text)) for text in result["texts"][:_SHOWN]]
        lines += ["", tables.text(("text", "alone"), texts)]
    decisions = [(name, action or "pass") for name, action in result["policies"].items()]
    lines += ["", tables.text(("policy", "would"), decisions)]
    return lines


def _others(result: dict[str, Any]) -> list[str]:
    """Lines on the hard list, the operator's `allow` and a guard."""
    entries = ", ".join(f"entry {each['entry']} ({each['reason']})" for each in result["allow"])
    effect = "lifts the refusal" if result["lifted"] else "lifts nothing"
    return [
        f"hard list: {'a span of it is here; no answer has one' if result['hard_list'] else 'no span of it'}",
        f"allow: {f'{entries}, which {effect}' if entries else 'no entry'}; sha256 {result['sha256']}",
        f"guard: {result['guard'] + ', not asked: it needs a server' if result['guard'] else 'none'}",
    ]


def _score_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    top = sorted(result["scores"].items(), key=lambda item: -max(item[1]["ngrams"], item[1]["full"]))
    return [
        (
            f"{category} {scores['name']}",
            f"{scores['ngrams']:.3f}",
            f"{scores['full']:.3f}",
            *(f"{at:.3f}" if (at := scores["thresholds"].get(a)) else "" for a in ("watch", "block")),
        )
        for category, scores in top[:_SHOWN]
    ]
