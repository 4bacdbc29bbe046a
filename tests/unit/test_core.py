"""The vocabulary: what counts once, what is billed, and whether a key is let in."""

from __future__ import annotations

import pytest

from app.core import SCOPES, TIERS, ChatRequest, Counts, Key, KeyTerms, Prompt, Usage, total_counts


def test_prompt_that_choices_share_counts_once():
    """What each of them generated is added up; the prompt is that of the lowest choice that has begun."""
    counts = {1: Counts(10, 5, 4, 1), 2: Counts(99, 7, 88, 2)}
    assert total_counts(counts) == Counts(10, 12, 4, 3)
    assert total_counts({3: Counts(10, 5, 4, 1)}) == Counts(10, 5, 4, 1)
    assert total_counts({}) == Counts()


def test_withheld_tokens_are_no_part_of_what_a_caller_is_told():
    """They were generated, and released to nobody."""
    assert Usage(10, 7, 4, 2, 3).reported_tokens == 14


def test_operators_words_are_taken_from_the_prompt_and_from_its_cached_beginning():
    """They stand first, so they are cached first; where less was cached, nothing is left to take."""
    prompt = Prompt(range(10), 100, None, unbilled_tokens=3)
    assert prompt.billed_tokens == 7
    assert prompt.as_billed(Counts(10, 5, 8, 1)) == Counts(7, 5, 5, 1)
    assert prompt.as_billed(Counts(10, 5, 2, 1)) == Counts(7, 5, 0, 1)


def test_placing_a_request_changes_nothing_that_its_caller_asked():
    """And keeps what was placed before."""
    request = ChatRequest("chatcmpl-1", "local", "llama", {"messages": []}, 0, max_tokens=5)
    placed = request.with_placement(priority=20).with_placement(cache_salt="salt")
    assert (placed.placement.priority, placed.placement.cache_salt, placed.max_tokens) == (20, "salt", 5)
    assert request.placement.priority == 10


@pytest.mark.parametrize(
    ("expires_at_us", "revoked_at_us", "status"),
    [(None, None, "active"), (101, None, "active"), (100, None, "expired"), (101, 50, "revoked")],
)
def test_key_is_let_in_until_the_microsecond_in_which_it_expires(expires_at_us, revoked_at_us, status):
    """A revoked one never again."""
    key = Key("key_1", "ann", KeyTerms("k", expires_at_us=expires_at_us), 0, revoked_at_us)
    assert key.status(100) == status


def test_names_that_an_operator_writes_are_those_of_the_docs():
    """They are an outside contract."""
    assert (SCOPES, TIERS) == (("chat", "admin"), ("interactive", "standard", "batch"))
