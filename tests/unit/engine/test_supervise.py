"""Supervision: pauses that double, limits in a window, a history, and an engine that is started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import structlog

from app.core import ChatRequest, Health
from app.engine.scripted.engine import Script, ScriptedEngine
from app.engine.supervise import (
    FIRST_GUESS_S,
    Backoff,
    RestartHistory,
    RestartLimits,
    RestartPolicy,
    SupervisedEngine,
    history_of,
    supervise,
)
from app.errors import EngineFailed
from tests.support.sse_client import until


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_reset() -> None:
    """After a reset the first pause comes again."""
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert [backoff.next_s() for _ in range(2)] == [1.0, 2.0]


async def test_a_run_that_succeeded_makes_the_next_pause_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures lengthen the pauses; an end after a success is followed by the first pause."""
    outcomes = iter([False, False, True, False])
    pauses: list[float] = []

    async def run() -> bool:
        try:
            return next(outcomes)
        except StopIteration:
            raise asyncio.CancelledError from None

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)

    monkeypatch.setattr("app.engine.supervise.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await supervise(run, Backoff(1.0, 60.0))
    assert pauses == [1.0, 2.0, 1.0, 2.0]


class Outages:
    """A policy of two restarts in 100 s, on a clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.policy = RestartPolicy(RestartLimits(2, 100), Backoff(1.0, 30.0), lambda: self.now_s)

    def lose(self, after_s: float) -> float | None:
        """The pause after a loss."""
        self.now_s += after_s
        self.policy.lost()
        self.policy.begin_outage()
        return self.policy.next_pause_s()


def test_the_first_loss_is_made_good_at_once_and_more_than_the_limit_are_not() -> None:
    """The next one after a pause, and the third in the window ends it."""
    outages = Outages()
    assert [outages.lose(10) for _ in range(3)] == [0, 1, None]


def test_losses_before_the_window_do_not_count() -> None:
    """The pauses begin again, too."""
    outages = Outages()
    assert [outages.lose(seconds) for seconds in (0, 10, 101, 10)] == [0, 1, 0, 1]


def test_a_loss_whose_cause_is_gone_is_forgotten() -> None:
    """A request that killed the engine was ended: the engine is not to blame."""
    outages = Outages()
    assert [outages.lose(1), outages.lose(1)] == [0, 1]
    outages.policy.excuse()
    assert outages.lose(1) == 2
    assert outages.lose(1) is None


def test_within_an_outage_slow_starts_count() -> None:
    """Each may take longer than the window to fail; without `begin_outage` none is forgotten."""
    outages = Outages()
    assert outages.lose(0) == 0
    for pause_s in (1, None):
        outages.now_s += 500
        outages.policy.lost()
        assert outages.policy.next_pause_s() == pause_s


class Story:
    """A history whose clock the test turns, and the log of it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.history = RestartHistory(lambda: self.now_s)
        self.captured = structlog.testing.LogCapture()
        self.cold_caches = 0
        self.history.attach(structlog.wrap_logger(None, processors=[self.captured]), self._cache_is_cold)

    def _cache_is_cold(self) -> None:
        self.cold_caches += 1


def test_a_restart_is_timed_from_the_first_loss_on() -> None:
    """A start that fails meanwhile is counted, and prolongs the outage."""
    story = Story()
    story.history.lost("exited", "killed", 4)
    story.now_s += 3
    story.history.lost("failed", "no GPU", 4)
    story.now_s += 7
    assert story.history.reason == "no GPU"
    story.history.recovered(4)
    assert story.history.reason is None
    assert (story.history.last_away_s, story.history.away_s) == (10, 10)
    assert story.history.losses == {"exited": 1, "hung": 0, "failed": 1}
    assert (story.history.num_restarts, story.history.num_choices_continued) == (1, 4)
    events = [(line["event"], line.get("cause"), line.get("took_s")) for line in story.captured.entries]
    assert events == [
        ("engine_lost", "exited", None),
        ("engine_lost", "failed", None),
        ("engine_restarted", None, 10),
    ]
    assert story.cold_caches == 1


@pytest.mark.parametrize(("gone_s", "retry_after_s"), [(0, 20), (15.5, 5), (19.9, 1), (100, 1)])
def test_retry_after_is_what_is_left_of_a_start(gone_s: float, retry_after_s: int) -> None:
    """The last start's time is the best guess; nobody is told to come at once."""
    story = Story()
    assert story.history.retry_after_s() == FIRST_GUESS_S
    story.history.started(20)
    story.history.lost("hung", "silent", 0)
    story.now_s += gone_s
    assert story.history.retry_after_s() == retry_after_s


def test_a_request_that_is_ended_is_logged_by_its_id_and_a_hash() -> None:
    """No text; with choices that were lost to a dead engine there is no request to name."""
    story = Story()
    story.history.count_lost_choices(2, "r1", "beef")
    story.history.count_lost_choices(3)
    story.history.contradicted("r2-000", "output after the final delta")
    assert (story.history.num_choices_lost, story.history.num_contradictions) == (5, 1)
    quarantined, contradiction = story.captured.entries
    assert (quarantined["request_id"], quarantined["prompt_hmac"]) == ("r1", "beef")
    assert (contradiction["choice_id"], contradiction["what"]) == ("r2-000", "output after the final delta")


def test_an_engine_that_does_not_start_itself_has_an_empty_history() -> None:
    """Metrics read one all the same."""
    history = history_of(ScriptedEngine(Script()))
    assert (history.num_restarts, history.reason) == (0, None)


class Fussy(ScriptedEngine):
    """Starts when it is let, or fails to."""

    def __init__(self, on_death: Callable[[str], None]) -> None:
        super().__init__(Script(tokens=3), name="small", on_death=on_death)
        self.may_start = asyncio.Event()
        self.fails = ""
        self.num_starts = 0

    async def start(self) -> None:
        self.num_starts += 1
        await self.may_start.wait()
        if self.fails:
            raise EngineFailed(self.fails)
        await super().start()


class World:
    """An engine that is supervised."""

    def __init__(self) -> None:
        self.supervised = SupervisedEngine("small", self._make, first_pause_s=0.001)

    def _make(self, on_death: Callable[[str], None]) -> Fussy:
        self.engine = Fussy(on_death)
        return self.engine

    async def ready(self) -> None:
        """Let it start, and wait for that."""
        self.engine.may_start.set()
        await until(lambda: self.supervised.state == "ready")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Nothing started yet."""
    made = World()
    yield made
    await made.supervised.aclose()


async def test_nobody_waits_for_its_start(world: World) -> None:
    """It has a name and a state meanwhile."""
    await world.supervised.start()
    assert (world.supervised.name, world.supervised.state) == ("small", "starting")
    await world.ready()
    assert world.supervised.num_failures == 0


async def test_a_start_that_fails_is_tried_again(world: World) -> None:
    """The reason is told meanwhile."""
    world.engine.fails = "no memory"
    world.engine.may_start.set()
    await world.supervised.start()
    await until(lambda: world.supervised.num_failures > 0)
    assert world.supervised.state == "down: no memory"
    world.engine.fails = ""
    await world.ready()
    assert world.supervised.num_failures == world.engine.num_starts - 1


async def test_a_dead_one_is_started_again(world: World) -> None:
    """It is asked for what it has handed over all the same; what runs on it fails."""
    await world.supervised.start()
    await world.ready()
    request = ChatRequest("r", "ann", "small", {"messages": [{"role": "user", "content": "hi"}]}, 0)
    deltas = world.engine.generate("r", await world.engine.render(request))
    await anext(deltas)
    world.engine.may_start.clear()
    world.engine.die("killed")
    assert world.supervised.state == "down: killed"
    with pytest.raises(EngineFailed):
        await anext(deltas)
    assert world.engine.pop_emitted_tokens("r") == 1
    await world.ready()
    assert (world.engine.num_starts, world.supervised.num_failures) == (2, 1)


async def test_what_is_closed_starts_no_more(world: World) -> None:
    """In the middle of a start too."""
    await world.supervised.start()
    await until(lambda: world.engine.num_starts == 1)
    await world.supervised.aclose()
    assert world.engine.health() is Health.DEAD
    await world.supervised.aclose()
    assert world.engine.num_starts == 1
