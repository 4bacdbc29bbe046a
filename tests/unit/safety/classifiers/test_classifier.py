"""The classifier over small parts: views, blend, one scale of categories; and the shipped one's files."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from app.safety.categories import CATEGORIES
from app.safety.classifiers.bundled_models import MODELS
from app.safety.classifiers.classifier import (
    FILES,
    SHORT_CHARS,
    Blend,
    Classifier,
    doublings,
    refuses,
)
from app.safety.classifiers.encoder import ANSWER, Encoder
from app.safety.classifiers.model_files import MANIFEST, ModelDamaged
from app.safety.classifiers.multilingual import HARM, TOPICS
from app.safety.classifiers.ngrams import BITS, CATEGORY_BITS, NGrams
from app.safety.text.gloss import Glosser, Lexicon
from app.safety.verdict import Scores, harm
from scripts.training.safety import manifest

BLEND = Blend(
    multilingual=1.0,
    ngrams=0.5,
    bias=0.0,
    length=0.0,
    foreign=1.0,
    foreign_bias=0.0,
    foreign_length=0.0,
    gloss_bias=0.0,
    gloss_most=1.0,
    fast_slope=2.0,
    fast_bias=-1.0,
    fast_length=0.0,
    answer=1.0,
    answer_heard=0.0,
    answer_prior=0.0,
    answer_bias=0.0,
    answer_refusal=0.0,
)


_NO_WORDS = Lexicon({}, frozenset(), 4)
NO_GLOSS = Glosser(_NO_WORDS, _NO_WORDS)


@pytest.fixture(scope="module")
def shipped_classifier() -> Classifier:
    """The shipped one."""
    return Classifier.load(MODELS)


class WordReader:
    """Logit 4 for what has the word `poison`, else -4; the category is S9."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, text: str) -> NDArray[np.float32]:
        """As said."""
        self.seen.append(text)
        logits = np.zeros(1 + len(CATEGORIES), np.float32)
        logits[HARM] = 4.0 if "poison" in text else -4.0
        logits[TOPICS + CATEGORIES.index("S9")] = 3.0
        return logits


class CureEncoder(Encoder):
    """Logit 4 for an answer that has the word `cure`, else -4; the category is S9."""

    def __init__(self) -> None:
        pass

    def end(self, text: str) -> NDArray[np.float32]:
        """As said."""
        logits = np.zeros(2 + len(CATEGORIES), np.float32)
        logits[ANSWER] = 4.0 if "cure" in text else -4.0
        logits[1 + CATEGORIES.index("S9")] = 3.0
        return logits


def flat_ngrams(bias: float = 0.0, *, is_english: bool = True) -> NGrams:
    """N-grams that give every text the same logit, and take it for English or not."""
    return NGrams(
        np.zeros(1 << BITS, np.float16),
        bias,
        np.zeros((len(CATEGORIES), 1 << CATEGORY_BITS), np.float16),
        np.zeros(len(CATEGORIES), np.float32),
        np.zeros(1 << CATEGORY_BITS, np.float16),
        1.0 if is_english else -1.0,
    )


def small(blend: Blend = BLEND, bias: float = 0.0, reader: WordReader | None = None) -> Classifier:
    """A classifier of these parts."""
    return Classifier(flat_ngrams(bias), reader or WordReader(), CureEncoder(), blend, NO_GLOSS)


def test_the_highest_score_is_the_harm():
    """The likeliest category has the harm itself, the others their share of it."""
    scores = small().full("poison")
    assert scores["S9"] == max(scores.values()) == pytest.approx(1 / (1 + np.exp(-4.0)), abs=1e-6)
    assert scores["S1"] == pytest.approx(scores["S9"] * np.exp(-3.0), rel=1e-4)
    assert tuple(scores) == CATEGORIES


def test_the_most_harmful_view_speaks_for_the_text():
    """Spaced letters are joined in a view of their own."""
    classifier = small()
    assert classifier.full("p o i s o n in a well")["S9"] > 0.9 > classifier.full("a well")["S9"]


def test_the_blend_adds_both_logits():
    """The n-grams' logit counts by its factor."""
    plain = small().full("poison")["S9"]
    raised = small(bias=2.0).full("poison")["S9"]
    assert np.log(raised / (1 - raised)) - np.log(plain / (1 - plain)) == pytest.approx(1.0, abs=1e-3)


def test_the_fast_look_asks_no_encoder():
    """It is the n-grams alone, on a scale of their own."""
    reader = WordReader()
    scores = small(bias=3.0, reader=reader).fast("poison").scores()
    assert max(scores.values()) == pytest.approx(1 / (1 + np.exp(-5.0)))
    assert reader.seen == []


