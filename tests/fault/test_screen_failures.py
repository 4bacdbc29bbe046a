"""A screen throws, takes too long, or is not there: nothing goes on unscreened, unless it is let."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog

from app.core import Health, KeyTerms
from app.engine.scripted.engine import Script, ScriptedEngine
from app.errors import EngineNotReady
from app.runtime import Runtime
from app.safety.classifiers.bundled_models import Models
from app.safety.stream.answer_review import ScoredAnswer
from app.safety.verdict import NgramResult, Scores
from app.settings import Settings, SettingsError
from app.store import key_table, keys
from tests.support.policies import WordClassifier, write_models
from tests.support.screens import WordModel, WordReviewer, speaking
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import until

LONG = " ".join(f"word{i}" for i in range(100))
SECRET = "a secret in an exception"


class Throws:
    """A classifier of which one look throws."""

    def __init__(self, look: str) -> None:
        self._look = look
        self._calm = WordClassifier()

    def fast(self, text: str) -> NgramResult:
        """See PromptClassifier."""
        if self._look == "fast":
            self._throw()
        return self._calm.fast(text)

    def full(self, text: str) -> Scores:
        """See PromptClassifier."""
        return self._calm.full(text) if self._look != "full" else self._throw()

    def _throw(self) -> Scores:
        raise RuntimeError(SECRET)


class ThrowsLater:
    """A model of answers that throws once, at the token of that number, whosever it is."""

    review_at = 0.5

    def __init__(self, after: int) -> None:
        self._left = after
        self._thrown = False

    def start(self, _prior: float) -> ThrowsLater:
        """See AnswerClassifier."""
        return self

    def feed(self, text: str) -> float:
        """See ScoredAnswer."""
        self._left -= len(text.split())
        if self._left <= 0 and not self._thrown:
            self._thrown = True
            raise RuntimeError(SECRET)
        return 0.01


class NeverStarts:
    """A model of answers that cannot be had."""

    review_at = 0.5

    def start(self, _prior: float) -> ScoredAnswer:
        """See AnswerClassifier."""
        raise RuntimeError(SECRET)


async def served_by(
    serve: Serve, tmp_path: Path, prompts: Any = None, answers: Any = None, **settings: Any
) -> Served:
    """A server with these models, whose engine says LONG."""
    sure_below = settings.pop("sure_below", 0.0)
    models = Models(
        prompts or WordClassifier(),
        answers or WordModel(),
        WordReviewer(),
        write_models(tmp_path / "models"),
        sure_below,
    )
    script = Script(rate=settings.pop("rate", 0), prefill_s=settings.pop("prefill_s", 0.0))
    return await serve(
        script, engine_type=speaking(LONG), load_models=lambda: models, safety="on", **settings
    )


async def settled(served: Served) -> list[tuple[Any, ...]]:
    """The ledger, once nothing is left to write."""
    await served.settled()
    query = "SELECT state, outcome, completion_tokens, withheld_tokens FROM requests"
    return await served.runtime.database.read(lambda c: c.execute(query).fetchall())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("look", ["fast", "full"])
async def test_a_prompt_screen_that_throws_refuses(serve: Serve, tmp_path: Path, look: str, stream: bool):
    """503 before the first byte, counted, and what threw is not quoted."""
    served = await served_by(serve, tmp_path, Throws(look))
    answer = await served.post(chat(stream=stream))
    assert answer.refusal() == (503, "safety_unavailable", None)
    assert int(answer.headers["retry-after"]) > 0
    await until(lambda: served.running == 0)
    rows = await settled(served)
    assert all((row[0], row[1], row[2]) == ("settled", "safety_unavailable", row[3]) for row in rows)
    assert SECRET not in repr(served.log)
    stage = "ngrams" if look == "fast" else "encoder"
    assert served.runtime.safety_counters.failures[stage]["error"]["refused"] == 1
    assert not served.runtime.balance.differs


async def test_a_prompt_screen_that_takes_too_long_refuses(serve: Serve, tmp_path: Path):
    """The engine is stopped, and the thread is not waited for."""
    release = threading.Event()
    served = await served_by(serve, tmp_path, WordClassifier(before=lambda _text: release.wait(5)), rate=200)
    assert served.runtime.safety is not None
    served.runtime.safety.prompts._timeout_s = 0.05
    answer = await served.post(chat())
    assert answer.refusal()[:2] == (503, "safety_unavailable")
    release.set()
    await until(lambda: served.running == 0)
    assert served.runtime.safety_counters.failures["encoder"]["timeout"]["refused"] == 1


@pytest.mark.parametrize("look", ["fast", "full"])
async def test_fail_open_lets_a_prompt_pass(serve: Serve, tmp_path: Path, look: str):
    """As the setting says; it is counted as passed."""
    served = await served_by(serve, tmp_path, Throws(look), safety_fail_open=True)
    answer = await served.post(chat(stream=False))
    assert answer.json()["choices"][0]["message"]["content"] == LONG
    stage = "ngrams" if look == "fast" else "encoder"
    assert served.runtime.safety_counters.failures[stage]["error"]["passed"] == 1


@pytest.mark.parametrize("fail_open", [False, True])
async def test_a_flood_of_prompts_is_answered_with_503(serve: Serve, tmp_path: Path, fail_open: bool):
    """Also where failures are let pass: whoever sends enough would have a way past the screen."""
    release, reads = threading.Event(), threading.Event()

    def hold(_text: str) -> None:
        reads.set()
        release.wait(5)

    served = await served_by(serve, tmp_path, WordClassifier(before=hold), safety_fail_open=fail_open)
    assert served.runtime.safety is not None
    served.runtime.safety.prompts._wait_s = 0.05
    first = asyncio.create_task(served.post(chat("first", stream=False)))
    await until(reads.is_set)
    flooded = await asyncio.gather(*(served.post(chat(f"flood {n}", stream=n % 2 == 0)) for n in range(4)))
    release.set()
    assert [answer.refusal()[:2] for answer in flooded] == [(503, "safety_unavailable")] * 4
    assert {answer.headers["retry-after"] for answer in flooded} == {"30"}
    assert (await first).status == 200
    assert served.runtime.safety_counters.failures["encoder"]["timeout"]["refused"] == 4
    await until(lambda: served.running == 0)


async def test_a_stream_screen_that_throws_ends_the_answer(serve: Serve, tmp_path: Path):
    """In an error event; what was held is released to no one, and not billed."""
    served = await served_by(serve, tmp_path, answers=ThrowsLater(40))
    async with await served.open(chat()) as stream:
        transcript = await stream.to_end()
    assert [error["code"] for error in transcript.errors] == ["safety_unavailable"]
    assert not transcript.finish_reasons
    assert transcript.done
    assert LONG.startswith(transcript.content())
    released = transcript.content().count(" ")
    assert 0 < released < 40
    ((state, outcome, completion, withheld),) = await settled(served)
    assert (state, outcome, completion - withheld) == ("settled", "safety_unavailable", released)
    assert served.running == 0
    assert SECRET not in repr(served.log)
    assert served.logged("screen_broke")
    assert served.runtime.safety_counters.failures["stream"]["error"]["refused"] == 1
    assert not served.runtime.balance.differs


async def test_an_answer_for_which_there_is_no_screen_is_not_told(serve: Serve, tmp_path: Path):
    """Nothing goes out; the engine is told to stop, and the failure counts once."""
    served = await served_by(serve, tmp_path, answers=NeverStarts())
    async with await served.open(chat()) as stream:
        transcript = await stream.to_end()
    assert [error["code"] for error in transcript.errors] == ["safety_unavailable"]
    assert (transcript.content(), served.running) == ("", 0)
    assert served.runtime.safety_counters.failures["stream"]["error"]["refused"] == 1
    assert SECRET not in repr(served.log)


@pytest.mark.parametrize("sure_below", [0.0, 0.5])
async def test_the_screen_of_an_answer_is_made_beside_the_prefill(
    serve: Serve, tmp_path: Path, sure_below: float
):
    """So that the first token need not wait for it, whether the encoder read the prompt or not."""
    served = await served_by(serve, tmp_path, answers=NeverStarts(), prefill_s=60, sure_below=sure_below)
    async with await served.open(chat()) as stream:
        await until(lambda: served.logged("screen_broke"))
        (live,) = served.live()
        assert (live.status_unsent, live.last_id) == (False, 1), "its beginning, and no token"
        await served.call("DELETE", f"/api/chat/completions/{stream.id}")


async def test_a_screen_that_breaks_in_an_unknown_way_lets_nothing_out(serve: Serve, tmp_path: Path):
    """Not even where its own failure cannot be written down."""
    served = await served_by(serve, tmp_path, answers=NeverStarts(), safety_fail_open=True)
    assert served.runtime.safety is not None
    served.runtime.safety.screen_broke = broken  # type: ignore[method-assign]
    async with await served.open(chat()) as stream:
        transcript = await stream.to_end()
    assert [error["code"] for error in transcript.errors] == ["safety_unavailable"]
    assert transcript.content() == ""


async def test_a_screen_that_cannot_be_opened_is_counted_and_logged(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the request's id and where it broke, without a text; nothing goes out."""
    monkeypatch.setattr("app.safety.stream.stream_screen.StreamScreen.for_request", broken)
    served = await served_by(serve, tmp_path, answers=WordModel())
    async with await served.open(chat()) as stream:
        transcript = await stream.to_end()
    assert [error["code"] for error in transcript.errors] == ["safety_unavailable"]
    assert transcript.content() == ""
    assert served.runtime.safety_counters.failures["stream"]["error"]["refused"] == 1
    (line,) = served.logged("screen_broke")
    assert (line["request_id"], line["passed"]) == (stream.id, False)
    assert SECRET not in repr(served.log)


