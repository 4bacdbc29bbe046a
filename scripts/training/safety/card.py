"""CARD.md: what the shipped classifier is, of what, and how well it does on sources it never saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from app.safety.categories import CATEGORIES
from app.safety.classifiers.classifier import Classifier
from app.safety.policies.calibration import FILE_NAME, Calibration
from app.safety.verdict import harm
from scripts.training.safety import calibrate, rows
from scripts.training.safety.rows import Row

STAGES = ("n-grams", "encoder", "blend", "prompt screen")

SHOWN_GROUPS = 12
"""Groups of ordinary prompts on the card."""

ANSWERS, FAILURES = "## Answers, sources left out", "## Known failures"
"""Headings of the card, between which it tells of answers."""

_TEMPLATE = Path(__file__).with_name("card.md")


def asked(models: Path) -> dict[str, tuple[int, int]]:
    """Of the built-in model's exam, and of intents not trained on, how many are flagged, and all."""
    classifier, table = Classifier.load(models), Calibration.load(models / FILE_NAME)
    at = table.at("categories", CATEGORIES[0], calibrate.BLOCK)
    sets = {"exam": rows.exam(), "held out": [row.text for row in rows.asked() if row.held_out]}
    return {
        name: (sum(harm(classifier.full(text)) >= at for text in texts), len(texts))
        for name, texts in sets.items()
    }


def write(path: Path, figures: Mapping[str, Any], own: Sequence[Row], sizes: Mapping[str, int]) -> None:
    """Write the card; where no replies were measured, what it has of answers stays."""
    card = _text(figures, own, sizes)
    if "replies" not in figures:
        of_answers = path.read_text().partition(ANSWERS)[2].partition(FAILURES)[0]
        prompts, _, rest = card.partition(ANSWERS)
        card = f"{prompts}{ANSWERS}{of_answers}{FAILURES}{rest.partition(FAILURES)[2]}"
    path.write_text(card)


def _text(figures: Mapping[str, Any], own: Sequence[Row], sizes: Mapping[str, int]) -> str:
    """The template with the numbers put in."""
    kinds = Counter((row.kind, bool(row.harmful)) for row in own)
    replies = figures.get("replies", {"examined": 0.0, "answers": {}, "watched answers": {}})
    stages = {name: figures[name] for name in STAGES}
    if "ablation" in figures:
        stages["blend, without the project's rows"] = figures["ablation"]
    return Template(_TEMPLATE.read_text()).substitute(
        own=len(own),
        written=sum(row.source.startswith("written") for row in own),
        held_out=sum(row.held_out for row in own),
        own_counts=", ".join(
            f"{count} {('benign', 'harmful')[harmful]} {kind}s"
            for (kind, harmful), count in sorted(kinds.items())
        ),
        bytes=f"{sum(sizes.values()) / 1e6:.1f}",
        stages=_stages(stages),
        languages=_table("language", figures["prompt screen"]["by_language"]),
        everyday=_table("kept apart", figures["prompt screen"]["kept_apart"]),
        examined=_percent(replies["examined"]),
        answers=_answers(replies["answers"]),
        watched_answers=_answers(replies["watched answers"]),
        other_languages=f"{sum(not row.text.isascii() for row in own if row.kind == 'prompt'):,}",
        sources=_sources(figures["prompt screen"]),
        block=f"{calibrate.BLOCK:.1%}",
        watch=f"{calibrate.WATCH:.1%}",
        groups=_groups(figures["prompt screen"]),
        exam="{} of {}".format(*figures["asked"]["exam"]),
        asked="{} of {}".format(*figures["asked"]["held out"]),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _stages(named: Mapping[str, Any]) -> str:
    lines = [
        "| | harmful prompts, refused / watched | mean of sources | look-alikes | ordinary | AUC |",
        "|---|---|---|---|---|---|",
    ]
    for name, figures in named.items():
        cells = [
            " / ".join(_percent(figures[key][rate]) for rate in ("block", "watch"))
            if figures[key]
            else "none"
            for key in ("pooled_recall", "mean_source_recall", "look_alikes_flagged", "ordinary_flagged")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {figures['auc']:.3f} |")
    return "\n".join(lines)


def _sources(figures: Mapping[str, Any]) -> str:
    return _table("source", figures["by_source"])


def _groups(figures: Mapping[str, Any]) -> str:
    """The groups of ordinary prompts that are refused most, the worst first."""
    worst = sorted(figures["by_group"].items(), key=lambda item: item[1][1:], reverse=True)
    return _table("group of ordinary prompts", dict(worst[:SHOWN_GROUPS]))


def _answers(figures: Mapping[str, Any]) -> str:
    lines = ["| replies | number | halted | at token, p25, p50, p90 |", "|---|---|---|---|"]
    for name, (count, halted, *tokens) in figures.items():
        lines.append(f"| {name} | {count} | {_percent(halted)} | {', '.join(map(str, tokens)) or 'none'} |")
    return "\n".join(lines)


def _table(head: str, rates: Mapping[str, Any]) -> str:
    lines = [f"| {head} | rows | refused | refused or watched |", "|---|---|---|---|"]
    for name, (count, refused, watched) in rates.items():
        lines.append(f"| {name} | {count} | {_percent(refused)} | {_percent(watched)} |")
    return "\n".join(lines)
