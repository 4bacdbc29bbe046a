"""A screening that throws releases nothing more, or, where the server fails open, everything."""

from __future__ import annotations

from typing import Any, cast

import pytest

from app.core import Counts, Delta
from app.safety.stream.choice_screen import ChoiceScreen, StreamState
from app.safety.stream.stream_screen import Screening
from app.safety.verdict import ScreenFailed, Verdict


class Choice:
    """A choice that holds all that it reads and throws at one place; its queue and its doubt are itself."""

    def __init__(self, throws: str) -> None:
        self._throws = throws
        self._deltas: list[Delta] = []
        self.held = self.doubt = self

    def read(self, delta: Delta) -> StreamState:
        """See ChoiceScreen."""
        self._pass("read" if delta.text == "bad" else "")
        self._deltas.append(delta)
        return StreamState.HELD

    def release(self) -> list[Delta]:
        """See ChoiceScreen."""
        return []

    def drop(self) -> list[Delta]:
        """See HeldDeltas."""
        held, self._deltas = self._deltas, []
        return held

    def break_off(self) -> list[Delta]:
        """See ChoiceScreen."""
        self._pass("break_off")
        return self.drop()

    def verdict(self) -> Verdict:
        """See ChoiceDoubt."""
        self._pass("verdict")
        return Verdict(None, None, 0.0, 1.0, "stream", "policy")

    def _pass(self, place: str) -> None:
        if place == self._throws:
            raise RuntimeError(place)


def word(text: str, tokens: int) -> Delta:
    """A delta of one token."""
    return Delta(0, "text", text, (tokens,), Counts(1, tokens))


def screening(throws: str, broken: list[str], **options: Any) -> Screening:
    """The screening of one such choice."""
    choice = cast("ChoiceScreen", Choice(throws))
    return Screening([choice], on_broken=lambda exc: broken.append(str(exc)), **options)


def test_what_is_held_is_released_to_no_one():
    """Nor anything that comes later; the failure is reported once."""
    broken: list[str] = []
    screen = screening("read", broken)
    assert screen.feed(word("good", 1)) == []
    for text in ("bad", "good"):
        with pytest.raises(ScreenFailed):
            screen.feed(word(text, 2))
    assert (broken, screen.broken, screen.take_releasable(), screen.verdicts()) == (["read"], True, (), [])


def test_a_server_that_fails_open_releases_all_of_it_in_order():
    """What was held, what broke it, and what follows."""
    broken: list[str] = []
    screen = screening("read", broken, fail_open=True)
    words = [word("good", 1), word("bad", 2), word("good", 3)]
    assert [released for delta in words for released in screen.feed(delta)] == words
    assert broken == ["read"]


def test_an_answer_that_broke_off_ends_there_where_its_screen_throws():
    """It has an error already; nothing is released."""
    broken: list[str] = []
    screen = screening("break_off", broken)
    screen.feed(word("good", 1))
    assert screen.take_releasable() == ()
    assert broken == ["break_off"]


def test_verdicts_that_cannot_be_had_do_not_undo_an_answer():
    """Every delta was screened; there are none to report."""
    broken: list[str] = []
    screen = screening("verdict", broken)
    assert screen.verdicts() == []
    assert broken == ["verdict"]


def test_a_screening_that_could_not_be_made_lets_nothing_pass():
    """Unless the server fails open."""
    with pytest.raises(ScreenFailed):
        Screening(broken=True).feed(word("good", 1))
    assert Screening(broken=True, fail_open=True).feed(word("good", 1)) == [word("good", 1)]
