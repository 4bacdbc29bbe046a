"""Screens for tests: models that know words, a policy to every taste, an engine that says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from app.core import ChatRequest, Counts, Delta, ToolCall
from app.engine.scripted.engine import Script, ScriptedEngine
from app.safety.classifiers.bundled_models import Models
from app.safety.verdict import Scores
from tests.support.policies import WordClassifier, write_models

HARM = "harmful"
"""The word that the model of answers hears, from the first time on."""
BLOCKED, WATCHED = "forbidden", "doubtful"
"""Words in prompts, and what becomes of them."""
SEEN_LATE, WATCHED_LATE = "hidden", "vague"
"""The same, as the thorough look alone finds out."""


class WordAnswer:
    """An answer that is certain of harm as long as the word is among its last characters."""

    def __init__(self, prompt_harm: float, word: str = HARM, memory: int = 40) -> None:
        self.prompt_harm = prompt_harm
        self._word = word
        self._memory = memory
        self._text = ""

    def feed(self, text: str) -> float:
        """See app.safety.stream.answer_review.ScoredAnswer."""
        self._text = (self._text + text)[-self._memory - len(text) :]
        return 0.99 if self._word in self._text else 0.01


class WordModel:
    """A first stage that wants a review of answers with a word."""

    review_at = 0.5

    def __init__(self, word: str = HARM) -> None:
        self._word = word
        self.prompt_harms: list[float] = []

    def start(self, prompt_harm: float) -> WordAnswer:
        """See app.safety.stream.answer_review.AnswerClassifier."""
        self.prompt_harms.append(prompt_harm)
        return WordAnswer(prompt_harm, self._word)


class WordReviewer:
    """A second stage: harmful are answers with the word, the others are not; keeps what it was asked."""

    def __init__(self, word: str = HARM, before: Callable[[str], None] = lambda _text: None) -> None:
        self._word = word
        self._before = before
        self.asked: list[str] = []
        self.prompt_harms: list[float] = []
        self.running_scores: list[float] = []

    def answer(self, text: str, prompt_harm: float, running_score: float, _opening: str) -> Scores:
        """See app.safety.stream.answer_encoder.ReviewClassifier."""
        self.asked.append(text)
        self.prompt_harms.append(prompt_harm)
        self.running_scores.append(running_score)
        self._before(text)
        return {"S2": 0.97 if self._word in text else 0.02, "S3": 0.01}


def word_models(directory: Path, before: Callable[[str], None] = lambda _text: None) -> Models:
    """Models of words: in prompts BLOCKED and the like, in answers HARM."""
    certain, doubtful, likely = {"S2": 0.999}, {"S2": 0.5}, {"S2": 0.7}
    classifier = WordClassifier(
        fast={BLOCKED: certain, WATCHED: likely},
        full={BLOCKED: certain, WATCHED: doubtful, SEEN_LATE: certain, WATCHED_LATE: doubtful},
        before=before,
    )
    return Models(classifier, WordModel(), WordReviewer(), write_models(directory))


def policy_file(directory: Path, **tables: Any) -> str:
    """A policy file in that directory; a table is a mapping of names to plain values."""
    lines = []
    for name, value in tables.items():
        if isinstance(value, Mapping):
            lines += [f"[{name}]", *(f"{key} = {orjson.dumps(v).decode()}" for key, v in value.items())]
        else:
            lines.insert(0, f"{name} = {orjson.dumps(value).decode()}")
    path = directory / "policy.toml"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


class Piece(NamedTuple):
    """One token of an answer, and where it belongs."""

    text: str
    channel: str = "text"
    tool: ToolCall | None = None
    logprobs: Sequence[Mapping[str, Any]] | None = None


Speech = Callable[[ChatRequest, int], Sequence[Piece]]
"""What a choice says to a request."""


class SpeakingEngine(ScriptedEngine):
    """Says what it is told, a token a piece, and notes when it was stopped."""

    def __init__(self, script: Any, speech: Speech, on_death: Callable[[str], None]) -> None:
        super().__init__(script, on_death=on_death)
        self.aborts: list[str] = []
        self.prompts: list[list[dict[str, Any]]] = []
        self.generated: dict[int, int] = {}
        self._speech = speech

    async def render(self, request: ChatRequest) -> Any:
        """See Engine.render."""
        self.prompts.append(list(request.body["messages"]))
        return await super().render(request)

    def abort(self, rid: str) -> None:
        """See Engine.abort."""
        self.aborts.append(rid)
        super().abort(rid)

    def _deltas(self, answer: Any, choice: int) -> Iterator[Delta]:
        speech = self._speech(answer.request, choice)
        pieces = speech[: answer.max_tokens]
        reasoning = 0
        counts = Counts(answer.prompt_tokens, 0, answer.cached_tokens, 0)
        for index, piece in enumerate(pieces, start=1):
            reasoning += piece.channel == "reasoning"
            counts = Counts(answer.prompt_tokens, index, answer.cached_tokens, reasoning)
            channel: Any = piece.channel
            yield Delta(
                choice, channel, piece.text, (index,), counts, logprobs=piece.logprobs, tool=piece.tool
            )
        yield Delta(choice, "text", "", (), counts, "length" if len(pieces) < len(speech) else "stop")


def speaking(speech: Speech | str) -> Callable[..., SpeakingEngine]:
    """An engine type, as the `serve` fixture takes one; a text is said word by word by every choice."""
    said: Speech = speech if callable(speech) else lambda _request, _choice: words(speech)

    def engine(script: Script, *, on_death: Callable[[str], None]) -> SpeakingEngine:
        return SpeakingEngine(script, said, on_death)

    return engine


def words(text: str, channel: str = "text") -> list[Piece]:
    """A text in pieces, each a word and the space after it."""
    return [Piece(part, channel) for part in text.replace(" ", " \0").split("\0") if part]
