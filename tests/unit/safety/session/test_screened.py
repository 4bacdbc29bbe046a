"""One request, screened: what is refused, watched, halted and stored of it, and what a failure means."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from app.core import Key, KeyTerms
from app.errors import ContentFiltered, StorageUnavailable
from app.metering.traffic import Histogram
from app.safety import moderation
from app.safety.classifiers.bundled_models import Models
from app.safety.counters import HOLD_BACK_S, SafetyCounters
from app.safety.guard.tier import GuardTier
from app.safety.policies.notices import Notices
from app.safety.session.screened import ScreenedSession
from app.safety.session.service import SafetyService
from app.safety.session.session import PastTurns
from app.safety.stream.stream_screen import Screening
from app.safety.verdict import NgramResult, Scores, ScreenFailed, Verdict
from app.settings import Settings
from app.store import safety_events
from app.store.database import Database
from app.stream.ring import ExtraChunk
from tests.support.generations import (
    Generations,
    answer_of,
    asked,
    controls,
    conversing,
    generations,
    text_of,
)
from tests.support.policies import WordClassifier
from tests.support.screens import (
    BLOCKED,
    HARM,
    SEEN_LATE,
    WATCHED,
    WATCHED_LATE,
    WordModel,
    policy_file,
    word_models,
)
from tests.support.sse_client import until


class HandGuard:
    """A guard whose verdict a test sets."""

    def __init__(self, action: Any = None, *, fails: bool = False, never: bool = False) -> None:
        self._action = action
        self._fails = fails
        self._never = never
        self.conversations: list[Any] = []
        self.watched: list[bool] = []
        self.cancelled = False

    async def judge(self, policy: Any, conversation: Any, *, watched: bool) -> Verdict | None:
        """See GuardTier."""
        self.conversations.append(conversation)
        self.watched.append(watched)
        if self._never:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled = True
        if self._fails:
            return None
        return Verdict(self._action, "S2", 0.9, 0.5, "guard", policy.hash, {"S2": 0.9})


class Throwing:
    """A model of answers that throws at every text, or is not to be had."""

    review_at = 0.5

    def __init__(self, *, starts: bool = True) -> None:
        self._starts = starts

    def start(self, _prior: float) -> Throwing:
        """See AnswerClassifier."""
        if not self._starts:
            raise RuntimeError("a secret")
        return self

    def feed(self, _text: str) -> float:
        """See ScoredAnswer."""
        raise RuntimeError("a secret")


class ThrowingClassifier:
    """A classifier that throws."""

    def fast(self, _text: str) -> NgramResult:
        """See PromptClassifier."""
        raise RuntimeError("a secret")

    def full(self, _text: str) -> Scores:
        """See PromptClassifier."""
        raise RuntimeError("a secret")


class World:
    """A pipeline with screens, and what a test changes of them."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path
        self.models: Models = word_models(tmp_path / "models")
        self.counters = SafetyCounters(Histogram(HOLD_BACK_S))
        self.guard: HandGuard | None = None
        self.fail_open = False
        self.sure_below = 0.0
        self.policy: dict[str, Any] = {}
        self.service: SafetyService | None = None

    def build(self, database: Database, log: Any) -> SafetyService:
        """The screens over a store."""
        path = Path(policy_file(self.directory, **self.policy)) if self.policy else None
        self.service = SafetyService(
            Settings(safety_policy=str(path or ""), safety_fail_open=self.fail_open, safety_records_days=30),
            self.models._replace(sure_below=self.sure_below),
            self.counters,
            database=database,
            log=log,
            guard=lambda: cast("GuardTier | None", self.guard),
        )
        return self.service

    def judged(self, stage: str) -> dict[str, int]:
        """Verdicts of a stage by action."""
        actions: dict[str, int] = {}
        for counted in self.counters.verdicts[stage].values():
            for action, number in counted.items():
                actions[action] = actions.get(action, 0) + number
        return actions


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Screens that know words."""
    return World(tmp_path)


@pytest.fixture
def running(world: World) -> Callable[[], Any]:
    """Makes the pipeline with the screens as the test has set them by then."""

    def run() -> contextlib.AbstractAsyncContextManager[Generations]:
        return generations(world.directory, service=world.build)

    return run


def says(made: Generations, *texts: str) -> None:
    """The engine says these texts and ends."""
    for text in texts:
        made.engine.say(text)
    made.engine.finish()


async def recorded(made: Generations) -> list[dict[str, Any]]:
    """The safety events in the store."""

    def query(c: sqlite3.Connection) -> list[dict[str, Any]]:
        cursor = c.execute("SELECT * FROM safety_events ORDER BY seq")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    await made.committed()
    return await made.database.read(query)


def in_words(prompts: list[Any]) -> list[str]:
    """The last rendered prompt as role and text."""
    return [f"{m['role']}: {m['content']}" for m in prompts[-1].body["messages"]]


# The prompt


async def test_harmless_prompt_is_read_by_both_and_leaves_nothing(world: World, running):
    """The full reading alone counts; nothing is stored, and nothing said of it."""
    async with running() as made:
        says(made, "fine")
        stream = await made.serve(asked("harmless"))
        assert (text_of(stream), controls(stream, ExtraChunk)) == ("fine", [])
        assert await recorded(made) == []
    assert world.judged("encoder") == {"pass": 1}
    assert world.judged("ngrams") == {}


async def test_prompt_of_little_harm_is_not_read_twice(world: World, running):
    """The n-grams are sure."""
    world.sure_below = 0.5
    async with running() as made:
        says(made, "fine")
        await made.serve(asked("harmless"))
    assert world.judged("ngrams") == {"pass": 1}
    assert world.judged("encoder") == {}


async def test_moderation_that_was_asked_for_comes_with_the_answer(running):
    """One result of the prompt, one of each choice."""
    async with running() as made:
        says(made, "fine")
        stream = await made.serve(asked("harmless", moderated=True))
        (chunk,) = controls(stream, ExtraChunk)
        assert [len(chunk.value[side]["results"]) for side in ("input", "output")] == [1, 1]
        assert not chunk.value["input"]["results"][0]["flagged"]


async def test_refused_prompt_is_recorded_with_a_keyed_hash(world: World, running):
    """An event says so, and has not the text; the refusal has the policy's words."""
    key = Key("key_1", "local", KeyTerms("k"), 0)
    async with running() as made:
        made.engine.say("never seen")
        stream = await made.serve(asked(f"a {BLOCKED} thing"), key=key)
        assert isinstance(stream.error, ContentFiltered)
        assert stream.error.message == Notices("", {}).message("S2", "chatcmpl-1")
        (event,) = await recorded(made)
        assert (event["subject"], event["stage"], event["action"]) == ("prompt", "encoder", "block")
        assert (event["key_id"], event["request_id"], event["category"]) == ("key_1", "chatcmpl-1", "S2")
        secret = await made.database.read(safety_events.secret)
        expected = hmac.new(secret, f"a {BLOCKED} thing".encode(), hashlib.sha256).digest()
        assert event["text_hmac"] == expected[: len(event["text_hmac"])]
        assert BLOCKED.encode() not in (world.directory / "tokenring.db-wal").read_bytes()
    assert (world.judged("ngrams"), world.judged("encoder")) == ({}, {"block": 1})


