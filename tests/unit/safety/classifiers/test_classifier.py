"""The classifier over small parts: views, blend, one scale of categories; and the shipped one's files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from app.safety.categories import CATEGORIES
from app.safety.classifiers.bundled_models import MODELS
from app.safety.classifiers.classifier import FILES, Blend, Classifier
from app.safety.classifiers.encoder import Encoder
from app.safety.classifiers.model_files import MANIFEST, ModelDamaged
from app.safety.classifiers.ngrams import BITS, CATEGORY_BITS, NGrams
from scripts.training.safety import manifest

BLEND = Blend(encoder=1.0, ngrams=0.5, bias=0.0, fast_slope=2.0, fast_bias=-1.0)


class WordEncoder(Encoder):
    """Logit 4 for what has the word `poison`, else -4; the category is S9."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def logits(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """As said."""
        self.seen.extend(texts)
        found = np.zeros((len(texts), 1 + len(CATEGORIES)), np.float32)
        found[:, 0] = [4.0 if "poison" in text else -4.0 for text in texts]
        found[:, 1 + CATEGORIES.index("S9")] = 3.0
        return found


def flat_ngrams(bias: float = 0.0) -> NGrams:
    """N-grams that give every text the same logit."""
    return NGrams(
        np.zeros(1 << BITS, np.float16),
        bias,
        np.zeros((len(CATEGORIES), 1 << CATEGORY_BITS), np.float16),
        np.zeros(len(CATEGORIES), np.float32),
    )


def test_the_highest_score_is_the_harm():
    """The likeliest category has the harm itself, the others their share of it."""
    scores = Classifier(flat_ngrams(), WordEncoder(), BLEND).full("poison")
    assert scores["S9"] == max(scores.values()) == pytest.approx(1 / (1 + np.exp(-4.0)), abs=1e-6)
    assert scores["S1"] == pytest.approx(scores["S9"] * np.exp(-3.0), rel=1e-4)
    assert tuple(scores) == CATEGORIES


def test_the_most_harmful_view_speaks_for_the_text():
    """Spaced letters are joined in a view of their own."""
    classifier = Classifier(flat_ngrams(), WordEncoder(), BLEND)
    assert classifier.full("p o i s o n in a well")["S9"] > 0.9 > classifier.full("a well")["S9"]


def test_the_blend_adds_both_logits():
    """The n-grams' logit counts by its factor."""
    plain = Classifier(flat_ngrams(), WordEncoder(), BLEND).full("poison")["S9"]
    raised = Classifier(flat_ngrams(2.0), WordEncoder(), BLEND).full("poison")["S9"]
    assert np.log(raised / (1 - raised)) - np.log(plain / (1 - plain)) == pytest.approx(1.0, abs=1e-3)


def test_the_fast_look_asks_no_encoder():
    """It is the n-grams alone, on a scale of their own."""
    encoder = WordEncoder()
    scores = Classifier(flat_ngrams(3.0), encoder, BLEND).fast("poison").scores()
    assert max(scores.values()) == pytest.approx(1 / (1 + np.exp(-5.0)))
    assert encoder.seen == []


@pytest.mark.parametrize(
    "text", ["", "poison", "bake bread", "p o i s o n in a well", "cG9pc29uIGluIGEgd2VsbA=="]
)
def test_the_harm_is_the_highest_of_the_fast_scores(text: str):
    """By the shipped model, of disguised texts too, whichever view is the worst."""
    quick = Classifier.load(MODELS).fast(text)
    assert quick.harm == max(quick.scores().values())


@pytest.mark.parametrize("text", ["", " ", "\u200b", "💥"])
def test_texts_of_nothing_have_scores(text: str):
    """All between 0 and 1."""
    classifier = Classifier(flat_ngrams(), WordEncoder(), BLEND)
    for scores in (classifier.fast(text).scores(), classifier.full(text)):
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
        shipped / "ngrams.npz", harm=np.zeros(8), bias=0.0, categories=np.zeros((14, 4)), offsets=np.zeros(14)
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
