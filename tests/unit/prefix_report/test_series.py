"""A prompt's editions: what of each stays the same, and the hit rate, which falls once before it rises."""

from __future__ import annotations

from typing import Any

from app.core import ChatRequest, Prompt
from app.prefix_report.series import (
    HEAD_TOKENS,
    PromptEdition,
    PromptSeries,
    SeriesKey,
    StablePart,
    estimate_of,
    stable_of,
)

SYSTEM = {"role": "system", "content": "Be good."}


def user(content: Any = "hi") -> dict[str, Any]:
    """A message of the user's."""
    return {"role": "user", "content": content}


def request(*messages: dict[str, Any], **body: Any) -> ChatRequest:
    """A request of these messages."""
    return ChatRequest("chatcmpl-1", "ann", "llama", {"messages": list(messages), **body}, 0)


def prompt(*token_ids: int, unbilled: int = 0) -> Prompt:
    """A rendered prompt."""
    return Prompt(token_ids, 10, None, unbilled_tokens=unbilled)


def edition(estimate: int = 0, series: PromptSeries | None = None) -> PromptEdition:
    """An edition of which no prompt was seen."""
    series = series or PromptSeries(SeriesKey("ann", None, "llama"), "s1")
    return PromptEdition(series, StablePart("Be good.", b""), "", 0, 0.0, estimate)


def test_stable_part_is_what_stands_before_the_users_words():
    """All system messages that a request begins with, and its tools."""
    developer = {"role": "developer", "content": [{"type": "text", "text": "And kind."}]}
    assert stable_of({"messages": [SYSTEM, user()]}) == StablePart("Be good.", b"")
    assert stable_of({"messages": [SYSTEM]}).text == "Be good."
    assert stable_of({"messages": [SYSTEM, developer, user(), SYSTEM]}).text == "Be good.\nAnd kind."
    assert stable_of({"messages": [SYSTEM, developer]}).text == "Be good.\nAnd kind."
    assert stable_of({"messages": [user(), SYSTEM]}).text == ""
    assert stable_of({"messages": [], "tools": [{"a": 1}]}) == StablePart("", b'[{"a":1}]')


def test_prompts_stay_the_same_up_to_where_two_of_them_part():
    """Until then the estimate is what is expected."""
    made = edition(estimate=2)
    made.set_reference(request(SYSTEM, user("first")), prompt(1, 2, 3, 40, 41), 0.0)
    assert made.expected == 2
    assert made.compare(request(SYSTEM, user("second")), prompt(1, 2, 3, 50)) is None
    assert made.expected == 3


def test_prompt_that_parts_within_what_stayed_the_same_was_rendered_differently():
    """The token is told at which it does."""
    made = edition(estimate=6)
    made.set_reference(request(SYSTEM, user("first")), prompt(1, 2, 3, 4, 5, 6, 40), 0.0)
    made.compare(request(SYSTEM, user("second")), prompt(1, 2, 3, 4, 5, 6, 50))
    assert made.compare(request(SYSTEM, user("third")), prompt(1, 9, 9, 9, 9, 9, 60)) == 1
    assert made.expected == 6


def test_users_words_that_begin_alike_are_no_part_of_what_stays():
    """The next that differs shows where they began."""
    made = edition(estimate=3)
    made.set_reference(request(SYSTEM, user("aab")), prompt(1, 2, 3, 7, 7, 8), 0.0)
    made.compare(request(SYSTEM, user("aac")), prompt(1, 2, 3, 7, 7, 9))
    assert made.expected == 5
    assert made.compare(request(SYSTEM, user("xyz")), prompt(1, 2, 3, 6)) is None
    assert made.expected == 3


def test_ids_of_images_can_be_compared_with_those_of_text():
    """They are wider; ids that no integer holds are not compared."""
    made = edition()
    made.set_reference(request(user()), prompt(1, 2, 3), 0.0)
    assert made.compare(request(user("x")), prompt(1, 2, 1 << 40)) is None
    assert made.expected == 2
    other = edition()
    other.set_reference(request(user()), prompt(1 << 70), 0.0)
    assert other.head is None
    assert other.compare(request(user()), prompt(1)) is None
    made.set_reference(request(user()), prompt(1, 2, 3), 0.0)
    assert made.compare(request(user()), prompt(1, 1 << 70)) is None


def test_head_of_a_long_prompt_is_compared():
    """Memory is bounded."""
    made = edition()
    made.set_reference(request(user()), Prompt(range(HEAD_TOKENS + 1), 10, None), 0.0)
    assert made.head is not None
    assert len(made.head) == HEAD_TOKENS
    assert made.size_bytes > 4 * HEAD_TOKENS


def test_reason_for_another_rendering_is_the_parameter_that_changed():
    """The operator's own words first; where nothing changed it is the template."""
    made = edition()
    made.set_reference(request(user(), reasoning_effort="low"), prompt(1, 2), 0.0)
    assert made.changed_option(request(user(), reasoning_effort="high"), prompt(1)) == "reasoning_effort"
    assert made.changed_option(request(user(), reasoning_effort="low"), prompt(1)) == "template"
    assert made.changed_option(request(user()), prompt(1, unbilled=1)) == "policy"


def test_estimate_is_the_share_of_the_bytes():
    """The operator's words are all of it; images tell nothing of bytes."""
    stable = StablePart("x" * 30, b"")
    system = {"role": "system", "content": "x" * 30}
    assert estimate_of(request(system, user("y" * 10)), prompt(*range(40)), stable) == 30
    assert estimate_of(request(system, user("y" * 10)), prompt(*range(44), unbilled=4), stable) == 34
    image = user([{"type": "image_url", "image_url": {"url": "data:,"}}])
    assert estimate_of(request(system, image), prompt(*range(40)), stable) == 0
    assert estimate_of(request(user("y")), prompt(1), StablePart("", b"")) == 0


def series() -> PromptSeries:
    """A series of which nothing was seen."""
    return PromptSeries(SeriesKey("ann", None, "llama"), "s1")


def falls(made: PromptSeries, *rates: float) -> list[int]:
    """The requests, from 0, at which the rate is told to have fallen."""
    return [number for number, rate in enumerate(rates) if made.rated(rate)]


def test_rate_that_falls_to_half_of_what_was_usual_is_told_once():
    """However long it stays there."""
    made = series()
    assert falls(made, *[1.0] * 40) == []
    assert len(falls(made, *[0.0] * 12)) == 1
    assert made.fallen


def test_rate_that_has_risen_again_can_fall_again():
    """To three quarters of what is usual."""
    made = series()
    falls(made, *[1.0] * 40, *[0.0] * 12)
    assert falls(made, *[1.0] * 60) == []
    assert not made.fallen
    assert len(falls(made, *[0.0] * 20)) == 1


def test_few_requests_are_not_judged():
    """A series begins with an empty cache."""
    assert falls(series(), *[0.0] * 16) == []


def test_newest_edition_is_the_one_that_was_seen_last():
    """Not the one that was first seen last."""
    made = series()
    for seen_s in (3.0, 5.0, 4.0):
        added = edition(series=made)
        added.touch(seen_s)
        made.editions.append(added)
    assert made.newest is made.editions[1]
