"""The query of a listing: its parameters, and the length of a page."""

import pytest
from starlette.requests import Request

from app.api.openai.listing import DEFAULT_LIMIT, MAX_LIMIT, check_names, limit_of
from app.errors import BadRequest


def request(query: str) -> Request:
    """A request with a query string."""
    return Request({"type": "http", "query_string": query.encode(), "headers": []})


@pytest.mark.parametrize(
    ("query", "limit"), [("", DEFAULT_LIMIT), ("limit=1", 1), (f"limit={MAX_LIMIT}", MAX_LIMIT)]
)
def test_a_page_has_the_length_asked_for(query: str, limit: int) -> None:
    """Without one it has the default."""
    assert limit_of(request(query)) == limit


@pytest.mark.parametrize("value", ["0", "101", "-1", "1.0", "", "ten", "\u0661", "9" * 5000])
def test_another_length_is_refused_with_what_is_allowed(value: str) -> None:
    """The error names the parameter and the range."""
    with pytest.raises(BadRequest, match="a number from 1 to 100") as refused:
        limit_of(request(f"limit={value}"))
    assert refused.value.param == "limit"


def test_an_unknown_parameter_is_refused_with_those_that_there_are() -> None:
    """A misspelt one is not ignored."""
    check_names(request("limit=1&after=x"), ("limit", "after"))
    with pytest.raises(BadRequest, match="'affter'; this route takes limit, after") as refused:
        check_names(request("affter=x"), ("limit", "after"))
    assert (refused.value.code, refused.value.param) == ("unknown_parameter", "affter")
    with pytest.raises(BadRequest, match="this route takes none"):
        check_names(request("limit=1"), ())
