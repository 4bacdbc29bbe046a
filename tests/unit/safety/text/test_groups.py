"""Groups of texts: by length, role and script, of whatever the text is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.safety.text.groups import LENGTHS, SCRIPTS, group_of, script_of


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Good morning.", "latin"),
        ("Grüße aus Köln", "latin"),
        ("Доброе утро", "cyrillic"),
        ("Καλημέρα", "greek"),
        ("בוקר טוב", "hebrew"),
        ("صباح الخير", "arabic"),
        ("सुप्रभात", "devanagari"),
        ("สวัสดี", "thai"),
        ("早上好", "han"),
        ("おはようございます", "kana"),
        ("좋은 아침", "hangul"),
        ("ბარი", "other"),
        ("12:30, 7 + 5", "none"),
        ("", "none"),
        ("12 — 30", "none"),
        ("print('привет')", "cyrillic"),
    ],
)
def test_the_script_is_that_of_most_letters(text: str, script: str):
    """Digits and punctuation are of none."""
    assert script_of(text) == script


@pytest.mark.parametrize(
    ("length", "name"),
    [
        (0, "0-99"),
        (99, "0-99"),
        (100, "100-499"),
        (500, "500-1999"),
        (2_000, "2000-9999"),
        (10_000, "10000+"),
    ],
)
def test_lengths_are_in_five_groups(length: int, name: str):
    """By characters."""
    assert group_of("x" * length, "user").length == name


def test_a_role_is_of_messages_or_other():
    """Whatever a client sent."""
    assert [group_of("x", role).role for role in ("user", "tool", "wizard", None, 3)] == [
        "user",
        "tool",
        "other",
        "other",
        "other",
    ]


@given(st.text(), st.text())
def test_any_text_has_a_group(text: str, role: str):
    """Whose names are of a bounded set: no text can be in them."""
    group = group_of(text, role)
    assert group.length in LENGTHS
    assert group.script in SCRIPTS


@pytest.mark.parametrize(
    ("letter", "script"), [("\uf900", "han"), ("\u30fc", "kana"), ("\u1e00", "latin"), ("\u1f00", "greek")]
)
def test_letters_of_later_blocks_are_of_their_script(letter: str, script: str):
    """By the first word of their Unicode name."""
    assert script_of(letter) == script
