"""The classifiers shipped with the server: if a file was changed, it does not start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from app.safety.classifiers.model_files import ModelDamaged, verify
from app.safety.classifiers.ngrams import Evidence
from app.safety.classifiers.output_model import OutputModel
from app.safety.prompt.text_scores import PromptClassifier
from app.safety.stream.answer_encoder import ReviewClassifier
from app.safety.stream.answer_review import AnswerClassifier

MODELS = Path(__file__).parents[1] / "models"
OUTPUT = "output.npz"


class Models(NamedTuple):
    """The classifiers of prompts and of answers, and the directory that has their calibration."""

    prompts: PromptClassifier
    answers: AnswerClassifier
    reviewer: ReviewClassifier
    """The second stage, which reviews flagged answers (app.safety.stream.answer_encoder)."""
    directory: Path
    sure_below: float = 0.0
    """Below this harm the n-grams alone let a prompt pass; see PromptScreen."""
    evidence: Callable[[str], Sequence[Evidence]] = lambda _text: ()
    """Gives the words of a text, and the part of each in the n-grams' logit of harm."""
    parts: Callable[[str], Mapping[str, float]] = lambda _text: {}
    """Gives the logit of harm of a text by each model of `prompts` alone, by the model's name."""


def load(directory: Path = MODELS) -> Models:
    """The classifiers of a directory; takes about half a second. Raises ModelDamaged."""
    # Imported here: a server with safety off needs no ONNX Runtime.
    from app.safety.classifiers.classifier import Classifier

    verify(directory, [OUTPUT])
    try:
        answers = OutputModel.load(directory / OUTPUT)
    except Exception as exc:  # NumPy has errors of its own
        raise ModelDamaged(f"{directory / OUTPUT}: cannot be read: {exc!r}") from exc
    prompts = Classifier.load(directory)
    return Models(prompts, answers, prompts, directory, prompts.sure_below, prompts.evidence, prompts.parts)
