"""The second reader of answers: the encoder, in a thread of its own, asked only about what is suspect.

The model that hears every token is cheap and often wrong. It stops nothing by itself: what it suspects is
held, and read here. So few answers are examined that a thread is enough. Owners take turns at it.

Fails closed: whatever goes wrong raises ScreenFailed, unless the server is set to fail open. An answer that
waited too long for its turn raises ScreenBusy in any case.
"""

from __future__ import annotations

from typing import Protocol

from app.concurrency.owner_threads import OwnerThreads, WaitedTooLong, Work
from app.safety.counters import SafetyCounters
from app.safety.screens.stream_terms import Suspicion
from app.safety.verdict import Scores, ScreenBusy, ScreenFailed

TIMEOUT_S = 10.0
"""Seconds that an examination may take."""
WAIT_S = 40.0
"""Seconds that it may wait for its turn: a reader sees no token meanwhile."""


class ExaminesAnswers(Protocol):
    """The classifier (app.safety.classifiers.classifier), called in a thread."""

    def answer(self, text: str, prior: float, heard: float, opening: str) -> Scores:
        """The scores of the end of an answer, to a prompt of the harm `prior`.

        `heard` is the harm of all of it, `opening` how it begins.
        """
        ...


class AnswerExaminer:
    """Examines answers. Construct once; `close()` ends its thread."""

    def __init__(
        self,
        classifier: ExaminesAnswers,
        counters: SafetyCounters,
        *,
        timeout_s: float = TIMEOUT_S,
        wait_s: float = WAIT_S,
    ) -> None:
        self._classifier = classifier
        self._counters = counters
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._thread = OwnerThreads("answer-examiner", hangs_after_s=timeout_s)

    async def examine(self, suspicion: Suspicion, owner: str = "") -> Scores:
        """The scores of what is suspect in an owner's answer. Raises ScreenFailed, ScreenBusy."""
        self._counters.examined()
        work = Work(owner, work_s=self._timeout_s, wait_s=self._wait_s)
        try:
            return _checked(await self._thread.run(work, self._classifier.answer, *suspicion))
        except Exception as exc:
            raise (ScreenBusy if isinstance(exc, WaitedTooLong) else ScreenFailed) from exc

    def close(self) -> None:
        """End the thread once it is done with what it is at; a second call does nothing."""
        self._thread.close()


def _checked(scores: Scores) -> Scores:
    """The scores, if they are any: NaN would pass under every threshold."""
    if not scores or not all(0.0 <= p <= 1.0 for p in scores.values()):
        raise ValueError("scores out of range")
    return scores
