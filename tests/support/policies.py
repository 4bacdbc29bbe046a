"""Calibration tables, policies and a classifier for tests: every threshold can be told from its target."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.safety.categories import CATEGORIES
from app.safety.policies.calibration import FILE_NAME, Calibration
from app.safety.policies.policy import Policy
from app.safety.policies.policy_file import parse
from app.safety.verdict import NgramResult, Scores

PROMPTS = {0.001: 0.9, 0.002: 0.6, 0.05: 0.39, 0.1: 0.3}
NGRAMS = {0.001: 0.99, 0.01: 0.8, 0.1: 0.5}
ANSWERS = {0.001: 0.95, 0.002: 0.61, 0.02: 0.49, 0.1: 0.4}
"""Thresholds by target, of every category; there is a row for each target that a rule has by default."""


def calibration() -> dict[str, Any]:
    """A calibration.json in which every category is alike."""

    def table(thresholds: Mapping[float, float]) -> dict[str, Any]:
        return {c: {"fpr": list(thresholds), "threshold": list(thresholds.values())} for c in CATEGORIES}

    return {
        "version": 1,
        "categories": table(PROMPTS),
        "ngrams": table(NGRAMS),
        "output": table(ANSWERS),
        "temperature": 1.5,
    }


def write_models(directory: Path) -> Path:
    """A directory of models that has the calibration and no model; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE_NAME).write_text(json.dumps(calibration()))
    return directory


def policy(document: Mapping[str, Any] | None = None, country: str = "") -> Policy:
    """The policy of a parsed file."""
    return Policy(parse(document or {}), Calibration.parse(calibration()), country)


class WordClassifier:
    """Scores a text by the words in it, quickly and thoroughly, and keeps what it was asked.

    `fast` and `full` are p by category by word; a text without any of the words scores 0.01.
    """

    def __init__(
        self,
        full: Mapping[str, Scores] | None = None,
        fast: Mapping[str, Scores] | None = None,
        before: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._full = full or {}
        self._fast = fast or {}
        self._before = before
        self.read_fast: list[str] = []
        self.scored: list[str] = []
        """Of them, those whose scores were asked for."""
        self.read_full: list[str] = []
        self.threads: set[str] = set()

    def fast(self, text: str) -> NgramResult:
        """See app.safety.prompt.text_scores.PromptClassifier."""
        self.read_fast.append(text)
        found = self._scores(self._fast, text)

        def scores() -> Scores:
            self.scored.append(text)
            return found

        return NgramResult(max(found.values()), scores)

    def full(self, text: str) -> Scores:
        """See app.safety.prompt.text_scores.PromptClassifier."""
        self._before(text)
        self.read_full.append(text)
        self.threads.add(threading.current_thread().name)
        return self._scores(self._full, text)

    def _scores(self, words: Mapping[str, Scores], text: str) -> Scores:
        found = dict.fromkeys(CATEGORIES, 0.01)
        for word, scores in words.items():
            if word in text:
                found.update({c: max(p, found[c]) for c, p in scores.items()})
        return found
