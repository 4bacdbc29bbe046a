"""What is kept of each choice, and how the beginning of an answer that is continued is handed over."""

from __future__ import annotations

import pytest

from app.core import Counts
from app.engine.sglang.live_choices import (
    LiveChoice,
    LiveChoices,
    OutputMismatch,
    Replay,
)
from app.engine.sink import TokenTally
from app.errors import EngineFailed
from tests.support.live_choices import NotingSink, choice

WORDS = list("ring \u4e16\u754c end".encode())
STOP = {"type": "stop"}


def sink_of(live: LiveChoice) -> NotingSink:
    """The sink of a choice, as the test reads it."""
    sink = live.sink
    assert isinstance(sink, NotingSink)
    return sink


def test_a_sink_that_has_taken_the_beginning_gets_the_rest_alone() -> None:
    """Ids, characters and counts go on where they were; what was cached stays that of the first run."""
    tally = TokenTally()
    live = LiveChoice("a-000", None, NotingSink(), tally)
    live.take("ring", WORDS[:4], None, Counts(5, 4, 3), (None, 0))
    replay = Replay(live)
    replay.take("ring \u4e16\u754c", WORDS[:11], None, Counts(5, 11, 0), (None, 0))
    assert replay.done
    sink = sink_of(live)
    assert (sink.text, sink.token_ids) == ("ring \u4e16\u754c", WORDS[:11])
    assert sink.counts == Counts(5, 11, 3)
    assert tally.token_ids == 11


def test_text_that_comes_later_than_before_is_dropped_all_the_same() -> None:
    """A detokenizer that holds back half a character may hold back what the sink has already."""
    live = choice("a")
    live.take("ring", WORDS[:4], None, Counts(5, 4), (None, 0))
    replay = Replay(live)
    replay.take("", WORDS[:6], None, Counts(5, 6), (None, 0))
    assert not replay.done
    replay.take("ring \u4e16", WORDS[6:8], None, Counts(5, 8), (None, 0))
    assert replay.done
    assert sink_of(live).text == "ring \u4e16"
    assert sink_of(live).token_ids == WORDS[:8]


def test_a_new_sink_takes_what_was_generated_before_as_one_step() -> None:
    """Then the rest, whose logprobs are its own; the count of reasoning is no more than that of ids."""
    live = choice("a", prior=WORDS[:8])
    replay = Replay(live)
    replay.take("ring \u4e16\u754c end", WORDS, STOP, Counts(5, len(WORDS), 0, 9), (None, 0))
    sink = sink_of(live)
    assert (sink.text, sink.token_ids, sink.finish) == ("ring \u4e16\u754c end", WORDS, STOP)
    assert [ids for _, ids, _ in sink.steps] == [WORDS[:8], WORDS[8:]]
    assert [counts.completion_tokens for _, _, counts in sink.steps] == [8, len(WORDS)]
    assert [counts.reasoning_tokens for _, _, counts in sink.steps] == [8, 9]


@pytest.mark.parametrize("ids", [[1, 2], WORDS[:3], [*WORDS[:3], 0, 0]], ids=["other", "fewer", "one other"])
def test_other_ids_than_before_are_a_contradiction(ids: list[int]) -> None:
    """An engine whose output differs from its forerunner's cannot continue for it."""
    live = choice("a")
    live.take("ring", WORDS[:4], None, Counts(5, 4), (None, 0))
    with pytest.raises(OutputMismatch, match="other token ids"):
        Replay(live).take("?", ids, None, Counts(5, len(ids)), (None, 0))


def test_a_count_that_is_not_the_number_of_ids_is_a_contradiction() -> None:
    """What is billed is what was handed over."""
    live = choice("a", prior=WORDS[:2])
    with pytest.raises(OutputMismatch, match="4 token ids, and a count of 9"):
        Replay(live).take("ring", WORDS[:4], None, Counts(5, 9), (None, 0))


def test_all_wait_in_their_order_when_the_engine_is_lost() -> None:
    """Whatever state they were in; those that were aborted end, with the counts they have."""
    live = LiveChoices()
    first, second, third, fourth = (choice(name) for name in "abcd")
    live.wait(fourth)
    live.running[third.rid] = third
    live.replaying[first.rid] = Replay(first)
    live.running[second.rid] = second
    second.take("x", [65], None, Counts(5, 1), (None, 0))
    live.abort("b-")
    assert live.lose_engine() == [first, third, fourth]
    assert list(live.waiting) == ["a-000", "c-000", "d-000"]
    assert sink_of(second).finish == {"type": "abort"}
    assert sink_of(second).counts == Counts(5, 1)


def test_an_abort_ends_a_choice_that_waits_at_once() -> None:
    """No engine has it, so none has to be asked."""
    live = LiveChoices()
    for index in range(2):
        live.wait(choice("a", index=index))
    other = choice("b")
    live.wait(other)
    choices = list(live.waiting.values())
    live.abort("a-")
    assert [sink_of(c).finish for c in choices] == [{"type": "abort"}, {"type": "abort"}, None]
    assert list(live.waiting.values()) == [other]


def test_a_choice_is_a_suspect_after_two_losses_without_progress() -> None:
    """One that made progress in between was not what the second engine died of."""
    live = choice("a")
    live.lose_engine()
    assert not live.is_suspect
    live.take("A" * 7, [65] * 7, None, Counts(5, 7), (None, 0))
    live.lose_engine()
    assert live.is_suspect
    live.take("A" * 8, [65] * 8, None, Counts(5, 15), (None, 0))
    assert live.made_progress
    live.lose_engine()
    assert not live.is_suspect


def test_a_failure_ends_every_choice() -> None:
    """None is left without an end."""
    live = LiveChoices()
    choices = [choice("a"), choice("b")]
    live.wait(choices[0])
    live.running[choices[1].rid] = choices[1]
    live.fail_all(lambda: EngineFailed("gone"))
    assert [sink_of(c).error.code for c in choices] == ["engine_failed"] * 2  # type: ignore[union-attr]
    assert len(live) == 0


def short_of_memory() -> EngineFailed:
    """The error of an answer that a smaller pool has no room for."""
    return EngineFailed("The engine was started again, with less memory.", code="engine_restarted")


@pytest.mark.parametrize(
    ("finish", "is_cut"),
    [({"type": "length"}, True), (STOP, False), (None, False), ({"type": "abort"}, False)],
    ids=["cut", "stopped", "going on", "aborted"],
)
def test_an_answer_that_a_smaller_pool_cuts_ends_in_an_error(
    finish: dict[str, str] | None, is_cut: bool
) -> None:
    """What was generated is handed over all the same; an answer that stops by itself is whole."""
    live = choice("a", max_tokens=9)
    sink = sink_of(live)
    live.expect_cut(short_of_memory)
    live.expect_cut(short_of_memory)
    live.take("ring", WORDS[:4], finish, Counts(5, 4), (None, 0))
    assert (sink.text, sink.token_ids, live.sink.counts) == ("ring", WORDS[:4], Counts(5, 4))
    assert sink.finish == (None if is_cut else finish)
    assert (sink.error is not None and sink.error.code) == ("engine_restarted" if is_cut else False)


def test_an_answer_as_long_as_it_may_be_is_not_cut() -> None:
    """It has had all its tokens in the smaller pool too."""
    live = choice("a", max_tokens=4)
    sink = sink_of(live)
    live.expect_cut(short_of_memory)
    live.take("ring", WORDS[:4], {"type": "length"}, Counts(5, 4), (None, 0))
    assert (sink.finish, sink.error) == ({"type": "length"}, None)