async def test_prompt_that_the_ngrams_alone_are_sure_of_is_answered(world: World, running):
    """They refuse nothing: it is watched, and the encoder, which finds nothing in it, has no more to say."""
    certain = {BLOCKED: {"S2": 0.999}}
    world.models = world.models._replace(prompts=WordClassifier(fast=certain))
    async with running() as made:
        says(made, "fine")
        stream = await made.serve(asked(f"a {BLOCKED} thing"))
        assert (text_of(stream), stream.error) == ("fine", None)
        assert in_words(made.engine.rendered)[0].startswith("system: ")
        (event,) = await recorded(made)
        assert (event["stage"], event["action"]) == ("ngrams", "watch")


async def test_prompt_that_is_refused_without_a_sure_category_is_told_in_general(world: World, running):
    """Two categories are nearly as likely as each other: the words of neither are used."""
    doubtful = WordClassifier(full={BLOCKED: {"S2": 0.9, "S7": 0.8}})
    world.models = world.models._replace(prompts=doubtful)
    async with running() as made:
        made.engine.say("never seen")
        stream = await made.serve(asked(f"a {BLOCKED} thing"))
        assert isinstance(stream.error, ContentFiltered)
        assert stream.error.message == Notices("", {}).message(None, "chatcmpl-1")
        (event,) = await recorded(made)
        assert event["category"] == "S2"


