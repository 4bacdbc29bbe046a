"""The classifier: n-grams for a first look, n-grams and encoder together for the verdict.

Every view of a text is scored, and the view with the highest score counts. In English the n-grams and the
multilingual encoder decide together, in other languages the encoder alone. The score of a category is the
harm of the text, times the category's probability relative to the likeliest category. So the highest score of
a text is its harm. `full` and `fast` have a scale of their own each. Answers have an encoder of their own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.safety.categories import CATEGORIES
from app.safety.classifiers.encoder import ANSWER, Encoder
from app.safety.classifiers.model_files import ModelDamaged, verify
from app.safety.classifiers.multilingual import HARM, TOPICS, load_reader
from app.safety.classifiers.ngrams import Evidence, NGrams
from app.safety.policies.calibration import FILE_NAME as CALIBRATION
from app.safety.text.gloss import Glosser
from app.safety.text.normalize import normalize, views
from app.safety.verdict import NgramResult, Scores

SHORT_CHARS = 100
"""Characters of a short text."""
LEAST_CHARS, NOTHING_SAID = 3, -3.0
"""For ASCII texts of so few characters the logit of harm is capped: they are no evidence."""
_INNER_CAPITALS = re.compile(r"[^\W\d_A-Z][A-Z]")
MAX_INNER_CAPITALS = 2
"""Capitals within words that an ordinary text may have."""
_REFUSES = re.compile(
    r"\b(sorry|apolog|i can(no|['\u2019])?t|i (am|['\u2019]m) (not able|unable)"
    r"|cannot (help|assist|provide|fulfil)|as an ai|not (appropriate|able to)|against my"
    r"|won['\u2019]t (help|provide))",
    re.IGNORECASE,
)
FILES = ("ngrams.npz", "multilingual.onnx", "multilingual.npz", "encoder.onnx", "tokenizer.json", CALIBRATION)


class Blend(NamedTuple):
    """From logits to the harm of a prompt, and of the end of an answer.

        English  sigmoid(multilingual * m + ngrams * n + bias - length * doublings)
        foreign  sigmoid(foreign * m + foreign_bias - foreign_length * doublings)
        gloss    sigmoid(min(multilingual * m + gloss_bias - length * doublings, gloss_most))
        n-grams  sigmoid(fast_slope * n + fast_bias - fast_length * doublings)
        answer   sigmoid(answer * a + answer_heard * h + answer_prior * harm of its prompt + answer_bias
                         [- answer_refusal])

    The most harmful of many windows is harmful by chance: `doublings` is how often a text is twice as long as
    SHORT_CHARS, and each takes something off. A gloss by itself reaches `gloss_most` and no more, so that
    nothing is refused for it. `answer_refusal` is taken off where the answer opens with a
    refusal.
    """

    multilingual: float
    ngrams: float
    bias: float
    length: float
    foreign: float
    foreign_bias: float
    foreign_length: float
    gloss_bias: float
    gloss_most: float
    fast_slope: float
    fast_bias: float
    fast_length: float
    answer: float
    answer_heard: float
    answer_prior: float
    answer_bias: float
    answer_refusal: float

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Blend:
        """The numbers of calibration.json's `blend`. Raises KeyError, TypeError or ValueError."""
        blend = cls(**{name: float(document[name]) for name in cls._fields})
        if not all(math.isfinite(number) for number in blend):
            raise ValueError("the blend is not of finite numbers")
        return blend


