"""How often one choice is sent, and which error ends it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from app.engine.http.generation import MAX_DEATHS, MAX_MOVES, MAX_UNREACHED, Attempts
from app.errors import EngineFailed, EngineNotReady, ServingError

SERVERS: list[Any] = [cast("Any", name) for name in "abcdefghij"]


def code(error: ServingError | None) -> str | None:
    """The code of an error."""
    return None if error is None else error.code


def test_what_no_server_accepts_is_tried_a_few_times() -> None:
    """Then its caller is told to come again: nothing has been generated."""
    attempts = Attempts(resume_s=100)
    for number in range(MAX_UNREACHED):
        attempts.sent(SERVERS[number])
        attempts.missed("no connection", 0)
        error = attempts.verdict(0, begun=False)
        assert (error is None) == (number < MAX_UNREACHED - 1)
    assert isinstance(error, EngineNotReady)
    assert error.retry_after_s
    assert attempts.left_s(0) == 0


def test_what_has_lost_its_server_waits_for_another() -> None:
    """As long as is set, counted from the loss, less the wait for others; a server ends it."""
    attempts = Attempts(resume_s=10)
    attempts.sent(SERVERS[0])
    assert attempts.advanced() is None
    attempts.died(SERVERS[0], "broke off", 100)
    assert attempts.has_moved
    assert (attempts.left_s(100), attempts.left_s(104)) == (10, 6)
    attempts.missed("no connection", 105)
    assert attempts.verdict(109, begun=True) is None
    attempts.queued(3)
    assert attempts.left_s(109) == 4
    error = attempts.verdict(114, begun=True)
    assert isinstance(error, EngineFailed)
    assert code(error) == "engine_failed"
    attempts.accepted()
    assert attempts.left_s(114) == 0
    assert attempts.advanced() == 100
    assert attempts.advanced() is None


def test_what_was_accepted_and_then_refused_has_the_full_time_again() -> None:
    """However long the second server had queued it."""
    attempts = Attempts(resume_s=10)
    attempts.died(SERVERS[0], "broke off", 100)
    attempts.accepted()
    attempts.missed("refused with status 503", 150)
    assert attempts.verdict(150, begun=True) is None
    assert (attempts.left_s(150), attempts.left_s(156)) == (10, 4)
    attempts.missed("no connection", 156)
    assert attempts.left_s(156) == 4


def test_without_a_time_to_wait_nothing_moves() -> None:
    """The answer ends with its server."""
    attempts = Attempts(resume_s=0)
    attempts.sent(SERVERS[0])
    attempts.advanced()
    attempts.died(SERVERS[0], "broke off", 0)
    assert code(attempts.verdict(0, begun=True)) == "engine_failed"


def test_it_avoids_the_server_that_it_lost() -> None:
    """Until another one has given it a token."""
    attempts = Attempts(resume_s=10)
    attempts.sent(SERVERS[0])
    attempts.advanced()
    assert attempts.tried == []
    attempts.died(SERVERS[0], "broke off", 0)
    assert attempts.tried == [SERVERS[0]]


@pytest.mark.parametrize("with_tokens", [False, True])
def test_deaths_without_a_token_in_between_are_few(*, with_tokens: bool) -> None:
    """A token in between says that the request does not kill; then only the number of all moves counts."""
    attempts, deaths = Attempts(resume_s=100), 0
    error: ServingError | None = None
    while error is None:
        attempts.sent(SERVERS[deaths])
        if with_tokens:
            attempts.advanced()
        attempts.died(SERVERS[deaths], "broke off", 0)
        deaths += 1
        error = attempts.verdict(0, begun=True)
    assert deaths == (MAX_MOVES if with_tokens else MAX_DEATHS)
    assert code(error) == "engine_restarted"
