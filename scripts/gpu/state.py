"""What a check has found so far, in `state.json`. It is written at each finding: none is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from scripts.benchmarks.findings import Finding

FILE_NAME = "state.json"
Status = Literal["running", "passed", "missed", "failed", "timed out", "skipped"]
FINISHED: tuple[Status, ...] = ("passed", "missed")
"""A stage that came to its end is not repeated."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the stages go by; results of other options are not mixed with these."""

    dry_run: bool = False
    model: str = ""
    """Of `load` and `bench`: `builtin`, `llama-8b-random`, `scripted`, a path or a hub id."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    pairs: int = 4
    commit: str = ""


@dataclass(slots=True)
class StageRecord:
    """What a stage has found."""

    status: Status = "running"
    began_utc: str = ""
    seconds: float = 0.0
    error: str = ""
    """The end of a traceback, or why the stage was skipped."""
    findings: list[Finding] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    """Rows by title, the heads first."""
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        """As it was stored."""
        findings = [Finding(**finding) for finding in stored["findings"]]
        return cls(**{**stored, "findings": findings})


class State:
    """The options and records of a check, in the folder `out`."""

    def __init__(self, out: Path, options: Options, records: dict[str, StageRecord] | None = None) -> None:
        self.out = out
        self.options = options
        self.records = records or {}

    @classmethod
    def load(cls, out: Path) -> Self:
        """What is in the folder. Raises FileNotFoundError where there is nothing."""
        stored = json.loads((out / FILE_NAME).read_text())
        records = {name: StageRecord.of(record) for name, record in stored["stages"].items()}
        return cls(out, Options(**stored["options"]), records)

    @classmethod
    def resumed(cls, out: Path, options: Options) -> Self:
        """What an earlier run with the same options left there, or nothing."""
        try:
            state = cls.load(out)
        except FileNotFoundError:
            return cls(out, options)
        return state if state.options == options else cls(out, options)

    def finished(self, stage: str) -> bool:
        """Whether a stage has come to its end."""
        return stage in self.records and self.records[stage].status in FINISHED

    def save(self) -> None:
        """Write all of it, in place of what was there."""
        self.out.mkdir(parents=True, exist_ok=True)
        stages = {name: asdict(record) for name, record in self.records.items()}
        text = json.dumps({"options": asdict(self.options), "stages": stages}, indent=1, default=str)
        fresh = self.out / f"{FILE_NAME}.new"
        fresh.write_text(text + "\n")
        fresh.replace(self.out / FILE_NAME)


class Checkup:
    """What a stage works with: the options, its time, its folder, and where its findings go."""

    def __init__(self, state: State, stage: str, work: Path, limit_s: float) -> None:
        """`work` is a folder of its own; nothing in it is kept but what `*.log` says."""
        self.options = state.options
        self.work = work
        self._state = state
        self._stage = stage
        self._began_s = time.monotonic()
        self._limit_s = limit_s

    @property
    def record(self) -> StageRecord:
        """What it has found so far."""
        return self._state.records[self._stage]

    def left_s(self) -> float:
        """Seconds until its time is over, at least one."""
        return max(1.0, self._began_s + self._limit_s - time.monotonic())

    def tell(self, text: str) -> None:
        """Print how far it has come."""
        print(f"[{time.monotonic() - self._began_s:6.1f} s] {self._stage}: {text}", flush=True)

    def find(self, *findings: Finding) -> None:
        """Keep findings, and print them."""
        for finding in findings:
            self.record.findings.append(finding)
            self.tell(" ".join(filter(None, (finding.label, "=", finding.value, finding.verdict))))
        self._state.save()

    def holds(self, label: str, value: object, must: str, holds: object) -> None:
        """Keep whether something is as it must be."""
        self.find(Finding(label, str(value), must, "met" if holds else "missed"))

    def add_row(self, title: str, heads: Sequence[str], row: Sequence[object]) -> None:
        """Keep a row of a table."""
        rows = self.record.tables.setdefault(title, [list(heads)])
        rows.append([f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row])
        self._state.save()

    def keep(self, name: str, fact: Any) -> None:
        """Keep a fact, for the JSON alone."""
        self.record.facts[name] = fact
        self._state.save()
