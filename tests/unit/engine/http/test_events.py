"""What a remote server streams, read: whole events only, increments of either kind, nothing else."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core import Counts
from app.engine.http import events as remote_events
from app.engine.http.events import (
    ChoiceReader,
    ChoiceStep,
    EventReader,
    Refusal,
    ServerGone,
    refusal_of,
)

STEPS = [("Hel", [1, 2]), ("lo", [3]), ("", [4]), (" you", [5, 6])]


def event(text: str, token_ids: list[int], completion: int, finish: object = None, **meta: object) -> bytes:
    """One event as SGLang writes it."""
    counts = {"prompt_tokens": 7, "completion_tokens": completion, "cached_tokens": 3}
    info = {"finish_reason": finish, **counts, **meta}
    return orjson.dumps({"text": text, "output_ids": token_ids, "meta_info": info})


def streamed(*, cumulative: bool, **meta: object) -> list[bytes]:
    """An answer in four events, each alone or with everything before it."""
    text, ids, events = "", [], []
    for number, (piece, new) in enumerate(STEPS):
        text, ids = text + piece, ids + new
        finish = {"type": "stop", "matched": 6} if number == len(STEPS) - 1 else None
        shown_text, shown_ids = (text, ids) if cumulative else (piece, new)
        events.append(event(shown_text, shown_ids, len(ids), finish, **meta))
    return events


def read(events: list[bytes]) -> list[ChoiceStep]:
    """All steps of one choice."""
    reader = ChoiceReader(prompt_tokens=7)
    return [reader.read(payload) for payload in events]


@pytest.mark.parametrize("cumulative", [False, True])
def test_both_kinds_of_stream_give_the_same_steps(*, cumulative: bool) -> None:
    """Increments come out, whether the server sends increments or everything so far."""
    steps = read(streamed(cumulative=cumulative))
    assert [(step.text, list(step.token_ids)) for step in steps] == STEPS
    assert [step.counts.completion_tokens for step in steps] == [2, 3, 4, 6]
    assert steps[-1].counts == Counts(7, 6, 3, 0)
    assert [step.finish and step.finish["type"] for step in steps] == [None, None, None, "stop"]


def test_events_that_the_server_joined_are_one_step() -> None:
    """A slow reader gets several tokens in one event; counts are those of the event."""
    steps = read([event("ab", [1, 2, 3], 3), event("cd", [4, 5], 5, {"type": "length"})])
    assert [list(step.token_ids) for step in steps] == [[1, 2, 3], [4, 5]]


def test_an_abort_in_the_servers_queue_repeats_nothing() -> None:
    """That answer has the whole text, one id and no prompt count: nothing of it is new."""
    reader = ChoiceReader(prompt_tokens=7)
    reader.read(event("abc", [1, 2, 3], 3))
    meta = {"finish_reason": {"type": "abort", "message": "x"}, "completion_tokens": 3}
    step = reader.read(orjson.dumps({"text": "abc", "output_ids": [3], "meta_info": meta}))
    assert (step.text, list(step.token_ids), step.counts) == ("", [], Counts(7, 3, 3, 0))


@pytest.mark.parametrize("cumulative", [False, True])
def test_logprobs_are_those_of_the_step(*, cumulative: bool) -> None:
    """Of cumulative lists only the end is new."""
    tokens = [[-0.5, 1, None], [-0.25, 2, None], [-0.75, 3, None]]
    tops = [[[-0.5, 1, None], [-2.0, 9, None]], None, [[-0.75, 3, None]]]
    start = 0 if cumulative else 2
    reader = ChoiceReader(prompt_tokens=7)
    reader.read(event("ab", [1, 2], 2, output_token_logprobs=tokens[:2], output_top_logprobs=tops[:2]))
    lists = {"output_token_logprobs": tokens[start:], "output_top_logprobs": tops[start:]}
    step = reader.read(event("abc" if cumulative else "c", [1, 2, 3][start:], 3, **lists))
    row = step.logprobs
    assert row is not None
    assert (row.output_token_logprobs_val, row.output_token_logprobs_idx) == ([[-0.75]], [[3]])
    assert (row.output_top_logprobs_val, row.output_top_logprobs_idx) == ([[[-0.75]]], [[[3]]])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"text": "x"}',
        b'{"text": 1, "output_ids": [], "meta_info": {"finish_reason": null, "completion_tokens": 0}}',
        event("x", [-1], 1),
        event("x", ["a"], 1),
        event("x", [1], 1, prompt_tokens="many"),
        event("x", [1], 1, output_token_logprobs=[[]]),
    ],
)
def test_garbage_is_unreadable_and_never_quoted(payload: bytes) -> None:
    """What no SGLang sends is one kind of error, whose message has nothing of it."""
    with pytest.raises(ServerGone, match=r"^an event that cannot be read \(\w+\)$") as gone:
        ChoiceReader(prompt_tokens=1).read(payload)
    assert gone.value.kind == "unreadable"


@pytest.mark.parametrize("lie", [event("a", [1], 1), event("a", [3], 5), event("a", [3, 4, 5], 4)])
def test_counts_that_do_not_fit_the_ids_are_wrong(lie: bytes) -> None:
    """A server that takes tokens back, or counts more or fewer than it sends, cannot be followed."""
    reader = ChoiceReader(prompt_tokens=1)
    reader.read(event("ab", [1, 2], 2))
    with pytest.raises(ServerGone) as gone:
        reader.read(lie)
    assert gone.value.kind == "wrong_count"
    assert reader.counts == Counts(1, 2, 1, 0)


def test_the_prompt_is_counted_here() -> None:
    """What was sent is what is billed; that the server says otherwise is noted."""
    reader = ChoiceReader(prompt_tokens=2)
    step = reader.read(event("ab", [1, 2], 2))
    assert step.counts == Counts(2, 2, 2, 0)
    assert reader.miscounts_prompt


def test_what_a_server_repeats_of_an_answer_is_dropped() -> None:
    """It sends all ids again, and the text as far as its last whole word; counts are those of all."""
    reader = ChoiceReader(7, 3, len("Hello wor"))
    assert not reader.advances
    steps = [
        reader.read(event("Hello ", [1, 2, 3, 4], 4)),
        reader.read(event("wo", [5], 5)),
        reader.read(event("rld and", [6], 6)),
        reader.read(event(" on", [7], 7)),
    ]
    assert [(step.text, list(step.token_ids)) for step in steps] == [
        ("", [4]),
        ("", [5]),
        ("ld and", [6]),
        (" on", [7]),
    ]
    assert reader.counts == Counts(7, 7, 3)
    assert reader.advances


def test_an_answer_that_had_ended_ends_without_more() -> None:
    """A server that is sent all of it has nothing to add."""
    step = ChoiceReader(7, 2, 2).read(event("ab", [1, 2], 2, {"type": "length"}))
    assert (step.text, list(step.token_ids), step.finish) == ("", [], {"type": "length"})


def test_an_error_event_is_a_refusal_with_its_status() -> None:
    """SGLang sends status 200 first and its refusal as an event."""
    with pytest.raises(Refusal) as refused:
        ChoiceReader(prompt_tokens=1).read(b'{"error": {"message": "too long", "code": 400}}')
    assert refused.value.finish == {"type": "abort", "status_code": 400, "message": "too long"}


@pytest.mark.parametrize(
    ("body", "message"),
    [(b'{"error": {"message": "no"}}', "no"), (b'{"message": "no"}', "no"), (b"<html>", ""), (b"[1]", "")],
)
def test_the_words_of_a_refusal_are_found_in_either_shape(body: bytes, message: str) -> None:
    """OpenAI's error body and SGLang's older one; anything else has no words."""
    assert refusal_of(503, body).finish == {"type": "abort", "status_code": 503, "message": message}


@given(st.data())
def test_any_chunking_gives_the_same_events(data: st.DataObject) -> None:
    """Where the network cuts the bytes makes no difference."""
    payloads = [*streamed(cumulative=False), b"[DONE]"]
    raw = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    reader = EventReader()
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert [payload for piece in pieces for payload in reader.feed(piece)] == payloads


def test_a_line_without_an_end_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, whatever a server sends."""
    monkeypatch.setattr(remote_events, "MAX_EVENT_BYTES", 1000)
    reader = EventReader()
    for _ in range(10):
        assert list(reader.feed(b"x" * 100)) == []
    with pytest.raises(ServerGone):
        list(reader.feed(b"x"))
