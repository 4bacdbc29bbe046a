"""`tokenring safety`: what `check` and `eval` print, and what they refuse."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from app.cli import safety as cli_safety
from app.cli.main import EXIT_USAGE, main, parser
from app.safety.categories import CATEGORIES
from app.safety.classifiers import bundled_models as shipped
from app.safety.classifiers.bundled_models import Models
from app.settings import SettingsError
from tests.support.policies import WordClassifier, write_models
from tests.support.screens import WordModel, WordReviewer

Run = Callable[..., tuple[int, str]]
CLASSIFIER = WordClassifier(full={"bad": {"S2": 0.95}, "grey": {"S11": 0.5}})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `safety` with a classifier of words: (exit status, standard output)."""
    monkeypatch.chdir(tmp_path)
    models = Models(CLASSIFIER, WordModel("bad"), WordReviewer("bad"), write_models(tmp_path / "models"))

    def run_(*argv: str) -> tuple[int, str]:
        status = cli_safety.run(parser().parse_args(["safety", *argv]), lambda: models)
        return status, capsys.readouterr().out

    return run_


def rows(path: Path) -> Path:
    """A file of labelled rows: four harmful, of which one is missed, and four benign."""
    texts = [("bad 1", 1), ("bad 2", 1), ("grey 3", 1), ("fine 4", 1)]
    texts += [(f"fine {i}", 0) for i in range(5, 8)] + [("grey 9", 0)]
    lines = [
        {"text": t, "label": y, "category": "S2" if y else None, "source": "ab"[i % 2], "kind": "prompt"}
        for i, (t, y) in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_text_is_judged(run: Run):
    """What is done, by which category, at which threshold, how long it took, and what the person is told."""
    status, out = run("check", "so bad")
    assert status == 0
    assert out.startswith("block: S2 non_violent_crimes, 0.950 >= 0.600 (encoder)\nhighest: S2 ")
    assert "told: An automatic safety check (non-violent crimes) stopped this." in out
    assert run("check", "fine")[1].startswith("pass: S1 violent_crimes, 0.010 < ")


def test_a_verdict_as_json(run: Run):
    """One object with every score; the message is of what is blocked only."""
    found = json.loads(run("check", "grey", "--json")[1])
    assert (found["action"], found["category"], found["category_name"]) == ("watch", "S11", "self_harm")
    assert list(found["scores"]) == list(CATEGORIES)
    assert found["message"] is None


def test_a_text_comes_from_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch):
    """With `-`."""
    monkeypatch.setattr("sys.stdin", io.StringIO("so bad"))
    assert run("check", "-")[1].startswith("block")


def test_a_text_is_judged_as_for_a_strict_key(run: Run):
    """`--level strict` blocks what is watched otherwise, with the message of its category."""
    assert run("check", "grey")[1].startswith("watch: S11")
    out = run("check", "grey", "--level", "strict")[1]
    assert out.startswith("block: S11")
    assert "findahelpline.com" in out


def test_a_text_is_judged_by_another_policy(run: Run, tmp_path: Path):
    """`--policy` takes the place of the setting."""
    (tmp_path / "p.toml").write_text('[categories.S2]\naction = "flag"')
    assert run("check", "so bad", "--policy", "p.toml")[1].startswith("flag: S2")


def test_files_are_measured(run: Run, tmp_path: Path):
    """Recall and false positives as the policy acts, over both, and each source and category."""
    path = rows(tmp_path / "rows.jsonl")
    found = json.loads(run("eval", str(path), "--json", "--plot", "figures.svg")[1])
    assert (found["rows"], found["files"], found["skipped"]) == (8, [str(path)], {})
    pooled = found["pooled"]
    assert (pooled["blocked"]["recall"]["rate"], pooled["blocked"]["fpr"]["rate"]) == (0.5, 0.0)
    assert (pooled["watched"]["recall"]["rate"], pooled["watched"]["fpr"]["rate"]) == (0.75, 0.25)
    assert list(found["sources"]) == ["a", "b"]
    assert list(found["categories"]) == ["S2"]
    assert found["latency_ms"]["full"]["p50"] >= 0
    assert (tmp_path / "figures.svg").read_text().startswith("<svg")


def test_figures_are_a_table(run: Run, tmp_path: Path):
    """Heads, all rows, each source, each category, and the latency of both looks."""
    lines = run("eval", str(rows(tmp_path / "rows.jsonl")))[1].splitlines()
    assert lines[1].split()[:5] == ["all", "4", "4", "50.0%", "0.0%"]
    assert [line.split()[0] for line in lines[2:]] == ["a", "b", "S2", "fast:", "full:"]


