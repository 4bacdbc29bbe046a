"""Errors of a checked file in words: where, what is there, what is allowed."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.toml_tables import Location, problems, together


class Inner(BaseModel):
    """A table within a table."""

    model_config = ConfigDict(extra="forbid", strict=True)
    rate: float = Field(default=0.5, le=1)


class Outer(BaseModel):
    """A file."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(description="what it is called")
    from_day: str = Field(default="", alias="from")
    inner: Inner = Inner()
    listed: list[float] = []


def said(document: dict[str, object], **words: str) -> list[str]:
    """The problems of a document."""
    with pytest.raises(ValidationError) as refused:
        Outer.model_validate(document)

    def table_at(location: Location) -> type[BaseModel]:
        return Inner if location[:1] == ("inner",) else Outer

    return problems(refused.value, table_at, words=words)


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ({}, "name: is missing; what it is called"),
        ({"name": "x", "inner": 1}, "inner: expected a table, got 1"),
        ({"name": "x", "inner": ["a secret"]}, "inner: expected a table, got a list"),
        ({"name": "x", "listed": {"a": "secret"}}, "listed: expected a list, got a table"),
        ({"name": "x", "listed": "a secret"}, "listed: expected a list, got a text"),
        ({"name": "x", "inner": {"rate": "1"}}, "inner.rate: expected a number, got '1'"),
        ({"name": "x", "inner": {"rate": 2}}, "inner.rate: Input should be less than or equal to 1, got 2"),
        ({"name": "x", "listed": [1, None]}, "listed.entry 2: expected a number, got None"),
        ({"name": "x", "inner": {"other": 2}}, "inner: unknown key 'other'; there are rate"),
        (
            {"name": "x", "frm": 2},
            "top level: unknown key 'frm' (did you mean 'from'?); there are name, from, inner, listed",
        ),
    ],
)
def test_a_problem_has_its_place_its_value_and_what_is_allowed(document: dict[str, object], line: str):
    """Keys are as the file has them, entries of a list are counted from 1."""
    assert said(document) == [line]


def test_a_schema_has_words_of_its_own_for_what_it_expects():
    """By pydantic's type of error."""
    words = {"less_than_equal": "must be 0 to 1"}
    assert said({"name": "x", "inner": {"rate": 2}}, **words) == ["inner.rate: must be 0 to 1, got 2"]


def test_a_long_value_is_cut():
    """A message of a line stays one."""
    [line] = said({"name": ["word"] * 10_000})
    assert len(line) < 150


def test_a_single_problem_is_the_message():
    """Several have a line each, under their number."""
    assert together(["a"]) == "a"
    assert together(["a", "b"]) == "2 problems\n  a\n  b"
