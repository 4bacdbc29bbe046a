"""`tokenring safety explain`: what is printed of one text."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli import safety as cli_safety
from app.cli.main import parser
from app.safety.classifiers.bundled_models import Models
from app.safety.classifiers.ngrams import Evidence
from app.safety.policies.allow import digest_of
from app.settings import SettingsError
from tests.support.policies import WordClassifier, write_models
from tests.support.screens import WordModel, WordReviewer

Run = Callable[..., str]
TEXT = "All is well here. This is bad.\nThank you."


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `safety explain` with a classifier of words; returns standard output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    classifier = WordClassifier(full={"bad": {"S2": 0.95}}, fast={"bad": {"S2": 0.95}})
    models = Models(
        classifier,
        WordModel(),
        WordReviewer(),
        write_models(tmp_path / "models"),
        evidence=lambda _text: [Evidence("bad", 1.5), Evidence("is bad", 0.25)],
        parts=lambda _text: {"ngrams": 1.5, "encoder": -0.25},
    )

    def run_(*argv: str) -> str:
        assert cli_safety.run(parser().parse_args(["safety", "explain", *argv]), lambda: models) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run_


def test_a_file_is_explained(run: Run):
    """The verdict, the sentence that decides, the scores, the words, and what policies would do."""
    lines = run("text.txt").splitlines()
    assert lines[0] == "block: S2 non_violent_crimes, 0.950 >= 0.600 (encoder)"
    assert lines[1] == "decided by characters 18 to 30: This is bad."
    cells = [line.split() for line in lines]
    assert ["S2", "non_violent_crimes", "0.950", "0.950", "0.390", "0.600"] in cells
    assert ["encoder", "-0.25"] in cells
    assert "hard list: no span of it" in lines
    assert f"allow: no entry; sha256 {digest_of(TEXT)}" in lines
    assert "guard: none" in lines
    assert "words for the n-grams: bad +1.50, is bad +0.25" in lines
    assert ["observe", "pass"] in cells
    assert ["enforce", "block"] in cells
    assert ["block", "at", "1%", "block"] in cells


def test_standard_input_is_explained(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Without a file; a text that nothing comes of has no span."""
    monkeypatch.setattr("sys.stdin", io.StringIO("All is well."))
    lines = run().splitlines()
    assert lines[0].startswith("pass: S1 violent_crimes, 0.010 < ")
    assert "decided" not in lines[1]


def test_an_explanation_as_json(run: Run):
    """One object."""
    found = json.loads(run("text.txt", "--json"))
    assert (found["object"], found["action"]) == ("safety.explanation", "block")
    assert found["span"]["text"] == "This is bad."


def test_a_request_is_explained(run: Run, tmp_path: Path):
    """By which of its texts decides; the reason of an entry of `allow`, and what it does."""
    turns = [{"role": "user", "content": "hello"}, {"role": "user", "content": "This is bad enough."}]
    (tmp_path / "request.json").write_text(json.dumps({"messages": turns}))
    (tmp_path / "p.toml").write_text(
        '[[allow]]\nphrase = "this is bad enough"\nreason = "ticket 4711"\ndate = 2026-11-28'
    )
    lines = run("request.json", "--request", "--policy", "p.toml").splitlines()
    assert lines[0].startswith("watch: `allow` lifts what the classifiers say: block: S2 ")
    assert lines[1] == "decided by message 2 (user)"
    (allowed,) = [line for line in lines if line.startswith("allow: ")]
    assert "entry 1 (ticket 4711), which lifts the refusal" in allowed
    (tmp_path / "request.json").write_text(json.dumps(turns))
    assert run("request.json", "--request").startswith("block: S2 ")


@pytest.mark.parametrize("text", ["{secret", "5", '{"secret": 1}', '["secret"]'])
def test_what_is_no_request_is_refused(run: Run, tmp_path: Path, text: str):
    """The message names the file, and says nothing of its text."""
    (tmp_path / "request.json").write_text(text)
    with pytest.raises(SettingsError, match=r"request\.json") as refused:
        run("request.json", "--request")
    assert "secret" not in str(refused.value)


def test_a_guard_is_named(run: Run, tmp_path: Path):
    """It needs a server, and is not asked."""
    (tmp_path / "tokenring.toml").write_text('safety_guard_model = "org/guard"')
    assert "guard: org/guard, not asked: it needs a server" in run("text.txt").splitlines()


def test_a_text_is_explained_under_another_policy(run: Run, tmp_path: Path):
    """Of `--policy`, or for a key of `--level`."""
    (tmp_path / "p.toml").write_text('[categories.S2]\naction = "watch"')
    assert run("text.txt", "--policy", "p.toml").startswith("watch: S2")
    assert run("text.txt", "--policy", "p.toml", "--level", "strict").startswith("block: S2")


def test_what_cannot_be_read_or_is_too_long_is_refused(run: Run, tmp_path: Path):
    """The message names the file, and says nothing of its text."""
    with pytest.raises(SettingsError, match="missing"):
        run("missing.txt")
    (tmp_path / "long.txt").write_text("word " * 5_000)
    with pytest.raises(SettingsError, match=r"long.txt: the text has 25,000 characters"):
        run("long.txt")
