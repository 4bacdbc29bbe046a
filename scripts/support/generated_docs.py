"""What the code generates: the tables in docs/, each after a marker line, and the OpenAPI document."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from app import errors
from app.api.metrics.tables import METRICS
from app.cli import settings_table
from app.settings import table
from scripts.api_document import document, parameter_tables

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- from here to the end: scripts/docs -->\n"
OF_ADMISSION = (
    "max_queued_requests",
    "max_queued_tokens",
    "queue_interactive_s",
    "queue_standard_s",
    "queue_batch_s",
    "ttft_target_s",
    "tpot_target_s",
    "key_slowdown",
    "max_prefill_tokens",
    "isolation",
)


OF_TWO_MODELS = (
    "small_model",
    "small_served_model_name",
    "degrade",
    "degrade_short_tokens",
    "degrade_rise_s",
    "degrade_fall_s",
)


def settings_of(names: Collection[str]) -> str:
    """Their rows of the table in docs/settings.md."""
    chosen = [settings_table.row(setting) for setting in table() if setting.name in names]
    assert len(chosen) == len(names)
    return "\n".join((*settings_table.HEAD, *chosen)) + "\n"


def error_codes() -> str:
    """The table of codes in docs/errors.md."""
    rows = ["| code | status | meaning |", "|---|---|---|"]
    rows += [f"| `{name}` | {code.status} | {code.meaning} |" for name, code in errors.CODES.items()]
    return "\n".join(rows) + "\n"


def metric_rows() -> str:
    """Every metric."""
    rows = ["| name | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |")
    return "\n".join(rows) + "\n"


TABLES: Mapping[str, Callable[[], str]] = {
    "docs/admission.md": lambda: settings_of(OF_ADMISSION),
    "docs/errors.md": error_codes,
    "docs/metrics.md": metric_rows,
    "docs/parameters.md": parameter_tables.markdown,
    "docs/routing.md": lambda: settings_of(OF_TWO_MODELS),
    "docs/settings.md": settings_table.markdown,
}


OPENAPI = "app/api/openapi.json"


def generated(path: str, text: str) -> str:
    """`text` of the file at `path` with everything after the marker made anew; OPENAPI as a whole."""
    if path == OPENAPI:
        return document.as_json()
    head, marker, _ = text.partition(BEGIN)
    if not marker:
        raise ValueError(f"{path} has no line {BEGIN!r}")
    return head + marker + "\n" + TABLES[path]()


def main(argv: list[str]) -> int:
    """Write the files, or with --check name those that differ; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/docs", description="Write the tables in docs/ that come from the code."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if a table is stale"
    )
    arguments = parser.parse_args(argv)
    stale = []
    for path in (*TABLES, OPENAPI):
        text = (ROOT / path).read_text("utf-8")
        if generated(path, text) != text:
            stale.append(path)
    if arguments.check:
        print("\n".join(f"{path} is stale: run scripts/docs" for path in stale), end="")
        return 1 if stale else 0
    for path in stale:
        (ROOT / path).write_text(generated(path, (ROOT / path).read_text("utf-8")), "utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
