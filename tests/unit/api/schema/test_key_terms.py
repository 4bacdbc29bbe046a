"""The terms of a key as JSON has them: read, refused by name, and shown again."""

from typing import Any

import pytest

from app.api.schema.key_terms import DEFAULT_OVERLAP_S, as_json, read_new, read_overlap_us, read_terms
from app.errors import BadRequest
from tests.support.admissions import key_of

NOW_US = 1_700_000_000_000_000


@pytest.mark.parametrize(
    ("body", "terms"),
    [
        ({"rpm": 5, "tpm": 10, "max_streams": 1}, {"rpm": 5, "tpm": 10, "max_streams": 1}),
        ({"budget_usd": 1.5}, {"budget_micro_usd": 1_500_000}),
        ({"budget_usd": 0.000001}, {"budget_micro_usd": 1}),
        ({"rpm": None, "models": None}, {"rpm": None, "models": None}),
        ({"models": ["a", "b"]}, {"models": ("a", "b")}),
        ({"tier": "batch", "weight": 2}, {"tier": "batch", "weight": 2.0}),
    ],
)
def test_terms_are_read_as_the_store_has_them(body: dict[str, Any], terms: dict[str, Any]) -> None:
    """Money in micro-dollars; null is no limit; what is not given is not there."""
    assert read_terms(body, NOW_US) == terms


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"rpn": 5}, "rpn"),
        ({"rpm": 0}, "rpm"),
        ({"rpm": "5"}, "rpm"),
        ({"rpm": True}, "rpm"),
        ({"rpm": 1.5}, "rpm"),
        ({"tier": "fast"}, "tier"),
        ({"tier": None}, "tier"),
        ({"weight": 0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"budget_usd": -1}, "budget_usd"),
        ({"budget_usd": 0.0000001}, "budget_usd"),
        ({"models": []}, "models"),
        ({"models": "a"}, "models"),
        ({"expires_at": 1}, "expires_at"),
        ({"name": ""}, "name"),
        ({"name": "x" * 101}, "name"),
    ],
    ids=str,
)
def test_other_values_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    """The error says which of them, and what it takes."""
    with pytest.raises(BadRequest) as refused:
        read_terms(body, NOW_US)
    assert refused.value.param == param
    assert param in refused.value.message


def test_a_new_key_needs_a_name_and_may_have_an_owner() -> None:
    """Without an owner it is its own."""
    terms, owner = read_new({"name": "ann", "owner": "team"}, NOW_US)
    assert (terms.name, owner) == ("ann", "team")
    assert read_new({"name": "ann"}, NOW_US)[1] is None
    with pytest.raises(BadRequest, match="name is required"):
        read_new({"rpm": 1}, NOW_US)


def test_the_overlap_of_a_rotation_is_a_day_where_nothing_is_said() -> None:
    """In microseconds; 0 ends the old secrets at once."""
    assert read_overlap_us({}) == DEFAULT_OVERLAP_S * 1_000_000
    assert read_overlap_us({"overlap_s": 0}) == 0
    for body in ({"overlap_s": -1}, {"overlap_s": "1"}, {"overlap": 1}):
        with pytest.raises(BadRequest):
            read_overlap_us(body)


def test_what_is_shown_of_a_key_holds_no_secret() -> None:
    """Its terms under their names, its status, and no digest."""
    shown = as_json(key_of("ann"), NOW_US)
    assert shown["status"] == "active"
    assert not {"secrets", "digest", "secret"} & set(shown)
