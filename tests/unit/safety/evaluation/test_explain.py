"""Why a text is judged as it is: the sentences that decide, found with bounded work."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.metering.traffic import Histogram
from app.safety.categories import CATEGORIES
from app.safety.classifiers.bundled_models import Models
from app.safety.classifiers.ngrams import Evidence
from app.safety.counters import HOLD_BACK_S, SafetyCounters
from app.safety.evaluation.explain import (
    LEVELS,
    MAX_CHARS,
    MAX_SPANS,
    TRIES,
    WORDS,
    explain,
    joined,
    sentences,
)
from app.safety.policies.allow import digest_of
from app.safety.prompt.prompt_screen import PromptScreen
from app.safety.verdict import Scores, Verdict
from tests.support.policies import WordClassifier, policy
from tests.support.screens import WordModel, WordReviewer

BAD: Mapping[str, Scores] = {"bad": {"S2": 0.95}, "grey": {"S11": 0.5}}


class CountingScreen(PromptScreen):
    """Counts what it reads."""

    num_read = 0

    def ngram_verdict(self, *args: Any) -> Verdict:
        """As PromptScreen does."""
        CountingScreen.num_read += 1
        return super().ngram_verdict(*args)


def explained(
    text: str | Sequence[Mapping[str, object]], classifier: WordClassifier | None = None, **document: object
) -> dict[str, Any]:
    """The explanation of a text, or of messages, by a classifier of words that is as good in haste."""
    CountingScreen.num_read = 0
    classifier = classifier or WordClassifier(full=BAD, fast=BAD)
    screen = CountingScreen(classifier, SafetyCounters(Histogram(HOLD_BACK_S)))
    models = Models(
        classifier,
        WordModel(),
        WordReviewer(),
        Path(),
        evidence=lambda text: [Evidence(w, 1.0) for w in text.split()],
        parts=lambda text: {"letters": float(len(text))},
    )
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    try:
        return asyncio.run(explain({"messages": messages}, policy(document), screen, models))
    finally:
        screen.close()


def decided(text: str, explanation: Mapping[str, Any]) -> str | None:
    """The words of the span."""
    span = explanation["span"]
    if span is None:
        return None
    assert text[span["start"] : span["end"]] == span["text"]
    return str(span["text"])


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("All is well. This is bad! Is it? Yes.", "This is bad!"),
        ("This is bad.", "This is bad."),
        ("bad", "bad"),
        ("One bad.\nTwo fine.\nThree bad.", "One bad.\nTwo fine.\nThree bad."),
        ("Fine. One bad. Two bad. Fine again.", "One bad. Two bad."),
        ("好的。bad。好的。", "bad。"),
        ("grey sentence. fine one.", "grey sentence."),
        ("grey sentence. bad one. fine one.", "bad one."),
        ("All is well.", None),
    ],
)
def test_the_smallest_run_of_sentences_without_which_the_verdict_is_milder(text: str, span: str | None):
    """A refusal becomes a watch or nothing, a watch nothing; at worst it is all of them."""
    assert decided(text, explained(text)) == span


def test_the_work_is_bounded():
    """Of a text in which every other sentence is bad the screen reads a few versions for each length."""
    text = "It is bad. It is fine. " * 400
    explanation = explained(text)
    assert explanation["span"] is not None
    assert CountingScreen.num_read <= 1 + LEVELS * TRIES * MAX_SPANS


@pytest.mark.parametrize("number", [60, 600])
def test_the_one_sentence_among_many_is_found(number: int):
    """Where neighbours count as one, the sentences of those that decide are tried in turn."""
    text = "It is fine. " * number + "This is bad! " + "It is fine. " * number
    explanation = explained(text)
    assert decided(text, explanation) == "This is bad!"
    assert CountingScreen.num_read <= 10


def test_a_longer_text_is_refused():
    """With how long it may be."""
    with pytest.raises(ValueError, match=r"20,001 characters, and at most 20,000"):
        explained("x" * (MAX_CHARS + 1))


def test_what_each_policy_would_do():
    """By the readings of the one verdict; an observing policy is explained as if it were enforced."""
    explanation = explained("This is bad.", mode="observe")
    assert explanation["action"] == "block"
    policies = explanation["policies"]
    assert policies["observe"] is None
    assert policies["enforce"] == policies["block at 0.1%"] == "block"
    assert explained("grey")["policies"]["strict"] == "block"


def test_the_words_that_add_most_are_named():
    """A bounded number; none that takes away."""
    words = explained(" ".join(f"w{i}" for i in range(30)))["words"]
    assert words == [{"words": f"w{i}", "logit": 1.0} for i in range(WORDS)]


def test_an_explanation_as_json():
    """Scores of every category by both looks, and the span with its text."""
    text = "All is well. This is bad."
    found = explained(text)
    assert (found["action"], found["category"], found["category_name"]) == (
        "block",
        "S2",
        "non_violent_crimes",
    )
    assert found["span"] == {"start": 13, "end": 25, "text": "This is bad."}
    assert tuple(found["scores"]) == CATEGORIES
    assert found["scores"]["S2"] == {
        "name": "non_violent_crimes",
        "ngrams": 0.95,
        "full": 0.95,
        "thresholds": {"watch": 0.39, "block": 0.6},
    }
    assert found["models"] == {"letters": 25.0}
    assert (found["allow"], found["lifted"], found["hard_list"]) == ([], None, False)
    assert found["words"][0] == {"words": "All", "logit": 1.0}
    assert explained("fine")["span"] is None


def test_the_text_that_decides_is_named():
    """Each text of a request is judged alone: messages, several as one, what stands beside them."""
    messages = [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": "One ba"},
        {"role": "user", "content": "Two bad."},
    ]
    explanation = explained(messages)
    texts = explanation["texts"]
    assert texts[0]["name"] == "message 3 (user)"
    assert "messages 2, 3 as one text" in {text["name"] for text in texts}
    assert explanation["span"] == {"start": 0, "end": 8, "text": "Two bad."}
    assert explanation["action"] == texts[0]["action"] == "block"
    classifier = WordClassifier(full={"a\nb": {"S2": 0.95}})
    split = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert explained(split, classifier)["texts"][0]["name"] == "messages 1, 2 as one text"


def test_what_is_allowed_is_explained_as_it_was_refused():
    """The verdict is that of the policy; span, scores and words are of what the classifiers refuse."""
    entry = {"phrase": "this is all so bad", "reason": "ticket 4711", "date": date(2026, 11, 28)}
    explanation = explained("Why? This is all so bad.", allow=[entry])
    assert (explanation["action"], explanation["lifted"]) == ("watch", "S2")
    assert explanation["classified"]["action"] == "block"
    assert decided("Why? This is all so bad.", explanation) == "This is all so bad."
    assert (explanation["policies"]["enforce"], explanation["policies"]["strict"]) == ("watch", "watch")
    assert explanation["allow"] == [{"entry": 1, "reason": "ticket 4711"}]
    assert explanation["sha256"] == digest_of("Why?  This is all so bad.\n")


def test_a_span_of_the_hard_list_is_reported():
    """Not which; it is never to be shown."""
    found = explained("It is project x.", hard_list=["Project X"])
    assert found["hard_list"]
    assert "Project X" not in str(found)


@given(st.text(alphabet=st.sampled_from("ab .!?\n。"), max_size=200), st.integers(1, 10))
def test_sentences_have_every_letter_of_a_text_in_order(text: str, most: int):
    """They do not overlap, and joined they are as many as asked for at most."""
    spans = joined(sentences(text), most)
    assert len(spans) <= most
    edges: Sequence[int] = [edge for span in spans for edge in span]
    assert list(edges) == sorted(edges)
    assert all(text[span.start : span.end].strip() == text[span.start : span.end] != "" for span in spans)
    covered = "".join(text[span.start : span.end] for span in spans)
    assert [c for c in covered if not c.isspace()] == [c for c in text if not c.isspace()]