class Classifier:
    """Scores single texts by category. Keeps no text; may be called from any thread."""

    def __init__(
        self,
        ngrams: NGrams,
        multilingual: Callable[[str], NDArray[np.float32]],
        encoder: Encoder,
        blend: Blend,
        glosser: Glosser,
        *,
        sure_below: float = 0.0,
    ) -> None:
        """`multilingual` gives a text's logits, HARM and from TOPICS on those of the categories.

        `sure_below` is a harm by `fast` below which `full` finds next to nothing more in ASCII.
        """
        self.sure_below = sure_below
        self._ngrams = ngrams
        self._multilingual = multilingual
        self._encoder = encoder
        self._blend = blend
        self._glosser = glosser

    @classmethod
    def load(cls, folder: Path) -> Classifier:
        """The classifier of a folder of model files. Raises ModelDamaged."""
        verify(folder, FILES)
        try:
            calibration = json.loads((folder / CALIBRATION).read_bytes())
            blend = Blend.parse(calibration["blend"])
            ngrams = NGrams.load(folder / "ngrams.npz")
            encoder = Encoder.load(folder / "encoder.onnx", folder / "tokenizer.json")
            reader = load_reader(folder / "multilingual.onnx", folder / "multilingual.npz")
            glosser = Glosser.load()
        except ModelDamaged:
            raise
        except Exception as exc:  # each library has errors of its own
            raise ModelDamaged(f"{folder}: the safety classifier cannot be read: {exc!r}") from exc
        sure_below = float(calibration.get("sure_below", 0.0))
        return cls(ngrams, reader, encoder, blend, glosser, sure_below=sure_below)

    def fast(self, text: str) -> NgramResult:
        """The n-grams' scores of a text, in less than 1 ms for 2,000 characters."""
        ngrams, blend = self._ngrams, self._blend
        logit, places = max(map(ngrams.look, views(text)), key=itemgetter(0))
        logit = logit * blend.fast_slope + blend.fast_bias - blend.fast_length * doublings(len(text))
        return NgramResult(
            _harm(logit), lambda: _scores(logit, ngrams.topics(places)), ngrams.is_english(places)
        )

    def evidence(self, text: str) -> list[Evidence]:
        """The words of a text's worst view by their part in the n-grams' logit of harm, the highest first."""
        worst = max(views(text), key=lambda view: self._ngrams.look(view)[0])
        slope = self._blend.fast_slope
        return [Evidence(words, logit * slope) for words, logit in self._ngrams.evidence(worst)]

    def parts(self, text: str) -> dict[str, float]:
        """The logit of harm of a text as it stands by each model alone, by the model's name."""
        counted, blend = self._ngrams.look(normalize(text))[0], self._blend
        parts = {
            "n-grams": counted * blend.fast_slope + blend.fast_bias,
            "multilingual encoder": float(self._multilingual(text)[HARM]),
        }
        gloss = self._glosser.gloss(text)
        if gloss is not None:
            parts["multilingual encoder, word by word in English"] = float(self._multilingual(gloss)[HARM])
        return parts

    def full(self, text: str) -> Scores:
        """The scores of n-grams and encoder together, in 2 to 20 ms for each 500 characters: for a thread."""
        logit, topics = self._worst(text)
        if len(text) <= LEAST_CHARS and text.isascii():
            logit = min(logit, NOTHING_SAID)
        return _scores(logit, topics)

    def answer(self, text: str, prompt_harm: float, running_score: float, opening: str = "") -> Scores:
        """The scores of the end of an answer, in 2 to 20 ms: for a thread.

        `prompt_harm` is that of its prompt, `running_score` the harm of the whole answer by the first stage,
        `opening` how the answer begins.
        """
        encoded, blend = self._encoder.end(normalize(text)), self._blend
        logit = float(encoded[ANSWER]) * blend.answer + _logit(running_score) * blend.answer_heard
        logit += (
            prompt_harm * blend.answer_prior + blend.answer_bias - refuses(opening) * blend.answer_refusal
        )
        return _scores(logit, encoded[1:ANSWER])

    def _worst(self, text: str) -> tuple[float, NDArray[np.float32]]:
        """The highest logit of harm of the text's views, and its topics.

        The encoder reads the text itself, whose marks make words of other languages what they are. It reads
        the plain form too where letters may be look-alikes, or capitals in unusual places.
        """
        blend, length = self._blend, doublings(len(text))
        plain, *others = views(text)
        read = [(text, plain), *((other, other) for other in others)]
        is_odd = text.isupper() or len(_INNER_CAPITALS.findall(text)) > MAX_INNER_CAPITALS
        if is_odd or (plain.isascii() and not text.isascii()):
            read.append((plain, plain))
        readings = [self._reading(shown, counted, length) for shown, counted in read]
        gloss = self._glosser.gloss(text)
        if gloss is not None:
            logits = self._multilingual(gloss)
            logit = float(logits[HARM]) * blend.multilingual + blend.gloss_bias - blend.length * length
            readings.append((min(logit, blend.gloss_most), logits[TOPICS:]))
        return max(readings, key=itemgetter(0))

    def _reading(self, shown: str, counted: str, length: float) -> tuple[float, NDArray[np.float32]]:
        """The logit of harm of a text for the encoder, and for the n-grams; and its topics."""
        blend = self._blend
        logits = self._multilingual(shown)
        harm = float(logits[HARM])
        from_ngrams, places = self._ngrams.look(counted)
        if self._ngrams.is_english(places):
            logit = (
                harm * blend.multilingual + from_ngrams * blend.ngrams + blend.bias - blend.length * length
            )
        else:
            logit = harm * blend.foreign + blend.foreign_bias - blend.foreign_length * length
        return logit, logits[TOPICS:]


def refuses(opening: str) -> bool:
    """True if these first words of an answer, in English, refuse or apologize.

    A model can be made to refuse first and comply then. So a refusal proves nothing; it only weighs.
    """
    return _REFUSES.search(opening) is not None


def doublings(num_chars: int) -> float:
    """The number of times that a short text must be doubled to have this length; 0 for a short one."""
    return math.log2(max(num_chars, SHORT_CHARS) / SHORT_CHARS)


def _scores(logit: float, topics: NDArray[np.float32]) -> Scores:
    harm = _harm(logit)
    shares = np.exp(topics - topics.max())
    return {category: harm * float(share) for category, share in zip(CATEGORIES, shares, strict=True)}


def _logit(harm: float) -> float:
    bounded = min(max(harm, 1e-9), 1.0 - 1e-9)
    return math.log(bounded / (1.0 - bounded))


def _harm(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, logit))))
