"""Scores of single texts, remembered, so that the past of a conversation is scored once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from app.concurrency.owner_threads import OwnerThreads, Work
from app.safety.prompt.remembered import Remembered
from app.safety.thresholds import DOUBTED_SENTENCE
from app.safety.verdict import NgramResult, Scores, checked

NGRAM_BATCH = 16
"""Slices that the n-grams read in one turn: about 6 ms, less than what the encoder takes for one."""
MERGED = 512
"""Texts or slices whose scores are combined in one tick of the loop: 2 ms."""
REMEMBERED = 8_192
"""Texts whose scores are kept."""


class PromptClassifier(Protocol):
    """The classifier (app.safety.classifiers.classifier). Both may be called at once, in two threads.

    A text has at most FAST_CHARS characters, and all of it is read.
    """

    def fast(self, text: str) -> NgramResult:
        """The result of the n-grams, in less than a millisecond; the scores take half as long again."""
        ...

    def full(self, text: str) -> Scores:
        """The scores of n-grams and encoder together; takes its time."""
        ...


class RememberedScores(NamedTuple):
    """The part of an `NgramResult` that is remembered."""

    harm: float
    is_language: bool


class TextScores:
    """The scores of texts; each is scored once as long as it is remembered."""

    def __init__(self, classifier: PromptClassifier, thread: OwnerThreads) -> None:
        self._classifier = classifier
        self._thread = thread
        self._glances = Remembered[RememberedScores](REMEMBERED)
        self._ngrams = Remembered[Scores](REMEMBERED)
        self._encoder = Remembered[Scores](REMEMBERED)

    def glance(self, text: str, looked: dict[str, NgramResult]) -> RememberedScores:
        """The n-grams' harm of a text; a new result is left in `looked`, for its scores."""
        key = self._glances.key(text)
        remembered = self._glances.get(key)
        if remembered is not None:
            return remembered
        result = looked[text] = self._classifier.fast(text)
        if not 0.0 <= result.harm <= 1.0:
            raise ValueError("harm out of range")
        return self._glances.put(key, RememberedScores(result.harm, result.is_language))

    def remembered(self, text: str) -> Scores | None:
        """The n-grams' scores of a text, where they are remembered."""
        return self._ngrams.get(self._ngrams.key(text))

    def by_ngrams(self, text: str, looked: Mapping[str, NgramResult]) -> Scores:
        """The n-grams' scores of a text."""
        key = self._ngrams.key(text)
        remembered = self._ngrams.get(key)
        if remembered is not None:
            return remembered
        result = looked.get(text) or self._classifier.fast(text)
        return self._ngrams.put(key, checked(result.scores()))

    async def all_by_ngrams(self, work: Work, texts: Sequence[str]) -> list[Scores]:
        """The n-grams' scores of each text, in the thread: NGRAM_BATCH at a time."""
        scores: list[Scores] = []
        for start in range(0, len(texts), NGRAM_BATCH):
            batch = texts[start : start + NGRAM_BATCH]
            keys = [self._ngrams.key(text) for text in batch]
            by_key = {key: kept for key in keys if (kept := self._ngrams.get(key)) is not None}
            unread = {key: text for key, text in zip(keys, batch, strict=True) if key not in by_key}
            if start % MERGED == 0:  # all of a text may be remembered
                await asyncio.sleep(0)
            if unread:
                read = await self._thread.run(work, self._score_all, list(unread.values()))
                for key, of_text in zip(unread, read, strict=True):
                    by_key[key] = self._ngrams.put(key, checked(of_text))
            scores += [by_key[key] for key in keys]
        return scores

    async def by_encoder(self, work: Work, text: str) -> Scores:
        """The encoder's scores, in the thread: a slice at a time, so that owners alternate."""
        key = self._encoder.key(text)
        remembered = self._encoder.get(key)
        if remembered is not None:
            return remembered
        return self._encoder.put(key, checked(await self._thread.run(work, self._classifier.full, text)))

    async def passes(self, work: Work, texts: Sequence[str], sentences: Sequence[str]) -> bool:
        """True if the n-grams know the language of all texts and doubt no sentence; in the thread."""
        return await self._thread.run(work, self._all_pass, texts, sentences)

    def _score_all(self, texts: Sequence[str]) -> list[Scores]:
        return [self._classifier.fast(text).scores() for text in texts]

    def _all_pass(self, texts: Sequence[str], sentences: Sequence[str]) -> bool:
        return all(self.glance(text, {}).is_language for text in texts) and all(
            self.glance(sentence, {}).harm < DOUBTED_SENTENCE for sentence in sentences
        )
