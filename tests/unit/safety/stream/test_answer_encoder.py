"""The second reader of answers: what it says, that it fails closed, and that it holds up nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.metering.traffic import Histogram
from app.safety.counters import HOLD_BACK_S, SafetyCounters
from app.safety.stream.answer_encoder import AnswerEncoder
from app.safety.stream.answer_review import ReviewRequest
from app.safety.verdict import Scores, ScreenBusy, ScreenFailed
from tests.support.sse_client import until

REQUEST = ReviewRequest("the end of an answer", 0.3, 0.8, "its beginning")

STUCK_S = 10.0
"""Seconds after which what a test holds up goes on: a test that fails is not to hang."""


class Answering:
    """A classifier that says of every answer what it was given, and keeps what it was asked."""

    def __init__(self, scores: Any, before: Callable[[], object] = lambda: None) -> None:
        self._scores = scores
        self._before = before
        self.asked: list[ReviewRequest] = []
        self.threads: set[str] = set()

    def answer(self, text: str, prompt_harm: float, running_score: float, opening: str) -> Scores:
        """See ReviewClassifier."""
        self.asked.append(ReviewRequest(text, prompt_harm, running_score, opening))
        self.threads.add(threading.current_thread().name)
        self._before()
        if isinstance(self._scores, Exception):
            raise self._scores
        scores: Scores = self._scores
        return scores


@pytest.fixture
def counters() -> SafetyCounters:
    """Counters at zero."""
    return SafetyCounters(Histogram(HOLD_BACK_S))


@pytest.fixture
def answer_encoder(counters: SafetyCounters) -> Iterator[Callable[..., AnswerEncoder]]:
    """Makes examiners over a classifier; their threads end with the test."""
    made: list[AnswerEncoder] = []

    def make(classifier: Answering, **options: Any) -> AnswerEncoder:
        made.append(AnswerEncoder(classifier, counters, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def test_it_says_what_the_classifier_does_of_a_suspicion(answer_encoder, counters):
    """Of its text, prompt and what was heard; in a thread of its own, always the same; each is counted."""
    classifier = Answering({"S1": 0.0, "S2": 1.0})
    review = answer_encoder(classifier).review
    for _ in range(3):
        assert await review(REQUEST) == {"S1": 0.0, "S2": 1.0}
    assert classifier.asked == [REQUEST] * 3
    assert len(classifier.threads) == 1
    assert threading.current_thread().name not in classifier.threads
    assert counters.examined_answers == 3


@pytest.mark.parametrize(
    "scores",
    [
        RuntimeError("out of memory"),
        {},
        None,
        {"S1": float("nan")},
        {"S1": 1.5},
        {"S1": -0.1, "S2": 0.9},
        {"S1": "0.1"},
    ],
    ids=repr,
)
async def test_whatever_goes_wrong_raises(answer_encoder, counters, scores):
    """A throw, or scores that are none; it counts as an examination all the same."""
    review = answer_encoder(Answering(scores)).review
    with pytest.raises(ScreenFailed) as caught:
        await review(REQUEST)
    assert (caught.value.code, caught.value.status) == ("safety_unavailable", 503)
    assert counters.examined_answers == 1


async def test_an_examination_that_takes_too_long_raises(answer_encoder, counters):
    """So does one that waits behind it, which is not begun any more."""
    release = threading.Event()
    classifier = Answering({"S1": 0.1}, before=lambda: release.wait(STUCK_S))
    review = answer_encoder(classifier, timeout_s=0.05).review
    ended = await asyncio.gather(review(REQUEST), review(REQUEST), return_exceptions=True)
    assert [type(outcome) for outcome in ended] == [ScreenFailed, ScreenFailed]
    release.set()
    assert counters.examined_answers == 2
    await until(lambda: classifier.asked)  # its time may be over before the thread begins
    assert len(classifier.asked) == 1


async def test_who_would_wait_too_long_is_to_come_later(answer_encoder):
    """Too many suspect answers are no failure of the examiner."""
    release = threading.Event()
    classifier = Answering({"S1": 0.1}, before=lambda: release.wait(STUCK_S))
    review = answer_encoder(classifier, wait_s=0.05).review
    first = asyncio.create_task(review(REQUEST, "ada"))
    await asyncio.sleep(0)
    with pytest.raises(ScreenBusy) as caught:
        await review(REQUEST, "bob")
    release.set()
    assert caught.value.retry_after_s == 30
    assert await first == {"S1": 0.1}


async def test_who_stops_waits_no_longer(answer_encoder):
    """A cancelled request is not taken for one whose screen failed, and the next one is examined."""
    release, entered = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(entered.set)
        release.wait(STUCK_S)

    review = answer_encoder(Answering({"S1": 0.1}, before=hold)).review
    task = asyncio.create_task(review(REQUEST))
    async with asyncio.timeout(STUCK_S):
        await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert await review(REQUEST) == {"S1": 0.1}


async def test_after_it_was_closed_nothing_passes(answer_encoder):
    """A second call to close it does nothing."""
    closed = answer_encoder(Answering({"S1": 0.1}))
    closed.close()
    closed.close()
    with pytest.raises(ScreenFailed):
        await closed.review(REQUEST)


async def test_many_flagged_answers_of_one_owner_delay_no_other(answer_encoder):
    """Owners take turns; each owner's own are examined in order."""
    release, entered = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(entered.set)
        release.wait(STUCK_S)

    classifier = Answering({"S1": 0.1}, before=hold)
    review = answer_encoder(classifier).review
    asked = [asyncio.create_task(review(ReviewRequest("ada", 0.0, i / 10), "ada")) for i in range(9)]
    async with asyncio.timeout(STUCK_S):
        await entered.wait()
    asked.append(asyncio.create_task(review(ReviewRequest("bob", 0.0), "bob")))
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*asked)
    assert [request.text for request in classifier.asked] == ["ada", "bob", *["ada"] * 8]
    scores = [request.running_score for request in classifier.asked if request.text == "ada"]
    assert scores == sorted(scores)


async def test_waiting_is_no_part_of_what_an_examination_may_take(answer_encoder):
    """Sixty in a row are examined, though all together take longer than one may."""
    classifier = Answering({"S1": 0.1}, before=lambda: threading.Event().wait(0.02))
    review = answer_encoder(classifier, timeout_s=1.0).review
    assert await asyncio.gather(*(review(REQUEST, "ada") for _ in range(60))) == [{"S1": 0.1}] * 60
