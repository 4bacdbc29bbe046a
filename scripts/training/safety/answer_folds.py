"""What the stream screen makes of answers of sources that neither of its models has seen."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.training.safety import balance, examinations, train_output
from scripts.training.safety.examinations import Examined, Listener
from scripts.training.safety.minilm import MiniLM
from scripts.training.safety.replies import Reply
from scripts.training.safety.rows import Row
from scripts.training.safety.tokens import Wordpieces
from scripts.training.safety.word_vectors import WordVectors


@dataclass(frozen=True, slots=True)
class AnswerFold:
    """The replies of a fold, examined as answers to prompts that nobody watches, and to watched ones."""

    plain: Sequence[Examined]
    watched: Sequence[Examined]

    def save(self, path: Path) -> None:
        """Write it to a file."""
        path.write_bytes(pickle.dumps(self))

    @classmethod
    def load(cls, path: Path) -> AnswerFold:
        """Read what `save` wrote."""
        fold: AnswerFold = pickle.loads(path.read_bytes())  # noqa: S301  # a file of this training
        return fold


def fold(
    number: int, texts: Sequence[Reply], vectors: WordVectors, model: MiniLM, wordpieces: Wordpieces
) -> AnswerFold:
    """Train the listener without a fold's sources, and screen what it and the encoder have not seen."""
    left_out = {*balance.FOLDS[number]}
    seen = [text for text in texts if not _left_out(text.row, left_out) and not text.row.held_out]
    weights = train_output.fit(seen, vectors)
    suspect_at, line = train_output.suspect_at(weights, seen), train_output.line_of(weights, seen)
    listener = Listener(weights, train_output.DRIFT, suspect_at, line)
    answers = [text for text in texts if not text.row.own and text.row.source in left_out]
    unseen = [reply for harmful in (True, False) for reply in train_output.sample(answers, harmful=harmful)]
    if number == 0:
        unseen += [text for text in texts if text.row.kind == "output" and text.row.own and text.row.held_out]
    plain = examinations.examine(unseen, listener, model, wordpieces, watched=False)
    watched = examinations.examine(unseen, listener, model, wordpieces, watched=True)
    return AnswerFold(plain, watched)


def _left_out(row: Row, sources: set[str]) -> bool:
    return row.source in sources or row.source.removesuffix(" as answers") in sources