async def test_refused_turn_of_a_conversation_is_kept_as_blocked(running):
    """So that the policy is stricter for the next; the engine begins nothing, and nothing is billed."""
    async with running() as made:
        says(made, "fine")
        await made.serve(conversing("harmless"))
        made.engine.say("never seen")
        later = replace(asked(f"a {BLOCKED} thing"), request_id="chatcmpl-2")
        stream = await made.serve(replace(later, conversation_id="conv_1", message_id="msg_2"))
        assert isinstance(stream.error, ContentFiltered)
        await made.committed()
        query = "SELECT role, status FROM messages ORDER BY seq DESC LIMIT 1"
        assert await made.database.read(lambda c: c.execute(query).fetchone()) == ("assistant", "blocked")
        assert (await made.count("requests"), await made.count("messages")) == (1, 4)
        assert len(made.engine.rendered) == 1
        assert (
            await made.history.load(replace(later, conversation_id="conv_1", message_id="m"))
        ).strikes == 1


async def test_refused_first_turn_begins_no_conversation(running):
    """There is nothing of it that could be gone on with; the engine has not seen it."""
    async with running() as made:
        made.engine.say("never seen")
        stream = await made.serve(conversing(f"a {BLOCKED} thing"))
        assert (stream.refused, type(stream.error)) == (True, ContentFiltered)
        await made.committed()
        counted = [await made.count(table) for table in ("conversations", "messages", "requests")]
        assert (counted, made.engine.rendered, made.engine.aborted) == ([0, 0, 0], [], [])


async def test_prompt_that_only_the_full_reading_blocks_is_refused_before_its_first_token(
    world: World, running
):
    """The turn is stored with its reservation, and once."""
    async with running() as made:
        made.engine.say("never seen")
        stream = await made.serve(conversing(f"a {SEEN_LATE} thing"))
        assert (stream.refused, type(stream.error)) == (True, ContentFiltered)
        assert made.engine.aborted
        (event,) = await recorded(made)
        assert (event["stage"], event["action"]) == ("encoder", "block")
        assert await made.count("messages") == 2
        assert (await made.row())["outcome"] == "content_filter"
    assert world.judged("encoder") == {"block": 1}


async def test_strict_key_has_the_strict_policy(world: World, running):
    """A key tightens it."""
    key = Key("key_1", "local", KeyTerms("k", safety="strict"), 0)
    async with running() as made:
        await made.serve(asked(f"a {BLOCKED} thing"), key=key)
        (event,) = await recorded(made)
    current = world.service.policies.current
    assert event["policy_hash"] == current.at_level("strict").hash != current.hash


async def test_what_is_observed_is_counted_by_what_would_decide(world: World, running):
    """Though a locked category acts, and does less: the event names that; the moderation says what would."""
    world.policy = {"mode": "observe"}
    classifier = WordClassifier(full={BLOCKED: {"S1": 0.991, "S4": 0.5}})
    world.models = world.models._replace(prompts=classifier)
    async with running() as made:
        says(made, "fine")
        stream = await made.serve(asked(f"a {BLOCKED} thing", moderated=True))
        (event,) = await recorded(made)
        (chunk,) = controls(stream, ExtraChunk)
    assert (event["action"], event["category"]) == ("watch", "S4")
    assert world.counters.observed["encoder"] == {"S1": {"block": 1}}
    (result,) = chunk.value["input"]["results"]
    flagged = {key for key, is_flagged in result["categories"].items() if is_flagged}
    assert (result["flagged"], flagged) == (True, set(moderation.KEYS["S1"]))


async def test_prompt_that_the_ngrams_doubt_gets_the_strict_text(world: World, running):
    """In front of all else; it goes on, and an event says so."""
    world.policy = {"alignment": {"version": "own", "strict": "Be strict."}}
    async with running() as made:
        says(made, "fine")
        await made.serve(asked(f"a {WATCHED} thing"))
        assert in_words(made.engine.rendered) == ["system: Be strict.", f"user: a {WATCHED} thing"]
        (event,) = await recorded(made)
        assert (event["action"], event["stage"]) == ("watch", "encoder")