def broken(*_given: object, **_named: object) -> None:
    """Throws."""
    raise OSError("no space left on device")


async def test_an_answer_in_one_piece_is_503(serve: Serve, tmp_path: Path):
    """There was no first byte yet."""
    served = await served_by(serve, tmp_path, answers=ThrowsLater(40))
    assert (await served.post(chat(stream=False))).refusal() == (503, "safety_unavailable", None)


async def test_fail_open_lets_an_answer_pass(serve: Serve, tmp_path: Path):
    """Whole and in order; who asked for its moderation is told that there is none."""
    served = await served_by(serve, tmp_path, answers=ThrowsLater(40), safety_fail_open=True)
    body = chat(stream=False, moderation={"model": "omni-moderation-latest"})
    answer = (await served.post(body)).json()
    assert answer["choices"][0]["message"]["content"] == LONG
    assert answer["moderation"]["output"]["code"] == "safety_unavailable"
    assert served.runtime.safety_counters.failures["stream"]["error"]["passed"] == 1


async def test_one_that_is_refused_takes_no_other_with_it(serve: Serve, tmp_path: Path):
    """The screens of other requests go on."""
    served = await served_by(serve, tmp_path, answers=ThrowsLater(450))
    answers = await asyncio.gather(*(served.post(chat(stream=False)) for _ in range(5)))
    assert sorted(answer.status for answer in answers) == [200, 200, 200, 200, 503]


