"""Any text has a plain form and at most five views; every disguise is seen through."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.safety.text.normalize import MAX_VIEWS, normalize, views
from scripts.training.safety.obfuscate import DISGUISES, obfuscate

WORDS = [
    "someone",
    "quietly",
    "open",
    "locked",
    "garage",
    "and",
    "take",
    "tools",
    "without",
    "being",
    "noticed",
]
SENTENCES = st.permutations(WORDS).map(lambda words: "how can the " + " ".join(words))
KEPT = {"leet": 0.55, "typos": 0.3}
"""The share of words that must come back; those two leave more than one reading."""
DAMAGED = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from("a b.c-%4&#;\\ux0=+/\u0301\u200b\u202e\U000e0041\u0430\u03bf\uff21\ud800\n"),
    ),
    max_size=200,
)


@settings(max_examples=400, deadline=None)
@given(DAMAGED)
def test_any_text_is_normalized(text: str):
    """The plain form is stable, single-spaced and printable; views begin with it and are few."""
    plain = normalize(text)
    assert normalize(plain) == plain
    assert plain == " ".join(plain.split())
    assert plain.isprintable()
    found = views(text)
    assert found[0] == plain
    assert len(found) <= MAX_VIEWS
    assert len(set(found[1:])) == len(found[1:])


@pytest.mark.parametrize("name", DISGUISES)
@settings(max_examples=40, deadline=None, derandomize=True)  # typos by chance leave too little, one in 10,000
@given(sentence=SENTENCES, seed=st.integers(0, 1 << 32))
def test_a_disguise_is_seen_through(name: str, sentence: str, seed: int):
    """One view has all words of the sentence, or most where the disguise changes what they are."""
    words = set(sentence.split())
    best = max(len(words.intersection(view.split())) for view in views(obfuscate(sentence, name, seed)))
    assert best >= KEPT.get(name, 0.99) * len(words)


@pytest.mark.parametrize("name", DISGUISES)
def test_a_seed_says_it_all(name: str):
    """The same seed gives the same disguise."""
    assert obfuscate("say what you see", name, 7) == obfuscate("say what you see", name, 7)
