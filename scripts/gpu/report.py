"""`report.md`: one page of what a check found, with the machine, the versions and the commit."""

from __future__ import annotations

from scripts.benchmarks.findings import aligned, markdown
from scripts.gpu.state import StageRecord, State

FILE_NAME = "report.md"


def write(state: State) -> None:
    """Write the page beside `state.json`."""
    state.out.mkdir(parents=True, exist_ok=True)
    (state.out / FILE_NAME).write_text(page(state))


def page(state: State) -> str:
    """The page: the options, a line for each stage, then what each found."""
    options = state.options
    engine_args = ", ".join(f"`{name}={value}`" for name, value in options.engine_args.items()) or "none"
    lines = [
        f"# {'Dry run without a GPU' if options.dry_run else 'Results on a GPU'}",
        "",
        f"Commit {options.commit or 'unknown'}. Model of `load` and `bench`: {options.model}.",
        f"Arguments of SGLang beside its own defaults and ours: {engine_args}.",
        "",
        aligned([["stage", "result", "seconds", "missed"], *map(_summary, *_columns(state))]),
    ]
    for name, record in state.records.items():
        lines += ["", f"## {name}", "", *_details(record)]
    return "\n".join(lines).rstrip() + "\n"


def _columns(state: State) -> tuple[list[str], list[StageRecord]]:
    return list(state.records), list(state.records.values())


def _summary(name: str, record: StageRecord) -> list[str]:
    missed = sum(finding.verdict == "missed" for finding in record.findings)
    return [name, record.status, f"{record.seconds:.0f}", str(missed)]


def _details(record: StageRecord) -> list[str]:
    lines = []
    if record.findings:
        lines += [markdown(record.findings), ""]
    for title, rows in record.tables.items():
        lines += [f"{title}:", "", aligned(rows), ""]
    if record.error:
        lines += ["```text", record.error.replace("```", "'''"), "```", ""]
    return lines