def test_a_table_has_the_most_frequent_categories(run: Run, tmp_path: Path):
    """Files may have a hundred names of their own; JSON has them all."""
    path = tmp_path / "rows.jsonl"
    lines = [{"text": "bad", "label": 1, "category": f"c{i}"} for i in range(25) for _ in range(2 + i)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = run("eval", str(path))[1]
    assert "and 5 rarer categories: see --json" in out
    assert " c24 " in out
    assert " c4 " not in out
    assert len(json.loads(run("eval", str(path), "--json")[1])["categories"]) == 25


def test_replies_are_measured_as_they_stream(run: Run, tmp_path: Path):
    """`--kind output`: a halt is what blocks; after how many tokens, and how many had gone out by then."""
    path = tmp_path / "rows.jsonl"
    fine = "all is well and so are we " * 8
    texts = [(fine + "bad bad bad " * 3 + fine, 1), (fine, 0), ("bad bad", 1), ("", 0)]
    lines = [{"text": text, "label": label, "kind": "output"} for text, label in texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = json.loads(run("eval", str(path), "--kind", "output", "--json")[1])
    assert (found["kind"], found["rows"]) == ("output", 4)
    assert found["pooled"]["blocked"]["recall"]["rate"] == 1.0
    assert found["pooled"]["blocked"]["fpr"]["rate"] == 0.0
    assert found["halts"]["halted_at_tokens"]["max"] == 58
    assert found["halts"]["released_tokens"]["max"] == 56
    watched = json.loads(run("eval", str(path), "--kind", "output", "--watched", "--json")[1])
    assert watched["halts"]["released_tokens"]["max"] == 47, "12 are held from the first token on"
    table = run("eval", str(path), "--kind", "output")[1]
    assert "halted_at_tokens of halted harmful rows: p50 58" in table
    assert "no output" not in table


def test_replies_are_measured_as_they_are_reviewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A reply is halted where the second stage finds it harmful, and has the scores of its reviews."""
    monkeypatch.chdir(tmp_path)
    answers, reviewer = WordModel("bad"), WordReviewer("worse")
    models = Models(CLASSIFIER, answers, reviewer, write_models(tmp_path / "models"))
    path = tmp_path / "rows.jsonl"
    texts = [("so worse and bad " * 2, 1), ("all is well and bad in a way " * 2, 0), ("worse by far", 1)]
    lines = [{"text": text, "label": label, "kind": "output"} for text, label in texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = parser().parse_args(["safety", "eval", str(path), "--kind", "output", "--json"])
    assert cli_safety.run(command, lambda: models) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pooled"]["blocked"]["recall"]["rate"] == 0.5, "one was never reviewed"
    assert found["pooled"]["blocked"]["fpr"]["rate"] == 0.0
    assert reviewer.prompt_harms == [0.0] * len(reviewer.asked)


def test_only_outputs_can_be_watched(run: Run, tmp_path: Path):
    """For prompts, being watched is an outcome."""
    with pytest.raises(SettingsError, match=r"--watched"):
        run("eval", str(rows(tmp_path / "rows.jsonl")), "--watched")


def test_a_part_of_the_rows_can_be_measured(run: Run, tmp_path: Path):
    """`--limit` takes rows that are evenly spread."""
    found = json.loads(run("eval", str(rows(tmp_path / "rows.jsonl")), "--limit", "4", "--json")[1])
    assert (found["pooled"]["harmful"], found["pooled"]["benign"]) == (2, 2)


@pytest.mark.parametrize(
    "argv",
    [
        ["check", "x", "--policy", "nowhere.toml"],
        ["check", "x", "--config", "nowhere.toml"],
    ],
)
def test_what_cannot_be_done_is_one_line(argv, capsys, tmp_path, monkeypatch):
    """It ends with status 2, and says what is wrong."""
    monkeypatch.chdir(tmp_path)
    models = Models(CLASSIFIER, WordModel("bad"), WordReviewer("bad"), write_models(tmp_path / "models"))
    monkeypatch.setattr(shipped, "load", lambda: models)
    assert main(["safety", *argv]) == EXIT_USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenring: nowhere.toml")


def test_damaged_models_are_one_line(capsys, tmp_path, monkeypatch):
    """Without the classifiers' files nothing is judged."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shipped, "load", partial(shipped.load, write_models(tmp_path / "models")))
    assert main(["safety", "check", "x"]) == EXIT_USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert "classifier" in line


def test_a_plot_that_cannot_be_written_is_named(run: Run, tmp_path: Path):
    """As in a directory that is not there."""
    path = rows(tmp_path / "rows.jsonl")
    with pytest.raises(SettingsError, match=r"--plot: .*nowhere"):
        run("eval", str(path), "--plot", "nowhere/figures.svg")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The server does without it, so a plain set-up may lack it: the error says how to get it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(SettingsError, match=r"--plot: needs matplotlib: .* pip install matplotlib"):
        run("eval", str(tmp_path / "absent.jsonl"), "--plot", "figures.svg")


def test_what_is_only_observed_is_said(run: Run, tmp_path: Path):
    """A text passes, and the policy would have refused it; `eval` counts what it would do."""
    (tmp_path / "p.toml").write_text('mode = "observe"')
    out = run("check", "so bad", "--policy", "p.toml")[1]
    assert out.startswith("pass (observed: block): S2 non_violent_crimes, 0.950 >= 0.600")
    found = json.loads(run("check", "so bad", "--level", "observe", "--json")[1])
    assert (found["action"], found["observed"], found["message"]) == (None, "block", None)
    path = rows(tmp_path / "rows.jsonl")
    blocked = [
        json.loads(run("eval", str(path), "--json", *options)[1])["pooled"]["blocked"]["recall"]["rate"]
        for options in (("--policy", "p.toml"), ("--level", "observe"))
    ]
    assert blocked == [0.5, 0.0]
