"""What admins see of requests: their phases, how they ended, and samples of the load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.core import ChatRequest, Counts, Delta, Key, KeyTerms, Prompt
from app.pipeline import live as live_module
from app.pipeline.live import LiveRequest, LiveRequests, LoadHistory, LoadSample, percentile
from app.pipeline.trace import Trace
from app.stream.token_stream import TokenStream

KEY = Key("tr-1", "ann", KeyTerms("Ann's laptop"), 0)


class Request:
    """A request that the test takes through its stages by hand."""

    def __init__(
        self, request_id: str = "chatcmpl-1", counts: dict[int, Counts] | None = None, n: int = 1
    ) -> None:
        chat = ChatRequest(request_id, "ann", "m", {}, 0, n=n)
        self.trace = Trace(chat, counts, key_id=KEY.id)
        self.stream = cast(
            "TokenStream", SimpleNamespace(request=chat, request_id=request_id, cancelled=None, last_id=0)
        )

    def generate(self, tokens: int, reason: Any = None) -> None:
        """So many tokens so far."""
        delta = Delta(0, "text", "", (1,), Counts(9, tokens, 3), reason)
        self.trace.record(delta)
        if reason is not None:
            self.trace.record_finish(delta)

    def phase(self, *, engine_ready: bool = True) -> str:
        """The stage that admins see."""
        return LiveRequest(self.trace, self.stream, KEY).phase(engine_ready=engine_ready)[0]


def ended(live: LiveRequests, request: Request) -> None:
    """The request runs and ends."""
    with live.tracked(request.stream, request.trace, KEY):
        pass


def test_a_request_is_seen_in_each_of_its_phases():
    """From its arrival to its settlement."""
    request = Request()
    seen = [request.phase()]
    request.trace.rendered(Prompt(range(9), 50, None))
    seen.append(request.phase())
    request.trace.admitted()
    seen.append(request.phase())
    request.generate(1)
    seen.append(request.phase())
    cast("Any", request.stream).last_id = 2
    seen.append(request.phase())
    request.generate(2, "stop")
    seen.append(request.phase())
    assert seen == ["receive", "queue", "prefill", "held", "decode", "settle"]


def test_a_request_is_settled_when_all_its_choices_have_ended():
    """Until then the others are generated."""
    request = Request(n=2)
    request.generate(1, "stop")
    cast("Any", request.stream).last_id = 2
    assert request.phase() == "decode"


def test_a_request_whose_engine_is_away_is_resuming_and_one_that_waits_is_not():
    """A restart concerns those that the engine had."""
    request = Request()
    request.trace.rendered(Prompt(range(9), 50, None))
    assert request.phase(engine_ready=False) == "queue"
    request.trace.admitted()
    assert request.phase(engine_ready=False) == "resuming"


def test_a_request_is_live_until_it_ends_however_it_ends():
    """An exception leaves the list too."""
    live, request = LiveRequests(), Request()
    tracked = live.tracked(request.stream, request.trace, KEY)
    tracked.__enter__()
    assert [(r.stream.request_id, r.key_name) for r in live] == [("chatcmpl-1", "Ann's laptop")]
    assert not tracked.__exit__(ValueError, ValueError("broken"), None)
    assert len(live) == 0


def test_ended_requests_are_newest_first_and_apart_from_failed_ones():
    """A flood of refusals displaces no answer."""
    live = LiveRequests()
    for number in range(3):
        ended(live, Request(f"chatcmpl-{number}"))
    for number in range(live_module.MAX_FAILED + 5):
        request = Request(f"refused-{number}")
        request.trace.failed("overloaded")
        ended(live, request)
    assert [e.fields["request_id"] for e in live.ended()] == ["chatcmpl-2", "chatcmpl-1", "chatcmpl-0"]
    failed = [e.fields["error"] for e in live.failed()]
    assert failed == ["overloaded"] * live_module.MAX_FAILED


def test_ended_requests_are_forgotten_after_some_minutes():
    """What happened an hour ago is in the log."""
    now_s = 0.0
    live = LiveRequests(lambda: now_s)
    ended(live, Request())
    now_s = live_module.RECENT_S
    assert len(list(live.ended())) == 1
    now_s += 1
    assert list(live.ended()) == []


def test_generated_tokens_are_those_of_this_process_and_never_fall():
    """Those that an earlier process generated of a continued answer are not counted."""
    live, continued = LiveRequests(), Request(counts={0: Counts(9, 100)})
    with live.tracked(continued.stream, continued.trace, None):
        assert live.generated_tokens == 0
        continued.generate(107)
        assert live.generated_tokens == 7
    assert live.generated_tokens == 7


def test_a_sample_has_the_longest_lag_since_the_one_before():
    """A look between two samples is not lost."""
    now_s, generated = 100.0, 0
    history = LoadHistory(lambda: now_s)

    def read(at_s: float) -> LoadSample:
        return LoadSample(at_s, 1, 2, 3, generated)

    for lag_s, after_s in ((0.0, 2.0), (0.5, 2.0), (0.1, 1.0), (0.0, 1.0)):
        history.observe(lag_s, read)
        now_s, generated = now_s + after_s, generated + 20 * int(after_s)
    [(sample, rate)] = history.rates()
    assert (sample.at_unix_s, sample.loop_lag_s, rate) == (105.0, 0.5, 20.0)


def test_samples_are_bounded():
    """Ten minutes of them."""
    now_s = 0.0
    history = LoadHistory(lambda: now_s)
    for _ in range(2 * live_module.MAX_SAMPLES):
        now_s += live_module.SAMPLE_S
        history.observe(0.0, lambda at_s: LoadSample(at_s, 0, 0, 0, 0))
    assert len(list(history.rates())) == live_module.MAX_SAMPLES - 1


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.9, 4), (0.01, 1), (0.75, 3)])
def test_a_percentile_is_a_value_that_was_seen(share: float, value: float):
    """By nearest rank."""
    assert percentile([1, 2, 3, 4], share) == value
