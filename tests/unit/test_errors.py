"""Errors: each code has one status, and the body of an error never carries megabytes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.errors import CODES, BadRequest, ContentFiltered, Overloaded, ServingError, Unavailable


def kinds(kind: type[ServingError] = ServingError) -> Iterator[type[ServingError]]:
    """The class and all below it."""
    yield kind
    for narrower in kind.__subclasses__():
        yield from kinds(narrower)


@pytest.mark.parametrize("kind", sorted(kinds(), key=repr))
def test_code_of_a_class_comes_with_the_status_of_the_class(kind: type[ServingError]):
    """Both are in the documented table."""
    assert CODES[kind.default_code].status == kind.status


@pytest.mark.parametrize("kind", [kind for kind in kinds() if issubclass(kind, Unavailable)])
def test_lack_of_room_says_when_to_come_back(kind: type[ServingError]):
    """Unless its raiser knows better."""
    assert kind.default_retry_after_s is None or kind.default_retry_after_s > 0
    assert Overloaded("full", retry_after_s=7).retry_after_s == 7


def test_what_a_caller_sent_is_quoted_without_its_middle():
    """A message has 500 characters and its parameter's name 100, whatever was sent."""
    error = BadRequest("a" * 300 + "b" * 1000 + "c" * 300, param="p" * 1000)
    assert error.message == "a" * 250 + "…" + "c" * 250
    assert error.param == "p" * 50 + "…" + "p" * 50
    assert BadRequest("x" * 500).message == "x" * 500


def test_body_is_openais():
    """Message, type, parameter and code; a class's own code where none is named."""
    assert BadRequest("no", param="n").as_body() == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    }
    assert BadRequest("no", code="invalid_json").code == "invalid_json"


def test_moderation_stands_beside_the_error_of_a_blocked_prompt():
    """Not in it; without one the body is any error's."""
    assert ContentFiltered("no", {"input": 1}).as_body()["moderation"] == {"input": 1}
    assert "moderation" not in ContentFiltered("no").as_body()
