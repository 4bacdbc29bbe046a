"""What people are told: kind, of use, and an operator's own words where there are any."""

from __future__ import annotations

import pytest

from app.safety.categories import CATEGORIES
from app.safety.policies.notices import HELP_LINES, Notices
from tests.support.policies import policy


def test_self_harm_names_the_help_line_of_the_country():
    """By its code in any case; without one, how to find a line."""
    assert "Samaritans: 116 123" in Notices("gb", {}).message("S11")
    for country in ("", "ZZ"):
        assert "findahelpline.com" in Notices(country, {}).message("S11")
    assert "emergency number" in Notices("", {}).message("S11")


@pytest.mark.parametrize("category", [*CATEGORIES, None])
def test_every_category_has_words(category):
    """They begin with a person, leave no mark unfilled, and accuse nobody."""
    message = Notices("", {}).message(category)
    assert message.startswith("I ")
    assert "{" not in message
    assert not {"violat", "illegal", "policy"} & set(message.lower().split())


def test_an_operators_words_come_first():
    """Of the category, then of the category built in, then their default."""
    notices = Notices("DE", {"S11": "Talk to us. {help_lines}", "default": "Ask the desk."})
    assert notices.message("S11").startswith("Talk to us. You can reach TelefonSeelsorge: 0800")
    assert notices.message("S1") == notices.message(None) == "Ask the desk."
    assert "rules" in notices.message("JB")


def test_a_policy_has_its_messages():
    """From the file's `messages` and the setting's country."""
    assert policy({"messages": {"hate": "No."}}).notice("S10") == "No."
    assert "988" in policy(country="US").notice("S11")


@pytest.mark.parametrize("country", sorted(HELP_LINES))
def test_help_lines_are_complete(country):
    """A two-letter code, a number, and the site that has it."""
    line = HELP_LINES[country]
    assert len(country) == 2
    assert country.isupper()
    assert any(char.isdigit() for char in line.number)
    assert "." in line.site
