"""The one log line of a request: counts and timings, never text."""

from __future__ import annotations

import pytest

from app.core import ChatRequest, Counts, Delta, Prompt
from app.pipeline import trace as trace_module
from app.pipeline.trace import Trace


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        """The time set."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The trace's clock."""
    clock = Clock()
    monkeypatch.setattr(trace_module, "time", clock)
    return clock


def request(n: int = 1) -> ChatRequest:
    """A request with words in it."""
    body = {"messages": [{"role": "user", "content": "secret words"}]}
    return ChatRequest("chatcmpl-1", "local", "scripted", body, 0, n=n)


def passed_on(trace: Trace, delta: Delta) -> None:
    """A delta comes from the engine, and goes out."""
    trace.record(delta)
    if delta.finish_reason is not None:
        trace.record_finish(delta)


def test_timings_of_a_whole_request(clock: Clock):
    """Queue, TTFT and total count from arrival; TPOT spans first to last token, over one token less."""
    trace = Trace(request(), key_id="tr-3f9a1c2b4d5e")
    clock.now_s = 100.25
    trace.rendered(Prompt(range(7), 50, None))
    trace.admitted()
    clock.now_s = 101.0
    passed_on(trace, Delta(0, "text", "secret words", (5,), Counts(7, 1, 4)))
    clock.now_s = 103.0
    passed_on(trace, Delta(0, "text", "", (), Counts(7, 5, 4), "stop"))
    clock.now_s = 103.5
    fields = trace.fields()
    assert fields == {
        "request_id": "chatcmpl-1",
        "key": "tr-3f9a1c2b4d5e",
        "model": "scripted",
        "n": 1,
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "finish_reason": "stop",
        "error": None,
        "queue_ms": 250.0,
        "ttft_ms": 1000.0,
        "tpot_ms": 500.0,
        "total_ms": 3500.0,
    }
    assert "secret" not in repr(fields)


def test_choices_are_summed_and_their_reasons_listed(clock: Clock):
    """Completion tokens are those of all choices; TPOT is that of the longest."""
    trace = Trace(request(n=2))
    passed_on(trace, Delta(0, "text", "a", (1,), Counts(7, 1)))
    clock.now_s = 104.0
    passed_on(trace, Delta(0, "text", "", (), Counts(7, 3), "stop"))
    passed_on(trace, Delta(1, "text", "", (), Counts(7, 5), "length"))
    fields = trace.fields()
    assert (fields["completion_tokens"], fields["finish_reason"], fields["tpot_ms"]) == (
        8,
        "length,stop",
        1000.0,
    )


def test_request_that_never_ran(clock: Clock):
    """What did not happen is null, and a prompt that was rendered is counted though nothing ran."""
    trace = Trace(request())
    trace.failed("context_length_exceeded")
    fields = trace.fields()
    assert fields["error"] == "context_length_exceeded"
    assert [fields[k] for k in ("queue_ms", "ttft_ms", "tpot_ms", "finish_reason")] == [None] * 4
    trace.rendered(Prompt(range(9), 50, None))
    assert trace.fields()["prompt_tokens"] == 9


def test_one_token_has_no_time_per_token(clock: Clock):
    """TPOT needs two tokens."""
    trace = Trace(request())
    passed_on(trace, Delta(0, "text", "a", (1,), Counts(7, 1), "stop"))
    assert trace.fields()["tpot_ms"] is None


def test_stages_follow_each_other(clock: Clock):
    """Each begins where the one before ends; a request that waits has reached the second."""
    trace = Trace(request())
    clock.now_s = 101.0
    trace.rendered(Prompt(range(7), 50, None))
    clock.now_s = 103.0
    assert trace.stages() == [("receive", 100.0, 101.0), ("queue", 101.0, 103.0)]
    trace.admitted()
    clock.now_s = 104.0
    passed_on(trace, Delta(0, "text", "a", (1,), Counts(7, 1)))
    clock.now_s = 106.0
    passed_on(trace, Delta(0, "text", "", (), Counts(7, 1), "stop"))
    clock.now_s = 107.0
    assert trace.stages()[2:] == [
        ("prefill", 103.0, 104.0),
        ("decode", 104.0, 106.0),
        ("settle", 106.0, 107.0),
    ]


@pytest.mark.parametrize(("cached_tokens", "hit"), [(0, False), (3, False), (4, True), (8, True)])
def test_half_of_a_prompt_in_the_cache_is_a_hit(cached_tokens: int, hit: bool):
    """Of eight tokens four are enough; a request that has not begun is none."""
    trace = Trace(request())
    assert not trace.timings().prefix_hit
    passed_on(trace, Delta(0, "text", "a", (1,), Counts(8, 1, cached_tokens)))
    assert trace.timings().prefix_hit is hit
