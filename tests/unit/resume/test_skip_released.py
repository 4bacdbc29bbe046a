"""What was released before is dropped, to the character, and never rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from app.core import Counts, Delta, FinishReason, ToolCall
from app.journal.entry import Progress
from app.resume.skip_released import OutputMismatch, SkipReleased
from app.safety.session.session import PassThrough
from app.stream.ring import Ring
from app.stream.token_stream import TokenStream
from tests.support.generations import HoldingScreen
from tests.support.replays import asked, opened


def said(
    text: str, tokens: int, choice: int = 0, *, finish: FinishReason | None = None, **fields: Any
) -> Delta:
    """A delta of a text, after which the choice has so many tokens."""
    channel = fields.pop("channel", "text")
    return Delta(choice, channel, text, (), Counts(5, tokens), finish, **fields)


def released(*deltas: Delta, logprobs: bool = False) -> TokenStream:
    """A stream that has released these."""
    stream = opened(asked(n=2, logprobs=logprobs))
    for delta in deltas:
        stream.append(delta)
    return stream


def resumed(*before: Delta, screen: Any = None) -> SkipReleased:
    """The screen of an answer of which these were released."""
    counts = {delta.choice: delta.counts for delta in before}
    logprobs = any(delta.logprobs for delta in before)
    return SkipReleased(screen or PassThrough(), released(*before, logprobs=logprobs).in_ring(), counts)


def texts(deltas: Sequence[Delta]) -> list[str]:
    """What they say."""
    return [delta.text for delta in deltas]


async def test_the_first_characters_are_dropped_however_they_come():
    """A delta that reaches beyond them comes out with its rest, and its own counts."""
    screen = resumed(said("one ", 1), said("two", 2))
    assert screen.feed(said("on", 1)) == []
    assert screen.feed(said("e tw", 2)) == []
    (rest,) = screen.feed(said("o three", 3))
    assert (rest.text, rest.counts.completion_tokens) == (" three", 3)
    assert texts(screen.feed(said(" four", 4))) == [" four"]


async def test_tracks_and_choices_are_told_apart():
    """Reasoning, text and the fragments of each call of each choice."""
    call = ToolCall(0, "call_old", "weather")
    screen = resumed(
        said("hm", 1, channel="reasoning"),
        said("so", 2),
        said("", 3, channel="tool", tool=call),
        said('{"a', 4, channel="tool", tool=ToolCall(0)),
        said("other", 1, 1),
    )
    assert screen.feed(said("hm", 1, channel="reasoning")) == []
    assert screen.feed(said("so", 2)) == []
    assert screen.feed(said("oth", 1, 1)) == []
    assert screen.feed(said("", 3, channel="tool", tool=ToolCall(0, "call_new", "weather"))) == []
    (rest,) = screen.feed(said('{"a": 1}', 5, channel="tool", tool=ToolCall(0)))
    assert (rest.text, rest.tool) == ('": 1}', ToolCall(0))
    second = said("", 6, channel="tool", tool=ToolCall(1, "call_2", "time"))
    assert screen.feed(second) == [second]
    assert texts(screen.feed(said("er choice", 2, 1))) == [" choice"]


async def test_log_probabilities_that_were_released_are_dropped():
    """Entry by entry."""
    first, second = {"token": "a"}, {"token": "b"}
    screen = resumed(said("a", 1, logprobs=[first]))
    (rest,) = screen.feed(said("ab", 2, logprobs=[first, second]))
    assert (rest.text, rest.logprobs) == ("b", [second])


async def test_an_ended_choice_says_nothing_more():
    """Its end was released; the others go on."""
    screen = resumed(said("all", 1), said("", 1, finish="stop"), said("b", 1, 1))
    assert screen.feed(said("all", 1)) == []
    assert screen.feed(said("", 1, finish="stop")) == []
    assert texts(screen.feed(said("bc", 2, 1))) == ["c"]


@pytest.mark.parametrize(
    "delta",
    [
        said("Two", 1),
        said("one three", 3),
        said("one t", 2, finish="stop"),
        said("what", 1, channel="reasoning"),
        said("", 1, channel="tool", tool=ToolCall(0, "call", "other")),
    ],
    ids=["other text", "other later", "a shorter answer", "another channel", "another tool"],
)
async def test_what_differs_ends_the_answer(delta: Delta):
    """Nothing of it is released."""
    call = said("", 3, channel="tool", tool=ToolCall(0, "call", "weather"))
    screen = resumed(said("one two", 2), call)
    with pytest.raises(OutputMismatch) as diverged:
        screen.feed(delta)
    assert diverged.value.code == "interrupted"
    assert "the regenerated output diverged from what was sent" in diverged.value.message


async def test_empty_deltas_are_dropped_until_their_counts_are_new():
    """Counts of what was released never fall."""
    screen = resumed(said("ab", 3))
    assert screen.feed(said("", 1)) == []
    assert screen.feed(said("ab", 2)) == []
    assert [delta.counts.completion_tokens for delta in screen.feed(said("", 4))] == [4]


async def test_lone_surrogates_come_again_as_they_were_written():
    """The ring has a question mark for each."""
    screen = resumed(said("a\ud800b", 1))
    assert texts(screen.feed(said("a\ud800bc", 2))) == ["c"]


async def test_a_screen_that_halts_within_what_was_released_halts_at_once():
    """And what it holds back is not released by the end of what came before."""
    screen = resumed(said("fine ", 1), said("text", 2), screen=HoldingScreen())
    assert screen.feed(said("fine ", 1)) == []
    assert not screen.feed(said("harm", 2))
    assert screen.halted is not None


@pytest.mark.parametrize(("text", "rest"), [("held on", [" on"]), ("held", []), ("else", [])])
async def test_what_is_held_back_at_a_failure_is_released_if_it_is_new(text: str, rest: list[str]):
    """Of an answer that differs, nothing."""
    screen = resumed(said("held", 2), screen=HoldingScreen(held=[said(text, 2)]))
    assert texts(screen.take_releasable()) == rest


class WithholdingScreen(HoldingScreen):
    """Drops at an end what it holds, as where a span has begun at an end that the caller chose."""

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """See AnswerScreen."""
        if delta.finish_reason is None:
            return ()
        return [delta._replace(text="", counts=delta.counts._replace(completion_tokens=0))]


async def test_what_was_released_may_be_withheld_with_what_came_in_one_step():
    """An engine hands over all of the earlier part at once: the answer ends as it would have."""
    screen = resumed(said("we ", 1), said("eat ", 2), screen=WithholdingScreen())
    assert screen.feed(said("we eat red", 3)) == []
    (end,) = screen.feed(said(" apple", 4, finish="length"))
    assert (end.text, end.finish_reason, end.counts) == ("", "length", Counts(5, 2))


async def test_a_shorter_answer_is_another_one_though_it_is_withheld():
    """The screen was not given all that was released."""
    screen = resumed(said("we ", 1), said("eat ", 2), screen=WithholdingScreen())
    assert screen.feed(said("we ", 1)) == []
    with pytest.raises(OutputMismatch):
        screen.feed(said("eat", 2, finish="length"))


def test_the_prompt_costs_nothing_more():
    """Its counts stay what they were, whatever was cached then and now."""
    progress = Progress([[1, 2]], {0: Counts(10, 2, 4)})
    again = Delta(0, "text", "a", (1,), Counts(10, 1, 8))
    assert progress.with_earlier_prompt(again).counts == Counts(10, 1, 4)
    assert not progress.is_reached(again)
    assert progress.is_reached(again._replace(counts=Counts(10, 2, 8)))
    assert progress.with_earlier_prompt(again._replace(choice=1)).counts == Counts(10, 1, 8)
    assert progress.is_reached(again._replace(choice=1))


def test_a_ring_that_goes_on_counts_all_choices():
    """The counts at an event are those of all, also of choices that have not gone on yet."""
    ring = Ring(1 << 20, counts=True)
    ring.continue_from({0: Counts(5, 3), 1: Counts(5, 4)})
    ring.append(said("x", 5))
    _, content = ring.after(0)
    assert isinstance(content, Sequence)
    assert content[0].counts == Counts(5, 9)
