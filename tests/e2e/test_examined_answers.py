"""Suspected answers over HTTP: examined before more goes out, whole where they are harmless, else stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.engine.scripted.engine import Script
from app.safety.verdict import Scores
from app.store import safety_events
from tests.support.screens import HARM, WATCHED, WordModel, WordReviewer, speaking, word_models
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import until

TRULY = "truly"
"""What the reviewer finds harmful; the model that hears every token knows HARM alone."""
BEFORE = " ".join(f"fine{i}" for i in range(30))
AFTER = " ".join(f"word{i}" for i in range(60))
HARMLESS = f"{BEFORE} {HARM} and {AFTER}"
HARMFUL = f"{BEFORE} {TRULY} {HARM} and {AFTER}"

Start = Callable[..., Any]


@pytest.fixture
def start(serve: Serve, tmp_path: Path) -> Start:
    """A server whose answers are examined, and whose engine says a given text."""

    async def started(said: str, reviewer: Any = None, **options: Any) -> tuple[Served, WordReviewer]:
        reviewer = reviewer or WordReviewer(TRULY)
        models = word_models(tmp_path / "models")._replace(answers=WordModel(), reviewer=reviewer)
        served = await serve(
            Script(), engine_type=speaking(said), load_models=lambda: models, safety="on", **options
        )
        return served, reviewer

    return started


async def test_a_suspected_answer_that_is_harmless_goes_out_whole(start: Start):
    """It was examined once, where the suspicion arose, and nothing is recorded of it."""
    served, reviewer = await start(HARMLESS)
    async with await served.open(chat()) as stream:
        transcript = await stream.to_end()
    stream.transcript.check_ids()
    assert (transcript.content(), list(transcript.finish_reasons.values())) == (HARMLESS, ["stop"])
    assert reviewer.asked == [f"{BEFORE} {HARM} and "]
    assert reviewer.running_scores == [0.99]
    counters = served.runtime.safety_counters
    assert (counters.examined_answers, counters.leaked_tokens, counters.dropped_tokens) == (1, 0, 0)
    page = await served.runtime.database.read(lambda c: safety_events.page(c, 100))
    assert page.events == []


async def test_a_suspected_answer_that_is_harmful_stops(start: Start):
    """Before the suspected word, with `content_filter`, and with the category that the reviewer found."""
    served, reviewer = await start(HARMFUL)
    async with await served.open(chat()) as stream:
        transcript = await stream.to_end()
    assert list(transcript.finish_reasons.values()) == ["content_filter"]
    assert transcript.content() == f"{BEFORE} {TRULY} "
    assert len(reviewer.asked) == 1
    await until(lambda: served.runtime.database.queue_depth == 0)
    page = await served.runtime.database.read(lambda c: safety_events.page(c, 100))
    ((_, event),) = page.events
    assert (event.subject, event.stage, event.action, event.category) == ("answer", "stream", "block", "S2")
    assert served.runtime.safety_counters.leaked_tokens == 0
    assert not served.runtime.balance.differs


async def test_nothing_suspected_goes_out_while_it_is_examined(start: Start):
    """However long that takes; another answer, which is not suspected, does not wait."""
    release, entered = threading.Event(), threading.Event()

    def hold(_text: str) -> None:
        entered.set()
        release.wait(10)

    served, _ = await start(HARMLESS, WordReviewer(TRULY, before=hold))
    async with await served.open(chat()) as stream:
        reading = asyncio.create_task(stream.to_end())
        await until(entered.is_set)
        for _ in range(20):
            await asyncio.sleep(0)
        assert HARM not in stream.transcript.content()
        assert not stream.transcript.finish_reasons
        release.set()
        assert (await reading).content() == HARMLESS


async def test_a_watched_answer_is_examined_before_its_first_token(start: Start):
    """With the harm of its prompt in mind, though nothing in it is suspected."""
    served, reviewer = await start(f"{TRULY} {AFTER}")
    answer = (await served.post(chat(f"a {WATCHED} thing", stream=False))).json()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"] or "") == ("content_filter", "")
    assert len(reviewer.asked) == 1
    assert reviewer.prompt_harms[0] > 0.1
    plain = (await served.post(chat("harmless", stream=False))).json()
    assert plain["choices"][0]["message"]["content"] == f"{TRULY} {AFTER}"
    assert len(reviewer.asked) == 1


async def test_moderation_that_was_asked_for_has_the_scores_of_the_examiner(start: Start):
    """Of an answer that was never suspected."""
    served, reviewer = await start("all is well")
    body = chat(stream=False, moderation={"model": "omni-moderation-latest"})
    answer = (await served.post(body)).json()
    assert answer["choices"][0]["message"]["content"] == "all is well"
    (result,) = answer["moderation"]["output"]["results"]
    assert max(result["category_scores"].values()) == 0.02
    assert reviewer.asked == ["all is well"]


class Throws:
    """An reviewer that throws."""

    def answer(self, _text: str, _prior: float, _heard: float) -> Scores:
        """See ReviewClassifier."""
        raise RuntimeError("a secret")


async def test_an_examiner_that_fails_ends_the_answer(start: Start):
    """In an error event; nothing of what it was to examine goes out. It is counted and logged."""
    served, _ = await start(HARMLESS, Throws())
    async with await served.open(chat()) as stream:
        transcript = await stream.to_end()
    assert [error["code"] for error in transcript.errors] == ["safety_unavailable"]
    assert transcript.content() == f"{BEFORE} "
    assert served.runtime.safety_counters.failures["stream"]["error"]["refused"] == 1
    assert served.logged("screen_broke")
    assert "a secret" not in repr(served.log)
    assert not served.runtime.balance.differs


async def test_an_examiner_that_fails_lets_pass_where_the_server_fails_open(start: Start):
    """The answer is whole; the failure is counted as passed."""
    served, _ = await start(HARMLESS, Throws(), safety_fail_open=True)
    answer = (await served.post(chat(stream=False))).json()
    assert answer["choices"][0]["message"]["content"] == HARMLESS
    assert served.runtime.safety_counters.failures["stream"]["error"]["passed"] == 1