async def test_prompt_that_only_the_full_reading_watches_gets_the_strict_text_a_turn_later(
    world: World, running
):
    """It was too late for its own prompt; whoever sends the turn again, or goes on after it, is watched."""
    world.policy = {"alignment": {"version": "own", "strict": "Be strict."}}
    async with running() as made:
        says(made, "fine")
        await made.serve(asked(f"a {WATCHED_LATE} thing"))
        assert in_words(made.engine.rendered) == [f"user: a {WATCHED_LATE} thing"]
        (event,) = await recorded(made)
        assert (event["stage"], event["action"]) == ("encoder", "watch")
        await made.serve(replace(asked(f"a {WATCHED_LATE} thing"), request_id="chatcmpl-2"))
        assert in_words(made.engine.rendered)[0] == "system: Be strict."


async def test_verdict_that_is_there_is_not_waited_for(world: World, running):
    """Neither before the full reading began, nor where the n-grams were sure."""
    async with running():
        check = ScreenedSession(world.service, asked("harmless"), None)
        await check.await_verdict()
        assert not check.undecided
        await check.prescreen(asked("harmless"), PastTurns(), None)
        check.start_full_screen()
        assert check.undecided
        check.start_full_screen()
        await check.await_verdict()
        assert not check.undecided
    assert world.judged("encoder") == {"pass": 1}


async def test_generation_without_an_answer_is_accounted_for_without_one(world: World, running):
    """The engine ended before its first token."""
    async with running():
        check = ScreenedSession(world.service, asked("harmless", moderated=True), None)
        assert check.conclude(None, {}, 0) is None


async def test_screen_that_fails_refuses(world: World, running):
    """Before anything is rendered; its message is in no log."""
    world.models = world.models._replace(prompts=ThrowingClassifier())
    async with running() as made:
        stream = await made.serve(asked("harmless"))
        assert isinstance(stream.error, ScreenFailed)
        assert made.engine.rendered == []
        assert "a secret" not in repr(made.log)


async def test_prompt_that_was_let_pass_unread_is_not_remembered_as_read(world: World, running):
    """It is read again when it comes back."""
    world.models = world.models._replace(prompts=ThrowingClassifier())
    world.fail_open = True
    async with running() as made:
        says(made, "fine")
        stream = await made.serve(asked("harmless"))
        assert text_of(stream) == "fine"
    judged = world.service.judged.of("local", world.service.policies.current.hash)
    assert not judged.is_passed("harmless")


async def test_turns_and_answers_that_were_let_pass_are_remembered(world: World, running):
    """What a client sends back of them is not read again."""
    async with running() as made:
        says(made, "an answer")
        await made.serve(asked("harmless"))
    judged = world.service.judged.of("local", world.service.policies.current.hash)
    assert judged.is_passed("harmless")
    assert judged.is_answer("an answer")
    assert not world.service.judged.of("another", world.service.policies.current.hash).is_passed("harmless")


# The guard


async def test_guard_that_blocks_refuses(world: World, running):
    """It reads beside the encoder, and counts for itself."""
    world.guard = HandGuard("block")
    async with running() as made:
        made.engine.say("never seen")
        stream = await made.serve(asked("harmless"))
        assert isinstance(stream.error, ContentFiltered)
        (event,) = await recorded(made)
        assert (event["stage"], event["action"]) == ("guard", "block")
    assert world.judged("guard") == {}
    assert world.guard.watched == [False]
    assert world.guard.conversations[0][-1]["content"] == "harmless"


async def test_guard_reads_what_the_ngrams_were_sure_of(world: World, running):
    """Where there is a guard, nothing is decided without it."""
    world.guard, world.sure_below = HandGuard("block"), 0.5
    async with running() as made:
        made.engine.say("never seen")
        assert isinstance((await made.serve(asked("harmless"))).error, ContentFiltered)


async def test_guard_that_failed_lets_an_unwatched_prompt_pass(world: World, running):
    """As the server is set to."""
    world.guard = HandGuard(fails=True)
    async with running() as made:
        says(made, "fine")
        assert text_of(await made.serve(asked("harmless"))) == "fine"


async def test_guard_that_failed_refuses_a_prompt_that_only_the_full_reading_watches(world: World, running):
    """The guard was not told that it is watched."""
    world.guard = HandGuard(fails=True)
    async with running() as made:
        made.engine.say("never seen")
        stream = await made.serve(asked(f"a {WATCHED_LATE} thing"))
        assert isinstance(stream.error, ScreenFailed)
    assert world.guard.watched == [False]


async def test_guard_is_stopped_where_the_full_reading_blocks(world: World, running):
    """Nobody waits for it."""
    world.guard = HandGuard(never=True)
    async with running() as made:
        made.engine.say("never seen")
        stream = await made.serve(asked(f"a {SEEN_LATE} thing"))
        assert isinstance(stream.error, ContentFiltered)
        await until(lambda: world.guard.cancelled)


