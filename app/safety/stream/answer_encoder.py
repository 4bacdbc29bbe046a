"""The encoder of answers, the second stage: in a thread of its own, for the answers in review.

It is not the guard, a language model with an engine of its own (app.safety.guard.tier).

One thread is enough, because few answers are reviewed. Owners alternate. Fails closed: any
failure raises ScreenFailed. An answer that waited too long raises ScreenBusy, which refuses it even with
`fail_open` (app.safety.stream.stream_screen). The thresholds are in app.safety.thresholds.
"""

from __future__ import annotations

from typing import Protocol

from app.concurrency.owner_threads import OwnerThreads, WaitedTooLong, Work
from app.safety.counters import SafetyCounters
from app.safety.stream.answer_review import ReviewRequest
from app.safety.thresholds import ENCODER_TIMEOUT_S, ENCODER_WAIT_S
from app.safety.verdict import Scores, ScreenBusy, ScreenFailed, checked


class ReviewClassifier(Protocol):
    """The classifier (app.safety.classifiers.classifier), called in a thread."""

    def answer(self, text: str, prompt_harm: float, running_score: float, opening: str) -> Scores:
        """The scores of the end of an answer; the arguments are those of ReviewRequest."""
        ...


class AnswerEncoder:
    """Reviews answers. Construct once; `close()` ends its thread."""

    def __init__(
        self,
        classifier: ReviewClassifier,
        counters: SafetyCounters,
        *,
        timeout_s: float = ENCODER_TIMEOUT_S,
        wait_s: float = ENCODER_WAIT_S,
    ) -> None:
        self._classifier = classifier
        self._counters = counters
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._thread = OwnerThreads("answer-review", hangs_after_s=timeout_s)

    async def review(self, request: ReviewRequest, owner: str = "") -> Scores:
        """The scores of an owner's answer. Raises ScreenFailed, ScreenBusy."""
        self._counters.examined()
        work = Work(owner, work_s=self._timeout_s, wait_s=self._wait_s)
        try:
            return checked(await self._thread.run(work, self._classifier.answer, *request))
        except Exception as exc:
            raise (ScreenBusy if isinstance(exc, WaitedTooLong) else ScreenFailed) from exc

    def close(self) -> None:
        """End the thread once it is done with what it is at; a second call does nothing."""
        self._thread.close()
