"""Behind `tokenring safety report`: a server's own traffic by its safety records. Loads no classifier."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.cli import tables
from app.metering.usage import number_of, period_of
from app.safety.evaluation.traffic import (
    RECORDED,
    Judges,
    as_recorded,
    by_policy,
    policies,
    report,
)
from app.safety.policies.policy import Policy
from app.safety.thresholds import MAX_FPR, MIN_FPR
from app.settings import SettingsError
from app.store import keys, safety_records
from app.store.backup import transaction

EXIT_OK = 0
_SHOWN = 20
"""Rows of each table, those with the most refused prompts; JSON has all."""
_HEADS = ("prompts", "refused", "%", "again", "watched", "%", "answers", "halted", "%")


def run_report(args: argparse.Namespace, policy: Policy, data_dir: Path) -> int:
    """Print what each policy makes of the records. Raises StoreRefused, BadRequest, SettingsError."""
    period = period_of(args.period, args.first, args.last, datetime.now(UTC).date())
    first, last = number_of(period.first), number_of(period.last)
    judges: dict[str, Judges] = {RECORDED: as_recorded}
    judges |= {name: by_policy(each) for name, each in policies(policy).items()}
    under = args.under
    if args.block_fpr is not None:
        if not MIN_FPR <= args.block_fpr <= MAX_FPR:
            raise SettingsError(f"--block-fpr: must be {MIN_FPR:g} to {MAX_FPR:g}, got {args.block_fpr:g}")
        under = f"block at {100 * args.block_fpr:g}%"
        judges[under] = by_policy(policy.at_rate(args.block_fpr))
    with tables.working("reading the records"), transaction(data_dir) as connection:
        figures = report(
            safety_records.records(connection, first, last),
            safety_records.totals(connection, first, last),
            judges,
            under,
        )
        names = {key.id: key.terms.name for key in keys.all_keys(connection)}
    document = {
        "object": "safety.report",
        "from": str(period.first),
        "to": str(period.last),
        "policy_hash": policy.hash,
        "mode": "observe" if policy.observing else "enforce",
        **figures,
    }
    for entry in document["by"]["key"]:
        entry["name"] = names.get(entry["value"])
    print(json.dumps(document) if args.json else "\n".join(_lines(document, args.by)))
    return EXIT_OK


def _lines(document: Mapping[str, Any], by: Sequence[str]) -> list[str]:
    first = (
        f"Safety from {document['from']} to {document['to']} (UTC): {document['prompts']:,} prompts and"
        f" {document['answers']:,} answers read, {document['records']:,} of them recorded."
    )
    rows = [(p["name"], *_numbers(p)) for p in document["policies"]]
    lines = [first, "", tables.text(("policy", *_HEADS), rows, left=1)]
    for grouping in by:
        entries = document["by"][grouping]
        ordered = entries
        if len(entries) > _SHOWN:
            ordered = sorted(entries, key=lambda entry: -entry["prompts"]["refused"])[:_SHOWN]
        rows = [(_label(grouping, entry), *_numbers(entry)) for entry in ordered]
        if rows:
            head = f"{grouping} ({document['under']})"
            lines += ["", tables.text((head, *_HEADS), rows, left=1)]
        if len(entries) > _SHOWN:
            lines.append(f"and {len(entries) - _SHOWN} more: see --json")
    return lines


def _label(grouping: str, entry: Mapping[str, Any]) -> str:
    value = entry["value"]
    if grouping == "category":
        return f"{value} {entry['name']}"
    if grouping == "key":
        return f"{value} {entry['name'] or ''}".strip() if value else "no stored key"
    return str(value)


def _numbers(figures: Mapping[str, Any]) -> tuple[str, ...]:
    prompts, answers = figures["prompts"], figures["answers"]
    return (
        str(prompts["read"]),
        str(prompts["refused"]),
        _percent(prompts["refused_rate"]),
        str(prompts["refused_again"]),
        str(prompts["watched"]),
        _percent(prompts["watched_rate"]),
        str(answers["read"]),
        str(answers["halted"]),
        _percent(answers["halted_rate"]),
    )


def _percent(rate: Mapping[str, float] | None) -> str:
    """A rate with its interval, as `0.9 [0.7, 1.2]`."""
    if rate is None:
        return ""
    p, low, high = (100 * rate[name] for name in ("rate", "low", "high"))
    return f"{p:.2f} [{low:.2f}, {high:.2f}]"