async def test_reading_ends_with_a_request_that_has_failed(world: World, running):
    """The engine failed first."""
    world.guard = HandGuard(never=True)
    async with running() as made:
        serving = made.begin(made.stream(asked("harmless")))
        await until(lambda: world.guard.conversations)
        made.engine.fail(RuntimeError())
        await asyncio.wait_for(_settled(serving, made), 10)
        await until(lambda: world.guard.cancelled)


async def _settled(serving: asyncio.Task[None], made: Generations) -> None:
    await until(lambda: made.engine.generated)
    await serving


# The answer


async def test_harmful_answer_is_halted_and_recorded(world: World, running):
    """How far the engine came is known; the text that was withheld is a keyed hash alone."""
    async with running() as made:
        made.engine.late_tokens = 3
        for word in ("A ", f"{HARM} ", "thing ", "is ", "said."):
            made.engine.say(word)
        stream = await made.serve(asked("harmless"))
        assert answer_of(stream).finish_reason == "content_filter"
        assert HARM not in text_of(stream)
        (chunk,) = controls(stream, ExtraChunk)
        assert chunk.value["output"]["results"][0]["flagged"]
        assert chunk.value["message"] == Notices("", {}).message("S2", "chatcmpl-1")
        (event,) = await recorded(made)
        assert (event["subject"], event["stage"], event["action"]) == ("answer", "stream", "block")
        assert event["lag_tokens"] >= 3
        assert event["text_hmac"] is not None
        row = await made.row()
        assert world.counters.dropped_tokens == row["withheld_tokens"] > 0
    judged = world.service.judged.of("local", world.service.policies.current.hash)
    assert not judged.is_answer(text_of(stream))


async def test_answer_to_a_watched_prompt_is_heard_with_that_in_mind(world: World, running):
    """The model of answers begins with the prompt's harm."""
    async with running() as made:
        says(made, "fine")
        await made.serve(asked(f"a {WATCHED} thing"))
    assert cast("WordModel", world.models.answers).prompt_harms[0] > 0.1


async def test_flagged_answer_is_released_and_recorded(world: World, running):
    """A policy may record without halting."""
    world.policy = {"categories.S2": {"action": "flag"}}
    async with running() as made:
        says(made, f"a {HARM} thing")
        stream = await made.serve(asked("harmless"))
        assert text_of(stream) == f"a {HARM} thing"
        (event,) = await recorded(made)
        assert (event["subject"], event["action"], event["text_hmac"]) == ("answer", "flag", None)
    assert world.judged("stream") == {"flag": 1}


async def test_halted_answer_has_the_scores_of_a_prompt_that_was_let_pass_without(world: World, running):
    """The moderation object says them though nobody had asked for them before."""
    world.sure_below = 0.5
    async with running() as made:
        says(made, f"a {HARM} thing ", "more")
        stream = await made.serve(asked("harmless"))
        (chunk,) = controls(stream, ExtraChunk)
        assert max(chunk.value["input"]["results"][0]["category_scores"].values()) == 0.01


async def test_halted_answer_stands_though_its_prompt_cannot_be_scored_any_more(
    world: World, running, monkeypatch: pytest.MonkeyPatch
):
    """The moderation object goes without."""

    def broken(*_arguments: object) -> None:
        raise ScreenFailed

    world.sure_below = 0.5
    async with running() as made:
        monkeypatch.setattr(world.service.prompts, "ngram_verdict", broken)
        says(made, f"a {HARM} thing ", "more")
        stream = await made.serve(asked("harmless"))
        assert answer_of(stream).finish_reason == "content_filter"
        (chunk,) = controls(stream, ExtraChunk)
        assert max(chunk.value["input"]["results"][0]["category_scores"].values()) == 0


@pytest.mark.parametrize("starts", [True, False])
async def test_stream_screen_that_breaks_releases_nothing_more(world: World, running, starts: bool):
    """Whether it throws or cannot be had; the failure is counted and logged without its message."""
    world.models = Models(
        world.models.prompts, Throwing(starts=starts), world.models.reviewer, world.models.directory
    )
    async with running() as made:
        says(made, "a text that is long enough to be heard")
        stream = await made.serve(asked("harmless"))
        assert isinstance(stream.error, ScreenFailed)
        assert text_of(stream) == ""
        assert [line["passed"] for line in made.log if line["event"] == "screen_broke"] == [False]
        assert "a secret" not in repr(made.log)
    assert world.counters.failures["stream"]["error"]["refused"] == 1


