"""What people are told: kind, of use, and an operator's own words where there are any."""

from __future__ import annotations

import pytest

from app.safety.categories import CATEGORIES
from app.safety.policies.notices import HELP_LINES, Notices
from app.safety.verdict import Verdict
from tests.support.policies import policy


def blocked(category: str, **scores: float) -> Verdict:
    """A verdict that refuses for a category, with these scores."""
    return Verdict("block", category, scores.get(category, 1.0), 0.5, "encoder", "policy", scores)


def test_self_harm_names_the_help_line_of_the_country():
    """By its code in any case; without one, how to find a line."""
    assert "Samaritans: 116 123" in Notices("gb", {}).message("S11")
    for country in ("", "ZZ"):
        assert "findahelpline.com" in Notices(country, {}).message("S11")
    assert "emergency number" in Notices("", {}).message("S11")


@pytest.mark.parametrize("category", [*CATEGORIES, None])
def test_every_message_says_what_to_do_and_accuses_nobody(category):
    """What stopped it, that it may be wrong, how to go on and whom to ask, with the request's id."""
    message = Notices("", {}).message(category, "chatcmpl-1")
    if category != "S11":  # which begins with the person
        assert message.startswith("An automatic safety check")
        assert "may be wrong" in message
    assert "You can say it in other words." in message
    assert message.endswith("contact whoever runs this server and name the request chatcmpl-1.")
    assert "{" not in message
    assert "looks like" not in message
    assert not {"violate", "illegal", "policy"} & set(message.lower().split())


def test_a_message_names_the_contact_of_the_settings():
    """In place of whoever runs the server; without a request nothing is said of one."""
    message = Notices("", {}, "https://help.example/safety").message("S1")
    assert "(violent crimes)" in message
    assert message.endswith("contact https://help.example/safety.")


def test_an_operators_words_may_name_contact_and_request():
    """By marks, as the help lines."""
    notices = Notices("", {"default": "Write to {contact}: {request_id}."}, "desk@example.org")
    assert notices.message(None, "chatcmpl-1") == "Write to desk@example.org: chatcmpl-1."


def test_an_operators_words_come_first():
    """Of the category, then of the category built in, then their default."""
    notices = Notices("DE", {"S11": "Talk to us. {help_lines}", "default": "Ask the desk."})
    assert notices.message("S11").startswith("Talk to us. You can reach TelefonSeelsorge: 0800")
    assert notices.message("S1") == notices.message(None) == "Ask the desk."
    assert "rules" in notices.message("JB")


def test_a_policy_has_its_messages():
    """From the file's `messages` and the setting's country."""
    assert policy({"messages": {"hate": "No."}}).notice(blocked("S10", S10=0.9)) == "No."
    assert "988" in policy(country="US").notice(blocked("S11", S11=0.9))


def test_a_category_is_named_where_it_is_sure():
    """Where no other category has over half of its score; of just half it is not sure."""
    rules, own = policy(), Notices("", {})
    assert rules.notice(blocked("S1", S1=0.9, S2=0.44, S3=0.1)) == own.message("S1")
    assert rules.notice(blocked("S1", S1=0.9, S2=0.45, S3=0.1)) == own.message(None)
    assert rules.notice(blocked("S1", S1=0.9)) == own.message("S1")


def test_a_category_that_decided_below_another_is_not_named():
    """As where the higher one is only flagged: a person would be told of what the text hardly is."""
    assert policy().notice(blocked("S1", S1=0.7, S2=0.9)) == Notices("", {}).message(None)


def test_self_harm_is_always_named():
    """However likely another category is: who may think of it is told of help."""
    told = policy(country="US").notice(blocked("S11", S11=0.6, S6=0.59))
    assert told == Notices("US", {}).message("S11")
    assert "988" in told


def test_a_verdict_without_scores_names_its_category():
    """There is nothing that would say otherwise; a span of the hard list has none."""
    rules = policy({"hard_list": ["x"]})
    assert rules.notice(blocked("S2")) == Notices("", {}).message("S2")
    assert rules.notice(rules.halted()) == Notices("", {}).message(None)


def test_an_operators_default_is_told_where_no_category_is_sure():
    """Their message of the category is not."""
    rules = policy({"messages": {"S1": "Of violence.", "default": "Ask the desk."}})
    assert rules.notice(blocked("S1", S1=0.9, S2=0.8)) == "Ask the desk."
    assert rules.notice(blocked("S1", S1=0.9, S2=0.1)) == "Of violence."


@pytest.mark.parametrize("country", sorted(HELP_LINES))
def test_help_lines_are_complete(country):
    """A two-letter code, a number, and the site that has it."""
    line = HELP_LINES[country]
    assert len(country) == 2
    assert country.isupper()
    assert any(char.isdigit() for char in line.number)
    assert "." in line.site
