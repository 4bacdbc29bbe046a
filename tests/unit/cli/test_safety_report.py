"""`tokenring safety report`: what is printed of a store's safety records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import EXIT_USAGE, main
from app.cli.store import EXIT_PIPE
from app.core import KeyTerms
from app.store import keys, safety_records
from app.store.backup import make_missing, transaction
from app.store.safety_records import SafetyRecord, Total
from tests.support.commands import without_store

Run = Callable[..., tuple[int, str, str]]
TODAY = int(f"{datetime.now(UTC):%Y%m%d}")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `safety report` over the store in `data`: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run_(*argv: str) -> tuple[int, str, str]:
        status = main(["safety", "report", *argv])
        out, err = capsys.readouterr()
        return status, out, err

    return run_


@pytest.fixture
def key_id(tmp_path: Path) -> str:
    """A key of a store with four records of a hundred prompts, by shipped thresholds of any kind."""
    data = tmp_path / "data"
    make_missing(data)
    with transaction(data, write=True) as connection:
        key = keys.create(connection, KeyTerms("clinic"), 0).key
        record = SafetyRecord(
            at_us=0,
            day=TODAY,
            key_id=key.id,
            subject="prompt",
            stage="encoder",
            action="block",
            done=None,
            category="S2",
            score=0.9999,
            threshold=0.6,
            policy_hash="0123456789abcdef",
            length="0-99",
            role="user",
            script="latin",
            again=False,
            watched=False,
            readings=[("encoder", 1, False, {"S2": 0.9999})],
        )
        others = [
            replace(record, key_id="", category="S11", again=True),
            replace(record, action="watch", readings=[("encoder", 1, False, {"S2": 0.002})]),
            replace(record, day=20260101),
        ]
        total = Total(TODAY, key.id, "prompt", "0123456789abcdef", "0-99", "user", "latin")
        totals = {total: 80, total._replace(key_id=""): 20, total._replace(day=20260101): 5}
        safety_records.add(connection, [record, *others], totals)
    return key.id


def row(out: str, name: str) -> list[str]:
    """The cells of the row that begins so."""
    [line] = [line for line in out.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


def test_policies_categories_and_keys_are_tables(run: Run, key_id: str):
    """What was recorded, and what others would have done; keys have their names."""
    status, out, _ = run()
    assert status == 0
    assert out.startswith("Safety from ")
    assert "100 prompts and 0 answers read, 3 of them recorded." in out
    assert row(out, "recorded ")[:5] == ["100", "2", "2.00", "[0.55,", "7.00]"]
    assert row(out, "observe ")[:2] == ["100", "0"]
    assert row(out, "block at 0.1%")[:2] == ["100", "2"]
    assert "category (recorded)" in out
    assert row(out, "S11 self_harm")[:2] == ["100", "1"]
    assert row(out, f"{key_id} clinic")[:2] == ["80", "1"]
    assert row(out, "no stored key")[:2] == ["20", "1"]


def test_groups_are_chosen(run: Run, key_id: str):
    """In the order in which they are named; another is refused with what there is."""
    del key_id
    out = run("--by", "script,day", "--under", "enforce")[1]
    assert "script (enforce)" in out
    assert out.index("script (") < out.index("day (")
    assert "category (" not in out
    with pytest.raises(SystemExit):
        run("--by", "owner")


def test_a_target_is_a_row_of_its_own(run: Run, key_id: str):
    """And the groups are under it; one that no policy may have is refused."""
    del key_id
    out = run("--block-fpr", "0.003")[1]
    assert row(out, "block at 0.3%")[:2] == ["100", "2"]
    assert "category (block at 0.3%)" in out
    status, _, err = run("--block-fpr", "0.5")
    assert (status, "must be 0.0001 to 0.1" in err) == (EXIT_USAGE, True)


def test_days_are_chosen(run: Run, key_id: str):
    """As for `usage`."""
    del key_id
    found = json.loads(run("--period", "2026-01-01", "--json")[1])
    assert (found["object"], found["from"], found["to"]) == ("safety.report", "2026-01-01", "2026-01-01")
    assert (found["prompts"], found["records"]) == (5, 1)
    status, _, err = run("--period", "soon")
    assert (status, "period" in err) == (EXIT_USAGE, True)


def test_a_report_as_json(run: Run, key_id: str):
    """One object with every grouping; keys have their names."""
    found: dict[str, Any] = json.loads(run("--json")[1])
    assert (found["mode"], found["under"], found["records"]) == ("enforce", "recorded", 3)
    assert set(found["by"]) == {"category", "key", "length", "role", "script", "day"}
    names = {entry["value"]: entry["name"] for entry in found["by"]["key"]}
    assert names == {key_id: "clinic", "": None}


def test_many_values_are_cut(run: Run, key_id: str, tmp_path: Path):
    """To those with the most refusals; JSON has them all."""
    del key_id
    with transaction(tmp_path / "data", write=True) as connection:
        totals = {Total(TODAY, f"tr-{n}", "prompt", "h", "0-99", "user", "latin"): 1 for n in range(30)}
        safety_records.add(connection, [], totals)
    out = run("--by", "key")[1]
    assert "and 12 more: see --json" in out
    assert "clinic" in out


def test_the_policy_of_the_settings_is_compared(run: Run, key_id: str, tmp_path: Path):
    """Or that of `--policy`; no classifier is loaded for it."""
    del key_id
    (tmp_path / "p.toml").write_text('mode = "observe"\naction = "flag"')
    out = run("--policy", "p.toml")[1]
    assert row(out, "enforce ")[:2] == ["100", "0"]
    assert json.loads(run("--policy", "p.toml", "--json")[1])["mode"] == "observe"


def test_without_a_store_there_is_no_report(run: Run):
    """The message says where it was looked for."""
    status, _, err = run("--data-dir", "nowhere")
    assert (status, "has no store" in err) == (EXIT_USAGE, True)


def test_a_reader_that_has_enough_is_no_error(run: Run, key_id: str, tmp_path: Path):
    """As `head`: the command ends in silence."""
    del run, key_id
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "app", "safety", "report"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(
        command, cwd=tmp_path, stdout=writes, stderr=subprocess.PIPE, env=environment, check=False, timeout=55
    )
    os.close(writes)
    assert (ended.returncode, without_store(ended.stderr.decode())) == (EXIT_PIPE, "")
