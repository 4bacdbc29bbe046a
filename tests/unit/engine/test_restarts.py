"""What an engine's restarts are remembered as, by a clock that the test turns."""

from __future__ import annotations

import pytest
import structlog

from app.engine.restarts import FIRST_GUESS_S, RestartHistory, history_of
from app.engine.scripted.engine import Script, ScriptedEngine
from app.routing.restart_log import RestartLog


class Story:
    """A history whose clock the test turns, and the log of it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.history = RestartHistory(lambda: self.now_s)
        self.captured = structlog.testing.LogCapture()
        self.cold_caches = 0
        self.history.listen(
            RestartLog(structlog.wrap_logger(None, processors=[self.captured]), self._cache_is_cold)
        )

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
    assert (story.history.num_restarts, story.history.num_resumed) == (1, 4)
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
    story.history.ended(2, "r1", "beef")
    story.history.ended(3)
    story.history.refused("r2-000", "output after its end")
    assert (story.history.num_lost, story.history.num_refused) == (5, 1)
    quarantined, contradiction = story.captured.entries
    assert (quarantined["request_id"], quarantined["prompt_hmac"]) == ("r1", "beef")
    assert (contradiction["choice_id"], contradiction["what"]) == ("r2-000", "output after its end")


def test_an_engine_that_does_not_start_itself_has_an_empty_history() -> None:
    """Metrics read one all the same."""
    history = history_of(ScriptedEngine(Script()))
    assert (history.num_restarts, history.reason) == (0, None)