@pytest.mark.parametrize("files", [None, "calibration.json"])
def test_a_server_without_its_models_does_not_start(tmp_path: Path, files: str | None):
    """Missing or damaged: it says which file, before it listens."""
    directory = tmp_path / "models"
    if files is not None:
        write_models(directory)
        (directory / files).write_text("{")
    models = Models(WordClassifier(), WordModel(), WordReviewer(), directory)
    settings = Settings(data_dir=tmp_path, engine="scripted", safety="on")
    with pytest.raises(SettingsError, match=r"calibration\.json"):
        Runtime(settings, Any, load_models=lambda: models)


async def test_nothing_is_answered_before_the_guard_is_there(tmp_path: Path):
    """Its model may load for minutes longer than the large one."""
    settings = Settings(data_dir=tmp_path, engine="scripted", safety="off")
    runtime = Runtime(settings, structlog.get_logger())
    guard = ScriptedEngine(Script(start_s=300))
    runtime.guard_engine = guard
    starting = asyncio.create_task(runtime.start())
    await until(lambda: runtime.engine.health() is Health.READY)
    with pytest.raises(EngineNotReady):
        runtime.check_ready()
    starting.cancel()
    await runtime.aclose()


async def test_a_lost_event_does_not_lose_the_answer(serve: Serve, tmp_path: Path):
    """The refusal stands where its event cannot be written; the log says so."""
    certain = {"forbidden": {"S2": 0.999}}
    served = await served_by(serve, tmp_path, WordClassifier(fast=certain, full=certain))

    def broken(_connection: Any, _event: Any) -> int:
        raise RuntimeError(SECRET)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.store.safety_events.add", broken)
        answer = await served.post(chat("forbidden", stream=False))
        await until(lambda: served.logged("safety_event_lost"))
    assert answer.json()["error"]["code"] == "content_filter"
    assert SECRET not in repr(served.log)


async def test_what_cannot_be_remembered_of_an_answer_leaves_nothing_open(serve: Serve, tmp_path: Path):
    """The answer is whole, its lease and its journal line are settled, and the next one is answered."""
    served = await served_by(serve, tmp_path, WordClassifier())
    at_us = key_table.now_us()
    issued = await served.runtime.database.write(
        lambda c: keys.create(c, KeyTerms("a", max_streams=1), at_us)
    )
    await served.runtime.keys.load()
    key = {"authorization": f"Bearer {issued.text}"}

    def broken(*_: Any) -> Any:
        raise RuntimeError(SECRET)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.pipeline.finalize.build_messages", broken)
        assert (await served.post(chat("hello", stream=False), **key)).status == 200
        await until(lambda: served.logged("generation_broke"))
    assert (await served.post(chat("hello", stream=False), **key)).status == 200
    assert SECRET not in repr(served.log)