@pytest.mark.parametrize("moderated", [True, False])
async def test_stream_screen_that_breaks_lets_pass_where_the_server_fails_open(
    world: World, running, moderated: bool
):
    """And says so to who asked for the moderation; what it let pass is not remembered as judged."""
    world.models = Models(
        world.models.prompts, Throwing(starts=False), world.models.reviewer, world.models.directory
    )
    world.fail_open = True
    async with running() as made:
        says(made, "a text")
        stream = await made.serve(asked("harmless", moderated=moderated))
        assert (text_of(stream), stream.error) == ("a text", None)
        outputs = [chunk.value["output"]["type"] for chunk in controls(stream, ExtraChunk)]
        assert outputs == ["error"] * moderated
    assert world.counters.failures["stream"]["error"]["passed"] == 1
    judged = world.service.judged.of("local", world.service.policies.current.hash)
    assert not judged.is_answer("a text")


async def test_stream_screen_whose_failure_cannot_even_be_counted_lets_nothing_pass(
    world: World, running, monkeypatch: pytest.MonkeyPatch
):
    """Though the server fails open."""
    world.models = Models(
        world.models.prompts, Throwing(starts=False), world.models.reviewer, world.models.directory
    )
    world.fail_open = True

    def broken(*_arguments: object, **_named: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(world.counters, "failed", broken)
    async with running() as made:
        says(made, "a text")
        stream = await made.serve(asked("harmless"))
        assert (text_of(stream), type(stream.error)) == ("", ScreenFailed)


# What is stored


async def test_event_whose_unit_breaks_is_logged_without_its_message(
    world: World, running, monkeypatch: pytest.MonkeyPatch
):
    """The refusal stands."""

    def broken(*_arguments: object) -> None:
        raise ValueError("a secret")

    async with running() as made:
        monkeypatch.setattr(safety_events, "add", broken)
        stream = await made.serve(asked(f"a {BLOCKED} thing"))
        assert isinstance(stream.error, ContentFiltered)
        await until(lambda: [line for line in made.log if line["event"] == "safety_event_lost"])
        assert "a secret" not in repr(made.log)


async def test_event_after_the_store_was_closed_is_logged(
    world: World, running, monkeypatch: pytest.MonkeyPatch
):
    """The request's own end does not depend on it."""

    class Closed:
        def submit(self, _unit: object) -> None:
            raise StorageUnavailable("closed")

    async with running() as made:
        monkeypatch.setattr(world.service, "_database", Closed())
        made.engine.say("never seen")
        stream = await made.serve(asked(f"a {BLOCKED} thing"))
        assert isinstance(stream.error, ContentFiltered)
        assert [line["event"] for line in made.log] == ["safety_event_lost", "request"]


async def test_a_restored_prompt_keeps_its_verdict(world: World, running: Callable[[], Any]):
    """A watched one is watched again, with the strict text if it had that; nothing is counted anew."""
    request = asked("hello")
    async with running() as made:
        assert world.service is not None
        first = ScreenedSession(world.service, request, None)
        await first.prescreen(request, PastTurns(), None)
        first.start_full_screen()
        await first.await_verdict()
        state = orjson.loads(orjson.dumps(first.state()))
        counted = world.judged("encoder"), world.judged("ngrams")
        again = ScreenedSession(world.service, request, None)
        await again.restore(request, PastTurns(), state)
        assert again.state() == first.state()
        assert not again.undecided
        watched = ScreenedSession(world.service, request, None)
        await watched.restore(
            request, PastTurns(), {**state, "verdict": {**state["verdict"], "action": "watch"}}
        )
        screening = watched.open_screen()
        assert isinstance(screening, Screening)
        assert (world.judged("encoder"), world.judged("ngrams")) == counted
        await made.committed()


async def test_a_prompt_that_was_not_judged_before_is_watched(world: World, running: Callable[[], Any]):
    """Safety was off in the process before."""
    request = asked("hello")
    async with running():
        assert world.service is not None
        check = ScreenedSession(world.service, request, None)
        await check.restore(request, PastTurns(), {})
        assert check.state()["verdict"]["action"] == "watch"
        assert check.state()["strict"] is True