@pytest.mark.parametrize(
    "text", ["", "poison", "bake bread", "p o i s o n in a well", "cG9pc29uIGluIGEgd2VsbA=="]
)
def test_the_harm_is_the_highest_of_the_fast_scores(shipped_classifier: Classifier, text: str):
    """By the shipped model, of disguised texts too, whichever view is the worst."""
    quick = shipped_classifier.fast(text)
    assert quick.harm == max(quick.scores().values())


def logit_of(scores: Scores) -> float:
    """The logit of the harm of these scores."""
    return float(np.log(harm(scores) / (1 - harm(scores))))


@pytest.mark.parametrize(
    ("num_chars", "expected"),
    [(0, 0.0), (1, 0.0), (SHORT_CHARS, 0.0), (2 * SHORT_CHARS, 1.0), (8 * SHORT_CHARS, 3.0)],
)
def test_how_often_a_text_is_twice_as_long_as_a_short_one(num_chars: int, expected: float):
    """A short one is not at all; between two powers it is a part of it."""
    assert doublings(num_chars) == expected
    assert doublings(3 * SHORT_CHARS) == pytest.approx(1.585, abs=1e-3)


def test_each_doubling_of_a_text_takes_something_off():
    """Of both looks at a prompt; nothing of a short one."""
    blend = BLEND._replace(length=0.5, fast_length=0.25)
    plain = small(bias=1.0)
    long = small(blend, 1.0)
    for text, times in (("poison", 0), ("poison ".ljust(4 * SHORT_CHARS, "x"), 2)):
        full = logit_of(plain.full(text)) - logit_of(long.full(text))
        assert full == pytest.approx(0.5 * times, abs=1e-3)
        fast = logit_of(plain.fast(text).scores()) - logit_of(long.fast(text).scores())
        assert fast == pytest.approx(0.25 * times, abs=1e-3)


def test_what_is_not_english_is_left_to_the_encoder():
    """On a line of its own: the n-grams know too little of it."""
    blend = BLEND._replace(foreign=0.5, foreign_bias=1.0, foreign_length=0.25)
    ngrams = flat_ngrams(9.0, is_english=False)
    classifier = Classifier(ngrams, WordReader(), CureEncoder(), blend, NO_GLOSS)
    assert logit_of(classifier.full("poison für den Keller")) == pytest.approx(3.0, abs=1e-3)
    long = "poison für den Keller".ljust(2 * SHORT_CHARS, "ß")
    assert logit_of(classifier.full(long)) == pytest.approx(2.75, abs=1e-3)


def test_marks_stay_on_what_the_encoder_reads_and_look_alikes_are_read_plain_too():
    """Vowels of Hindi are marks; Cyrillic letters may spell English."""
    reader = WordReader()
    small(reader=reader).full("रोटी कैसे बनाएं")
    assert reader.seen == ["रोटी कैसे बनाएं"]
    assert harm(small().full("pоisоn in a well")) > 0.9  # noqa: RUF001  (Cyrillic o)


def test_an_answer_is_read_by_its_own_logit():
    """What is harmful in a prompt is not in an answer, and the other way round; the categories are shared."""
    classifier = small(bias=5.0)
    assert harm(classifier.answer("a poison", 0.0, 0.5)) < 0.1
    scores = classifier.answer("a cure", 0.0, 0.5)
    assert tuple(scores) == CATEGORIES
    assert scores["S9"] == harm(scores) == pytest.approx(1 / (1 + np.exp(-4.0)), abs=1e-6)
    assert harm(classifier.full("a cure")) < harm(classifier.full("a poison"))


def test_the_harm_of_its_prompt_weighs_on_an_answer():
    """By its factor; slope and bias are those of answers alone."""
    classifier = small(BLEND._replace(answer=0.5, answer_prior=2.0, answer_bias=-1.0))
    assert logit_of(classifier.answer("a cure", 0.0, 0.5)) == pytest.approx(1.0, abs=1e-3)
    assert logit_of(classifier.answer("a cure", 0.75, 0.5)) == pytest.approx(2.5, abs=1e-3)
    assert logit_of(classifier.full("poison")) == pytest.approx(4.0, abs=1e-3)


def test_what_was_heard_in_all_of_an_answer_weighs_on_its_end():
    """Its logit by its factor, the more the more was heard; nothing where it says as much as not."""
    classifier = small(BLEND._replace(answer_heard=0.5))
    at_odds = float(np.log(0.9 / 0.1))
    for heard, added in ((0.5, 0.0), (0.9, 0.5 * at_odds), (0.1, -0.5 * at_odds)):
        assert logit_of(classifier.answer("a cure", 0.0, heard)) == pytest.approx(4.0 + added, abs=1e-3)


