"""A key's terms against the models and prices that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.core import KeyTerms
from app.doctor.key_terms import remarks
from app.settings import Settings
from app.store.opening import lock, note_models

PRICED = ({"model": "scripted", "input": "1", "output": "1"},)


@pytest.mark.parametrize(
    ("terms", "settings", "words"),
    [
        (KeyTerms("a"), {}, []),
        (KeyTerms("a", models=("scripted",)), {}, []),
        (
            KeyTerms("a", models=("scripted", "x")),
            {},
            ["No model is called 'x': the settings name 'scripted'."],
        ),
        (KeyTerms("a", models=("scripted-small",)), {"small_model": "scripted"}, []),
        (KeyTerms("a", models=("mine",)), {"small_model": "/models/mine"}, []),
        (KeyTerms("a", models=("x",)), {"engine": "remote"}, []),
        (KeyTerms("a", budget_micro_usd=1), {"prices": PRICED}, []),
        (KeyTerms("a", budget_micro_usd=1), {}, ["The budget does not bound 'scripted'"]),
        (KeyTerms("a", budget_micro_usd=1, models=("x",)), {"prices": PRICED}, ["No model is called 'x'"]),
        (
            KeyTerms("a", budget_micro_usd=1),
            {"prices": PRICED, "small_model": "scripted"},
            ["The budget does not bound 'scripted-small'"],
        ),
        (KeyTerms("a", budget_micro_usd=1), {"prices": ({"model": "m"},)}, ["The prices cannot be read"]),
    ],
)
def test_each_name_that_is_not_there_is_a_sentence(
    tmp_path: Path, terms: KeyTerms, settings: dict[str, object], words: list[str]
):
    """By the settings, where no server runs; a server of another machine may have any model."""
    found = remarks(terms, Settings(**{"engine": "scripted", **settings}), tmp_path)  # type: ignore[arg-type]
    assert len(found) == len(words)
    for sentence, expected in zip(found, words, strict=True):
        assert expected in sentence


def test_a_running_server_knows_better(tmp_path: Path):
    """What it has loaded counts; a name of the settings that it has not loaded is told apart."""
    settings = Settings(engine="scripted", small_model="scripted")
    terms = KeyTerms("a", models=("scripted", "scripted-small", "x"))
    with lock(tmp_path) as held:
        assert len(remarks(terms, settings, tmp_path)) == 1, "it starts, and has not said"
        note_models(held, ["scripted"])
        assert remarks(terms, settings, tmp_path) == [
            "The model 'scripted-small' is in the settings, but the server has not loaded it.",
            "No model is called 'x': the server has loaded 'scripted'.",
        ]
