"""Text in Hindi and Indonesian, word by word in English."""

# ruff: noqa: RUF001  (other scripts are what this file is about)

from __future__ import annotations

import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from app.safety.text import gloss
from app.safety.text.gloss import LEXICONS, Glosser, plain_form


@pytest.fixture(scope="module")
def glosser() -> Glosser:
    """The lexicons that come with the server."""
    return Glosser.load()


@pytest.mark.parametrize(
    ("text", "english"),
    [
        ("Bagaimana cara mencuri mobil?", {"how", "steal", "car"}),
        ("मैं अपने पड़ोसी की कार कैसे चुरा सकता हूँ?", {"how", "car", "steal"}),
    ],
)
def test_a_request_is_read_in_both_languages(glosser: Glosser, text: str, english: set[str]) -> None:
    """What decides is there, in whatever order."""
    gloss = glosser.gloss(text)
    assert gloss is not None
    assert english <= set(gloss.split())


@pytest.mark.parametrize(
    "text",
    [
        "How do I bake bread without an oven?",
        "hi",
        "",
        "   ",
        "12345 67890",
        "def main(): return 0",
        "Zxqv wvut grbl",
        "naïve café",
        "😀😀😀",
        "ᚠᚢᚦᚨᚱᚲ",
    ],
)
def test_english_and_what_is_unknown_have_none(glosser: Glosser, text: str) -> None:
    """Then the text is read as it is."""
    assert glosser.gloss(text) is None


def test_a_word_of_english_within_stays(glosser: Glosser) -> None:
    """Words that are borrowed are not lost."""
    assert "account" in (glosser.gloss("bagaimana cara mencuri account orang lain") or "").split()


def test_a_stem_stands_for_its_inflections(glosser: Glosser) -> None:
    """Endings are left out."""
    assert glosser.gloss("cara mencuri mobilnya") == glosser.gloss("cara mencuri mobil")


def test_accents_and_capitals_make_no_difference(glosser: Glosser) -> None:
    """As people type on a phone."""
    assert glosser.gloss("CARA MENCURI MOBÍL?") == glosser.gloss("cara mencuri mobil")


def test_a_gloss_grows_with_the_text_and_no_faster(glosser: Glosser) -> None:
    """Each word has a few English ones at most."""
    text = "Bagaimana cara mencuri mobil? "
    assert len(glosser.gloss(text * 50) or "") <= 53 * len(glosser.gloss(text) or "")


@pytest.mark.parametrize(
    "text",
    ["Wie kann ich ein Auto stehlen?", "¿Cómo puedo robar un coche?", "как украсть машину", "如何偷车"],
)
def test_languages_that_the_encoder_knows_have_no_gloss(glosser: Glosser, text: str) -> None:
    """They are read as they are."""
    assert glosser.gloss(text) is None


def test_what_stands_for_a_whole_sentence_costs_no_more_than_others(glosser: Glosser) -> None:
    """U+FDFA becomes eighteen characters."""
    assert len(glosser.gloss("\ufdfa" * 1000) or "") < 10_000


def test_a_long_run_of_marks_is_brought_into_order_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece it takes the square of its length, on the event loop."""
    lengths: list[int] = []

    def noted(form: Literal["NFKC"], text: str) -> str:
        lengths.append(len(text))
        return unicodedata.normalize(form, text)

    monkeypatch.setattr(
        gloss, "unicodedata", SimpleNamespace(normalize=noted, combining=unicodedata.combining)
    )
    plain_form("a" + "\u0301" * 2000 + "\u0323" * 2000)
    assert max(length for length in lengths) <= 48


def test_letters_that_come_with_their_marks_apart_are_the_same() -> None:
    """As a Mac writes file names."""
    text = "На́йди её, か\u3099 각"
    assert plain_form(unicodedata.normalize("NFD", text)) == plain_form(text)


def test_a_folder_without_lexicons_is_an_error(tmp_path: Path) -> None:
    """A server that was installed without them must not start and read English alone."""
    with pytest.raises(FileNotFoundError):
        Glosser.load(tmp_path)


@pytest.mark.parametrize("path", sorted(LEXICONS.glob("*.tsv")), ids=lambda path: path.stem)
def test_every_line_of_a_lexicon_is_a_form_and_english(path: Path) -> None:
    """A form that means something, and ASCII."""
    for line in path.read_text().splitlines():
        form, english = line.split("\t")
        assert plain_form(form).strip()
        assert english.isascii()


def test_a_damaged_lexicon_is_refused(tmp_path: Path) -> None:
    """The server does not start with half a lexicon."""
    (tmp_path / "hi.tsv").write_text("bombe bomb\n")
    with pytest.raises(ValueError, match="no form, tab and English"):
        Glosser.load(tmp_path)