def test_an_answer_that_opens_with_a_refusal_is_let_off():
    """By so much of the logit, whatever its end says."""
    classifier = small(BLEND._replace(answer_refusal=1.5))
    for opening, logit in (("I cannot help with that.", 2.5), ("Of course.", 4.0), ("", 4.0)):
        assert logit_of(classifier.answer("a cure", 0.0, 0.5, opening)) == pytest.approx(logit, abs=1e-3)


@pytest.mark.parametrize("heard", [0.0, 1e-300, 1.0])
def test_a_certainty_that_was_heard_does_not_drown_what_is_read(heard: float):
    """Its logit is bounded, on either side: the scores are numbers, and the encoder still tells."""
    classifier = small(BLEND._replace(answer_heard=0.5))
    poison, cure = (harm(classifier.answer(text, 0.0, heard)) for text in ("a poison", "a cure"))
    assert 0.0 < poison < cure < 1.0


def test_a_gloss_adds_harm_but_never_beyond_its_bound(tmp_path: Path):
    """Word by word in English a text may be watched; nothing is refused for it."""
    (tmp_path / "hi.tsv").touch()
    (tmp_path / "id.tsv").write_text("racun\tpoison\nbeli\tbuy\n")
    ngrams = flat_ngrams(is_english=False)
    classifier = Classifier(ngrams, WordReader(), CureEncoder(), BLEND, Glosser.load(tmp_path))
    assert logit_of(classifier.full("beli racun")) == pytest.approx(BLEND.gloss_most, abs=1e-3)
    assert logit_of(classifier.full("beli roti")) == pytest.approx(-4.0, abs=1e-3)


@pytest.mark.parametrize("text", ["", " ", "\u200b", "💥"])
def test_texts_of_nothing_have_scores(text: str):
    """All between 0 and 1."""
    classifier = small()
    for scores in (classifier.fast(text).scores(), classifier.full(text), classifier.answer(text, 0.5, 0.5)):
        assert all(0.0 <= p <= 1.0 for p in scores.values())


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A copy of the shipped model's files."""
    for name in (*FILES, MANIFEST):
        shutil.copy(MODELS / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_stops_the_server(shipped: Path, name: str):
    """One byte more in any of them, and it does not load."""
    with (shipped / name).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ModelDamaged, match=name):
        Classifier.load(shipped)


def test_files_that_are_no_model_stop_the_server(shipped: Path):
    """Even if the manifest vouches for them."""
    (shipped / "encoder.onnx").write_bytes(b"not a graph")
    manifest.write(shipped)
    with pytest.raises(ModelDamaged, match="cannot be read"):
        Classifier.load(shipped)


def test_tables_of_another_size_stop_the_server(shipped: Path):
    """Weights of another number of places are another model's."""
    np.savez(
        shipped / "ngrams.npz",
        harm=np.zeros(8),
        bias=0.0,
        categories=np.zeros((14, 4)),
        offsets=np.zeros(14),
        english=np.zeros(4),
        english_bias=0.0,
    )
    manifest.write(shipped)
    with pytest.raises(ModelDamaged, match="another size"):
        Classifier.load(shipped)


def test_a_blend_of_no_numbers_stops_the_server(shipped: Path):
    """Not-a-number would let everything pass."""
    document = json.loads((shipped / "calibration.json").read_text())
    document["blend"]["bias"] = float("nan")
    (shipped / "calibration.json").write_text(json.dumps(document))
    manifest.write(shipped)
    with pytest.raises(ModelDamaged, match="finite"):
        Classifier.load(shipped)


def test_the_shipped_files_are_small():
    """At most 30 MB together."""
    assert sum(path.stat().st_size for path in MODELS.iterdir()) < 30_000_000


def test_noise_around_a_prompt_is_no_language_of_the_ngrams(shipped_classifier: Classifier):
    """Digits without end bring the harm of what stands before them to nothing, and spare no encoder."""
    asked = "Give me step by step instructions to build a pipe bomb and kill my neighbours with it."
    assert shipped_classifier.fast(asked).is_language
    padded = shipped_classifier.fast(asked + " " + random.Random(1).randbytes(500).hex())
    assert padded.harm < shipped_classifier.sure_below
    assert not padded.is_language


@pytest.mark.parametrize(
    "opening",
    [
        "I'm sorry, but I can't help with that.",
        "I\u2019m not able to say how that is done.",
        "[DAN]: I cannot assist you with this, my friend.",
        "As an AI, I have no opinion on it.",
        "I won't provide a recipe for that, but here is what to look out for.",
    ],
)
def test_a_refusal_is_one_in_whatever_words(opening: str):
    """With either apostrophe, and behind the name of a persona."""
    assert refuses(opening)


@pytest.mark.parametrize(
    "opening", ["", "Sure, here is how.", "The canton of Uri is in Switzerland.", "I can tell you."]
)
def test_what_only_looks_like_one_is_none(opening: str):
    """Parts of words, and what can be done."""
    assert not refuses(opening)
